#!/usr/bin/env bash
# Ray on one of the hosts of ray-up.yaml, with the cluster's token and a certificate of its own:
#   start-ray.sh --head ADDRESS | --address ADDRESS-OF-THE-HEAD
set -euo pipefail
umask 077

[ $# = 2 ] || { echo "usage: $0 --head ADDRESS | --address ADDRESS-OF-THE-HEAD" >&2 && exit 2; }
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$PWD"
export RAY_CA=${PENSTOCK_SECRETS:-$PWD/infra/ssh/secrets} tls=$HOME/.penstock-tls
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$RAY_CA/ray-token
export RAY_USE_TLS=1 RAY_TLS_SERVER_CERT=$tls/tls.crt RAY_TLS_SERVER_KEY=$tls/tls.key
export RAY_TLS_CA_CERT=$tls/ca.crt
export RAY_START_HOOK=pipelines.platform.ray_start.guard RAY_USAGE_STATS_ENABLED=0
# For where Python starts slowly.
export RAY_raylet_start_wait_time_s=240 RAY_agent_register_timeout_ms=240000

options=(--disable-usage-stats --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0)
if [ "$1" = --head ]; then
    address=$2
    options+=(--head --port=6379 --dashboard-host=127.0.0.1 --dashboard-port=8265)
    bootstrap=$HOME/ray_bootstrap_config.yaml # what `ray up` leaves for the head to raise the others by
    [ ! -e "$bootstrap" ] || options+=("--autoscaling-config=$bootstrap")
else
    # The address that this host has on the way to the head.
    address=$(ip -4 route get "$2" | sed -n 's/.* src \([0-9.]*\).*/\1/p')
    options+=("--address=$2:6379")
fi
infra/images/node-certificate.sh "$tls" "$(hostname)" "$address"
# Ray starts workers through a shell without quoting: a path with spaces would end there.
ln -sfn "$PWD/.venv" "$tls/venv"
ray stop
ulimit -n "$(ulimit -Hn)"
"$tls/venv/bin/python" "$(command -v ray)" start "--node-ip-address=$address" "${options[@]}"
