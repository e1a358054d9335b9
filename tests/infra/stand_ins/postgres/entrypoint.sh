#!/bin/bash
# What the official image's entrypoint does with the variables that Compose sets.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA" /var/run/postgresql
    chown postgres:postgres "$PGDATA" /var/run/postgresql
    chmod 700 "$PGDATA"
    # What reads the password runs as postgres, whose the mounted file is not.
    install --owner=postgres --mode=0400 "$POSTGRES_PASSWORD_FILE" /var/run/postgresql/password
    exec setpriv --reuid=postgres --regid=postgres --init-groups bash "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    # shellcheck disable=SC2086  # several options
    initdb --username="$POSTGRES_USER" --pwfile=/var/run/postgresql/password ${POSTGRES_INITDB_ARGS:-}
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl -D "$PGDATA" -o "-c listen_addresses=''" -w start
    PGPASSWORD=$(cat /var/run/postgresql/password)
    export PGPASSWORD
    createdb -U "$POSTGRES_USER" -h /var/run/postgresql "$POSTGRES_USER"
    for file in /docker-entrypoint-initdb.d/*.sql; do
        psql -U "$POSTGRES_USER" -h /var/run/postgresql -v ON_ERROR_STOP=1 -f "$file"
    done
    pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec "$@" -c listen_addresses='*'
