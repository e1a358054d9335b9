#!/usr/bin/env bash
# A certificate authority for a control plane, and a certificate for each that talks to it:
# bash pki.sh FOLDER ADDRESS
set -euo pipefail

folder=$1 address=$2
umask 077
mkdir -p "$folder"
cd "$folder"

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"; }
signed() { # NAME SUBJECT [ALTERNATIVE NAMES]
    new_key "$1"
    {
        echo "extendedKeyUsage = serverAuth, clientAuth"
        [ -z "${3:-}" ] || echo "subjectAltName = $3"
    } >"$1.extensions"
    openssl req -new -key "$1.key" -subj "$2" |
        openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile "$1.extensions" -out "$1.crt"
}

new_key ca
openssl req -x509 -new -key ca.key -subj /CN=test-authority -days 2 -out ca.crt
signed server /CN=kube-apiserver \
    "IP:$address, IP:127.0.0.1, IP:10.96.0.1, DNS:localhost, DNS:kubernetes.default.svc"
signed admin /O=system:masters/CN=admin
signed controllers /CN=system:kube-controller-manager
signed scheduler /CN=system:kube-scheduler
signed kubelet "/O=system:nodes/CN=system:node:node-1" "IP:$address, DNS:node-1"
openssl genrsa -out accounts.key 2048
