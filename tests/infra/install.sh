#!/usr/bin/env bash
# Installs from Debian what the tests of the infrastructure run: bash tests/infra/install.sh
# A program that tells whether it is there, and Debian's package with it. Without the right to
# install, the tests that need one are skipped and say so.
set -euo pipefail

wanted="ip=iproute2 nft=nftables openssl=openssl
podman=podman buildah=buildah runc=runc mmdebstrap=mmdebstrap
netavark=netavark aardvark-dns=aardvark-dns iptables=iptables
slurmctld=slurmctld slurmd=slurmd sbatch=slurm-client munged=munge
docker-registry=docker-registry
etcd=etcd-server containerd=containerd loopback=containernetworking-plugins
go=golang-1.19-go dpkg-source=dpkg-dev rsync=rsync jq=jq
radosgw=radosgw ceph-mon=ceph-mon ceph-osd=ceph-osd ceph-mgr=ceph-mgr
postgres=postgresql promtool=prometheus"
places=/usr/lib/podman:/usr/lib/cni:/usr/lib/go-1.19/bin:$(echo /usr/lib/postgresql/*/bin)
packages=""
for each in $wanted; do
    PATH=$PATH:/usr/sbin:$places command -v "${each%%=*}" >/dev/null ||
        packages="$packages ${each#*=}"
done
[ -n "$packages" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no right to install$packages: their tests will be skipped"
    exit 0
fi
echo "installing$packages"
# shellcheck disable=SC2086  # several names
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $packages; } >/dev/null ||
    echo "could not be installed:$packages: their tests will be skipped"
