#!/usr/bin/env bash
# Builds the images that are named, each with an SBOM (SPDX) and its provenance attached:
#   PYTHON_DIGEST=sha256:... TAG=... [REGISTRY=registry.example/team] infra/images/build.sh TARGET...
# `docker buildx imagetools inspect python:3.11-slim-bookworm` says the digest. With REGISTRY they are
# pushed, which is where attestations are kept; without it they stay on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

: "${PYTHON_DIGEST:?digest of the base image, sha256:...}" "${TAG:?tag of the images}"
[ $# -gt 0 ] || { echo "usage: $0 airflow | mlflow | ray-cpu | ray-cuda ..." >&2 && exit 2; }
for target in "$@"; do
    options=(--load)
    [ -z "${REGISTRY:-}" ] || options=(--push --sbom=true --provenance=mode=max)
    docker buildx build --file infra/images/Dockerfile --target "$target" \
        --build-arg "PYTHON_DIGEST=$PYTHON_DIGEST" \
        --label "org.opencontainers.image.revision=$(git rev-parse HEAD)" \
        --tag "${REGISTRY:+$REGISTRY/}penstock-$target:$TAG" "${options[@]}" .
done
