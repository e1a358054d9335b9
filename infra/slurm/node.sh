#!/usr/bin/env bash
# One node of the Ray cluster of penstock.sbatch, until the job ends. Slurm starts it on each.
# Where it fails by itself the script is told, which ends the others, too.
set -euo pipefail
umask 077

own=${RAY_TLS_SERVER_CERT%/*} # certificate, sockets and logs: gone with the job
asked=""

leave() {
    trap '' TERM
    trap - EXIT
    [ -n "$asked" ] || echo "$SLURMD_NODENAME" >>"$RAY_CA/failed" || true
    # shellcheck disable=SC2046  # several numbers
    kill $(jobs -p) 2>/dev/null || true
    while [ -n "$(jobs -pr)" ]; do wait || true; done # which a TERM of before may cut short
    if [ -d "$own/ray/session_latest/logs" ]; then
        mkdir -p "$PENSTOCK_RAY_LOGS"
        tar -C "$own/ray" -czf "$PENSTOCK_RAY_LOGS/$SLURMD_NODENAME.tar.gz" session_latest/logs || true
    fi
    rm -rf "$own"
    exit "$1"
}
trap 'leave $?' EXIT
# One that comes as this leaves already does it all: to exit would cut the leaving short.
trap 'asked=yes; leave 143' TERM

# A node that was lost may have it still; another user's is nothing to write a key to.
rm -rf "$own"
mkdir "$own"
export TMPDIR=$own # of all that Ray starts
# Ray starts workers through a shell without quoting: a path with spaces would end there.
ln -s "$PWD/.venv" "$own/venv"
# The name of a node is often 127.0.1.1 in its own /etc/hosts, where no other node finds it.
if [ -n "${PENSTOCK_RAY_INTERFACE:-}" ]; then
    found=$(ip -4 -o address show dev "$PENSTOCK_RAY_INTERFACE" || true)
    found=$(awk '{sub("/.*", "", $4); print $4}' <<<"$found")
else
    found=$(hostname -i | tr ' ' '\n' && hostname -I | tr ' ' '\n')
    found=$(grep -v -e : -e '^127\.' <<<"$found" || true)
fi
read -r address <<<"$found"
[ -n "$address" ] || {
    echo "error: $SLURMD_NODENAME has no IPv4 address: name an interface in PENSTOCK_RAY_INTERFACE" >&2
    exit 1
}
infra/images/node-certificate.sh "$own" "$SLURMD_NODENAME" "$address"

# Ports that are free, not Ray's fixed ones, which another job's Ray on the node may have.
options=(--block --disable-usage-stats "--node-ip-address=$address" "--temp-dir=$own/ray"
    --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0
    "--num-cpus=$SLURM_CPUS_ON_NODE" "--num-gpus=${SLURM_GPUS_ON_NODE:-0}")
head=""
if [ "$SLURMD_NODENAME" = "$PENSTOCK_RAY_HEAD" ]; then
    read -r gcs dashboard < <(python -c 'import socket
ports = [socket.create_server(("", 0)) for _ in range(2)]
print(*(port.getsockname()[1] for port in ports))')
    options+=(--head "--port=$gcs" --dashboard-host=127.0.0.1 "--dashboard-port=$dashboard")
    gcs=$address:$gcs
    head="$gcs http://127.0.0.1:$dashboard"
else
    # By a file, as a thousand nodes that ask a head which starts would keep it from starting.
    until [ -e "$RAY_CA/head" ]; do
        sleep 1 & # in the background, as a signal would wait for its end
        wait $!
    done
    read -r gcs _ <"$RAY_CA/head"
    options+=("--address=$gcs")
fi
export RAY_ADDRESS=$gcs # some of Ray's own actors look for any Ray on the node, and take another job's
# Ray says so when the node is known, and its agent listens by then.
tell() {
    while IFS= read -r line; do
        printf '%s\n' "$line"
        if [[ $line == *"Ray runtime started"* ]]; then
            [ -z "$head" ] || { echo "$head" >"$RAY_CA/head.new" && mv "$RAY_CA/head.new" "$RAY_CA/head"; }
            touch "$RAY_CA/up-$SLURMD_NODENAME"
        fi
    done
}
# Not exec: the traps have to run.
PYTHONUNBUFFERED=1 "$own/venv/bin/python" "$(command -v ray)" start "${options[@]}" > >(tell) &
wait $!
