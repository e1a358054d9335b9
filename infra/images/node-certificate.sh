#!/bin/sh
# A key and a certificate of this node, signed by the cluster's own authority, for the names and
# addresses given:  node-certificate.sh FOLDER NAME...
# The authority is ca.crt and ca.key in $RAY_CA. Ray's processes show it to each other, both ways.
set -eu
umask 077

folder=$1
shift
names=""
for name in "$@" localhost 127.0.0.1; do
    case $name in
    *[!0-9.]*) names="$names,DNS:$name" ;;
    *) names="$names,IP:$name" ;;
    esac
done
mkdir -p "$folder"
printf 'subjectAltName = %s\nextendedKeyUsage = serverAuth, clientAuth\n' "${names#,}" \
    >"$folder/extensions"
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" \
    -keyout "$folder/tls.key" -out "$folder/request" 2>/dev/null
openssl x509 -req -days 30 -in "$folder/request" -extfile "$folder/extensions" \
    -CA "$RAY_CA/ca.crt" -CAkey "$RAY_CA/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
    -out "$folder/tls.crt" 2>/dev/null
cp "$RAY_CA/ca.crt" "$folder/ca.crt"
rm "$folder/request" "$folder/extensions"
