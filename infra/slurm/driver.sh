#!/usr/bin/env bash
# The command of penstock.sbatch as a Ray job's own process: its number and its exit code are told to
# the script, as Ray says of a job only whether it failed.
set -euo pipefail

# Where a command says which run it has open in MLflow: the script closes that of one that is killed.
export PENSTOCK_OPEN_RUN=$RAY_CA/open-run
code=0
# In a session of its own: a second after Ray's own process Ray kills the group of the job's, in which
# the command would still say how its run has ended.
# shellcheck disable=SC2016  # for the inner shell, which becomes the command
setsid --wait bash -c 'echo $$ >"$0" && exec "$@"' "$RAY_CA/driver" "$@" || code=$?
echo "$code" >"$RAY_CA/exit-code"
exit "$code"
