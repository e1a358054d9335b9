#!/usr/bin/env bash
# A certificate and the authority that signed it, as cert-manager's secrets hold them:
# bash certificate.sh FOLDER ALTERNATIVE-NAMES
set -euo pipefail

mkdir -p "$1"
cd "$1"
for name in ca tls; do openssl ecparam -name prime256v1 -genkey -noout -out "$name.key"; done
openssl req -x509 -new -key ca.key -subj /CN=penstock -days 2 -out ca.crt
openssl req -new -key tls.key -subj /CN=penstock |
    openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 \
        -extfile <(echo "subjectAltName = $2") -out tls.crt
