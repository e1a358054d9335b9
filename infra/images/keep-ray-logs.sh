#!/bin/sh
# Ray's logs outlive their node: what a session writes is appended to a copy in the shared home.
#   keep-ray-logs.sh NAME-OF-THE-NODE
# Copies that nobody has written to for two weeks go. Told to end, it goes on until the logs have been
# still for a while, as Ray's processes end beside it.
set -eu
umask 077

logs=/tmp/ray/session_latest/logs
kept=$PENSTOCK_HOME/ray-logs/$1
still_s=${STILL_S:-15}
every_s=${EVERY_S:-15}

bytes() {
    stat --format=%s "$1" 2>/dev/null || echo 0
}

keep() { # FILE: appends what is new of it; one that Ray has begun anew begins a new copy
    copy=$kept/$1
    have=$(bytes "$copy")
    size=$(bytes "$logs/$1")
    if [ "$size" -lt "$have" ]; then
        mv "$copy" "$copy.$(date +%s)"
        have=0
    fi
    [ "$size" -gt "$have" ] || return 0
    mkdir -p "$(dirname "$copy")"
    tail --bytes="+$((have + 1))" "$logs/$1" >>"$copy"
}

keep_all() {
    [ -d "$logs" ] || return 0
    (cd "$logs/" && find . -type f) | while read -r file; do
        keep "${file#./}"
    done
}

last_words() {
    trap '' TERM
    until [ -z "$(find "$logs/" -type f -newermt "-$still_s seconds" 2>/dev/null)" ]; do
        keep_all
        sleep 1
    done
    keep_all
    exit 0
}

mkdir -p "$kept"
find "${kept%/*}" -mindepth 1 \( -type f -mtime +14 -o -type d -empty -mtime +14 \) -delete

trap last_words TERM
while :; do
    keep_all
    sleep "$every_s" &
    wait $!
done
