#!/bin/sh
# What each container does first: secrets, which come as files of $PENSTOCK_SECRETS, go where their
# programs look for them, and nobody else may read them there. Then it becomes the command.
set -eu
umask 077

secret() {
    cat "$PENSTOCK_SECRETS/$1"
}

# libpq passes over a file that others may read, as mounted ones often are.
if [ -f "$PENSTOCK_SECRETS/pgpass" ]; then
    secret pgpass >"$HOME/.pgpass"
fi
if [ -n "${MLFLOW_TRACKING_USERNAME:-}" ]; then
    MLFLOW_TRACKING_PASSWORD=$(secret mlflow-password)
    export MLFLOW_TRACKING_PASSWORD
fi
# Python knows one bundle only: who trusts our own authority goes on trusting the world's.
if [ -f "$PENSTOCK_SECRETS/ca.crt" ]; then
    cat /etc/ssl/certs/ca-certificates.crt "$PENSTOCK_SECRETS/ca.crt" >"$HOME/ca-bundle.crt"
    export SSL_CERT_FILE="$HOME/ca-bundle.crt"
fi
# A team's own, by take-project.sh; without it the project is the image's checkout of Penstock.
if [ -d "${PENSTOCK_HOME:-}/project" ]; then
    export PENSTOCK_PROJECT="$PENSTOCK_HOME/project"
fi

case ${PENSTOCK_PART:-} in
airflow)
    mkdir -p "$PENSTOCK_HOME/services"
    python -m pipelines.platform.airflow_config
    ;;
mlflow)
    login=mlflow.server.auth:authenticate_request_basic_auth unless_granted=NO_PERMISSIONS
    if [ -n "${PENSTOCK_OIDC_ISSUER:-}" ]; then # users of two groups come, and all of them may read
        login=infra.kubernetes.oidc.mlflow_login:authenticate unless_granted=READ
    fi
    export MLFLOW_AUTH_CONFIG_PATH="$HOME/mlflow-auth.ini"
    {
        echo "[mlflow]"
        echo "database_uri = $MLFLOW_BACKEND_STORE_URI"
        echo "admin_username = admin"
        echo "default_permission = $unless_granted"
        echo "authorization_function = $login"
    } >"$MLFLOW_AUTH_CONFIG_PATH"
    MLFLOW_AUTH_ADMIN_PASSWORD=$(secret mlflow-password)
    MLFLOW_FLASK_SERVER_SECRET_KEY=$(secret mlflow-session)
    export MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY
    ;;
esac
exec "$@"
