#!/bin/sh
# Gets the project's code at a branch or tag:  fetch-code.sh SOURCE REF FOLDER
# SOURCE is a git bundle in the object store, s3://BUCKET/KEY, or what `git clone` understands.
set -eu

source=$1
ref=$2
folder=$3
case $source in
s3://*)
    bundle=$(mktemp)
    trap 'rm "$bundle"' EXIT
    python -c '
import sys, boto3
bucket, _, key = sys.argv[1].removeprefix("s3://").partition("/")
boto3.client("s3").download_file(bucket, key, sys.argv[2])' "$source" "$bundle"
    source=$bundle
    ;;
esac
find "$folder" -mindepth 1 -delete # of a try before this one
git clone --quiet --branch "$ref" "$source" "$folder"
python -m compileall -q "$folder" # nobody may write there afterwards
echo "code: $ref is $(git -C "$folder" rev-parse HEAD)"
