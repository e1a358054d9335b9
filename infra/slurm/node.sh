#!/usr/bin/env bash
# One node of the Ray cluster of penstock.sbatch, until the job ends. Slurm starts it on each.
set -euo pipefail
umask 077

own=${RAY_TLS_SERVER_CERT%/*} # certificate, sockets and logs: gone with the job
trap 'rm -rf "$own"' EXIT
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

# Ports that are free, not Ray's fixed ones, which another user's Ray or service may have.
options=(--block --disable-usage-stats "--node-ip-address=$address" "--temp-dir=$own/ray"
    --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0
    "--num-cpus=$SLURM_CPUS_ON_NODE" "--num-gpus=${SLURM_GPUS_ON_NODE:-0}")
if [ "$SLURMD_NODENAME" = "$PENSTOCK_RAY_HEAD" ]; then
    options+=(--head "--port=$PENSTOCK_RAY_GCS_PORT"
        --dashboard-host=127.0.0.1 "--dashboard-port=$PENSTOCK_RAY_PORT")
else
    # By a file, as a thousand nodes that ask a head which starts would keep it from starting.
    until [ -e "$RAY_CA/up-$PENSTOCK_RAY_HEAD" ]; do sleep 1; done
    options+=("--address=$PENSTOCK_RAY_HEAD:$PENSTOCK_RAY_GCS_PORT")
fi
# Ray says so when the node is known, and its agent listens by then.
tell() {
    while IFS= read -r line; do
        printf '%s\n' "$line"
        [[ $line != *"Ray runtime started"* ]] || touch "$RAY_CA/up-$SLURMD_NODENAME"
    done
}
# Not exec: the traps have to run.
trap 'kill $(jobs -p) || true; wait; exit 143' TERM
PYTHONUNBUFFERED=1 ray start "${options[@]}" > >(tell) &
wait $!
