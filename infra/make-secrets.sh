#!/usr/bin/env bash
# Makes what is missing in a folder of secrets, one file each, for Compose or to fill a secret store:
#   infra/make-secrets.sh FOLDER
# The folder is its owner's alone; the files may be read by whoever gets them mounted.
set -euo pipefail
umask 077

folder=${1:?usage: make-secrets.sh FOLDER}
mkdir -p "$folder"
chmod 700 "$folder"
cd "$folder"

make() { # NAME COMMAND...: the command's output, once
    local name=$1
    shift
    [ -e "$name" ] || "$@" >"$name"
}

random() { # BYTES, as hexadecimal digits and no line's end, which would be part of the secret
    openssl rand -hex "$1" | tr -d '\n'
}

fernet_key() {
    openssl rand -base64 32 | tr '+/' '-_' | tr -d '\n'
}

passwords() { # as libpq reads them
    printf '*:*:*:penstock:%s\n' "$(cat postgres-password)"
}

key_pair() { # a key of S3, as `id secret`
    echo "$(random 10) $(random 20)"
}

credentials() { # of the role, as AWS's clients read them
    read -r id secret <"s3-key-$1"
    printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$id" "$secret"
}

identity() { # NAME ACTIONS: of the role, as the store reads it
    read -r id secret <"s3-key-$1"
    printf '{"name": "%s", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": %s}' \
        "$1" "$id" "$secret" "$2"
}

identities() { # what each role may: infra/iam says the same to AWS
    printf '{"identities": [%s, %s, %s]}\n' \
        "$(identity airflow '["Read:penstock", "Write:penstock", "List:penstock", "Tagging:penstock"]')" \
        "$(identity ray '["Read:penstock", "Write:penstock", "List:penstock", "Tagging:penstock"]')" \
        "$(identity mlflow '["Read:penstock", "List:penstock"]')"
}

make postgres-password random 24
make pgpass passwords
make airflow-password random 16
make airflow-fernet fernet_key
make airflow-session random 32
make airflow-jwt random 64
make mlflow-password random 16
make mlflow-session random 32
make ray-token random 32
make grafana-password random 16
make redis-password random 32
make model-signing.pem openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256
make model-signing.pem.pub openssl pkey -in model-signing.pem -pubout
for role in airflow ray mlflow postgres; do
    make "s3-key-$role" key_pair
    make "s3-$role" credentials "$role"
done
make s3.json identities
make ca.key openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256
make ca.crt openssl req -x509 -new -key ca.key -days 3650 -subj "/CN=penstock" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
chmod 444 ./*
