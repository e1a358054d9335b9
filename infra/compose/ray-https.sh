#!/bin/sh
# TLS in front of Ray's dashboard, in the network of the head's container. When that starts again it has a
# new network, and who stays in the old one reaches nobody any more: so this ends, to be started in the new.
set -eu
nginx -g "daemon off;" &
misses=0
while [ "$misses" -lt 12 ]; do
    sleep 5
    kill -0 $!
    if curl --silent --max-time 10 --output /dev/null http://127.0.0.1:8265/; then
        misses=0
    else
        misses=$((misses + 1))
    fi
done
echo "the head does not answer" >&2
exit 1
