#!/bin/sh
# Makes Airflow's user admin, with the password of the file airflow-password, where there is none.
# The password goes through a pipe: in an argument every process could read it.
set -eu
if airflow users list --output plain 2>/dev/null | awk '{print $2}' | grep -qx admin; then
    exit 0
fi
password=$(cat "$PENSTOCK_SECRETS/airflow-password")
printf '%s\n%s\n' "$password" "$password" |
    airflow users create --username admin --role Admin \
        --firstname Penstock --lastname Admin --email admin@localhost
