#!/usr/bin/env bash
# Builds Kubernetes 1.20 from Debian's source package: bash tests/infra/kubernetes/build.sh FOLDER
# It is the last whose servers Debian has: newer packages hold kubectl alone, which is taken from one,
# as that of 1.20 knows no kustomize components. A second call finds the programs in FOLDER.
set -euo pipefail

folder=$1
version=1.20.2
programs="kube-apiserver kube-controller-manager kube-scheduler kubelet"
all_built() { for each in $programs kubectl; do [ -x "$folder/$each" ] || return 1; done; }
all_built && exit 0

mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
all_built && exit 0
work=$folder/.build
tree=$work/go/src/k8s.io/kubernetes
export PATH=/usr/lib/go-1.19/bin:$PATH
export GOCACHE=$work/cache GOPATH=$work/go GO111MODULE=off GOFLAGS='' CGO_ENABLED=0 HOME=$work/home

# Where this machine's own Debian comes from, asked for sources in lists that are not the machine's.
fetch() {
    mkdir -p "$work/debian/lists/partial" "$HOME"
    cd "$work/debian"
    # shellcheck disable=SC2016  # apt-get's own names
    mirror=$(apt-get indextargets --format '$(SITE)' 'Origin: Debian' 'Codename: bookworm' | head -n 1)
    key="[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    for kind in deb deb-src; do
        echo "$kind $key ${mirror:-http://deb.debian.org/debian} bookworm main"
    done >sources.list
    echo "deb $key ${mirror:-http://deb.debian.org/debian} trixie main" >>sources.list
    chmod -R a+rX "$work"
    apt="-o Dir::Etc::SourceList=$PWD/sources.list -o Dir::Etc::SourceParts=/dev/null
        -o Dir::State::Lists=$PWD/lists -o APT::Sandbox::User=root"
    # shellcheck disable=SC2086  # several options
    apt-get $apt --quiet update
    # shellcheck disable=SC2086
    apt-get $apt --quiet --download-only source kubernetes/bookworm
    # shellcheck disable=SC2086
    apt-get $apt --quiet download golang-github-modern-go-reflect2-dev/bookworm kubectl/trixie
}

unpack() {
    dpkg-deb --extract "$work"/debian/kubectl_*.deb "$work/kubectl"
    cp "$work/kubectl/usr/bin/kubectl" "$folder/"
    rm -rf "$tree"
    mkdir -p "${tree%/*}"
    dpkg-source --no-check -x "$work"/debian/kubernetes_*.dsc "$tree"
    # The vendored one asks Go 1.18 and newer for what they no longer have, and the server crashes.
    dpkg-deb --extract "$work"/debian/golang-github-modern-go-reflect2-dev_*.deb "$work/reflect2"
    rm -rf "$tree/vendor/github.com/modern-go/reflect2"
    cp -r "$work/reflect2/usr/share/gocode/src/github.com/modern-go/reflect2" \
        "$tree/vendor/github.com/modern-go/"
}

compile() {
    cd "$tree"
    make generated_files GOFLAGS=
    flags="-s -w"
    for package in k8s.io/kubernetes/vendor/k8s.io/component-base/version \
        k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        flags="$flags -X $package.gitVersion=v$version -X $package.gitMajor=1 -X $package.gitMinor=20"
        flags="$flags -X $package.gitTreeState=clean -X $package.buildDate=2021-01-13T00:00:00Z"
    done
    for program in $programs; do
        [ ! -x "$folder/$program" ] || continue
        go build -p 2 -trimpath -ldflags "$flags" -o "$folder/$program.new" "k8s.io/kubernetes/cmd/$program"
        mv "$folder/$program.new" "$folder/$program"
        echo "$program built after $SECONDS s"
    done
}

echo "building Kubernetes $version in $folder: some half hour on two cores"
fetch
unpack
compile
rm -rf "$work"
