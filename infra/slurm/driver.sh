#!/usr/bin/env bash
# The command of penstock.sbatch as a Ray job's own process: its number and its exit code are told to
# the script, as Ray says of a job only whether it failed.
set -euo pipefail

code=0
# In a session of its own: a second after Ray's own process Ray kills the group of the job's, and
# after scancel the command still has to say in MLflow that its run has ended.
# shellcheck disable=SC2016  # for the inner shell, which becomes the command
setsid --wait bash -c 'echo $$ >"$0" && exec "$@"' "$RAY_CA/driver" "$@" || code=$?
echo "$code" >"$RAY_CA/exit-code"
exit "$code"
