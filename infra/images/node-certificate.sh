#!/bin/sh
# A new key and a certificate of this node, signed by the cluster's own authority, for the names and
# addresses given:  node-certificate.sh FOLDER NAME...
# The authority is ca.crt and ca.key in $RAY_CA. Ray's processes show it to each other, both ways.
# It is called before each start of Ray, which reads the three files then and never again: so a
# certificate is renewed by a restart, and a year is how long a node may do without one.
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
# Beside the ones that are there, which may be read-only and in use, and then in their place.
new=$(mktemp -d "$folder/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
printf 'subjectAltName = %s\nextendedKeyUsage = serverAuth, clientAuth\n' "${names#,}" \
    >"$new/extensions"
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" \
    -keyout "$new/tls.key" -out "$new/request" 2>/dev/null
openssl x509 -req -days 365 -in "$new/request" -extfile "$new/extensions" \
    -CA "$RAY_CA/ca.crt" -CAkey "$RAY_CA/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
    -out "$new/tls.crt" 2>/dev/null
cp "$RAY_CA/ca.crt" "$new/ca.crt"
mv -f "$new/ca.crt" "$new/tls.key" "$new/tls.crt" "$folder/"
