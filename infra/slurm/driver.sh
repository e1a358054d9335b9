#!/usr/bin/env bash
# The command of penstock.sbatch as a Ray job's own process: its number and its exit code are told to
# the script, as Ray says of a job only whether it failed.
set -euo pipefail

code=0
# shellcheck disable=SC2016  # for the inner shell, which becomes the command
bash -c 'echo $$ >"$0" && exec "$@"' "$RAY_CA/driver" "$@" || code=$?
echo "$code" >"$RAY_CA/exit-code"
exit "$code"
