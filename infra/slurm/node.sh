#!/usr/bin/env bash
# One node of the Ray cluster of penstock.sbatch, until the job ends. Slurm starts it on each.
set -euo pipefail
umask 077

tls=${RAY_TLS_SERVER_CERT%/*}
trap 'rm -rf "$tls"' EXIT
address=$(hostname -i)
address=${address%% *}
infra/images/node-certificate.sh "$tls" "$SLURMD_NODENAME" "$address"

options=(--block --disable-usage-stats "--node-ip-address=$address"
    "--num-cpus=$SLURM_CPUS_ON_NODE" "--num-gpus=${SLURM_GPUS_ON_NODE:-0}")
if [ "$SLURMD_NODENAME" = "$PENSTOCK_RAY_HEAD" ]; then
    options+=(--head "--port=$PENSTOCK_RAY_GCS_PORT"
        --dashboard-host=127.0.0.1 "--dashboard-port=$PENSTOCK_RAY_PORT")
else
    head=$PENSTOCK_RAY_HEAD:$PENSTOCK_RAY_GCS_PORT
    # A head answers before its own node is known, and until then another can't join.
    until [[ $(ray status --address "$head" 2>/dev/null) == *node_* ]]; do sleep 1; done
    options+=("--address=$head")
fi
# Not exec: the traps have to run.
trap 'kill $(jobs -p) || true; wait; exit 143' TERM
ray start "${options[@]}" &
wait $!
