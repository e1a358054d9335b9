#!/bin/sh
# What Airflow needs once before its parts start: tables, a user and the pool of GPU jobs.
# Each is left as it is where it is there already.
set -eu
# A name server may be silent at any of the steps, and Compose starts what runs once only once.
if [ "${1:-}" != once ]; then
    for _ in 1 2 3 4; do
        if "$0" once; then exit; fi
        echo "prepare-airflow: the step above failed; all of them again in 5 s" >&2
        sleep 5
    done
    exec "$0" once
fi
# A database that starts, or a name that resolves a moment later, is waited for.
airflow db check --retry 30 --retry-delay 2
airflow db migrate

user=${PENSTOCK_AIRFLOW_USER:-admin}
# The password goes through a pipe: in an argument every process could read it.
if ! airflow users list --output plain | awk '{print $2}' | grep -qx "$user"; then
    password=$(cat "$PENSTOCK_SECRETS/airflow-password")
    printf '%s\n%s\n' "$password" "$password" |
        airflow users create --username "$user" --role Admin \
            --firstname Penstock --lastname Admin --email "$user@localhost"
fi
airflow pools get gpu_jobs >/dev/null 2>&1 ||
    airflow pools set gpu_jobs "${PENSTOCK_GPU_JOBS:-1}" "GPU jobs" --include-deferred
