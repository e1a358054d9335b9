#!/usr/bin/env bash
# Builds the images that are named, of the commit that is checked out, and writes the bill of
# materials (CycloneDX) of each to build/IMAGE.cdx.json:
#   infra/images/build.sh --pin                                  once, and to take a newer base
#   TAG=... [REGISTRY=registry.example/team] infra/images/build.sh TARGET... [-- OPTION OF THE ENGINE...]
# --pin asks the registry for the base image's digest and records it in base-digest, beside this file.
# With REGISTRY they are pushed, by Docker with an SBOM and the provenance attached; without it they
# stay on this machine. ENGINE=podman takes podman in place of Docker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

engine=${ENGINE:-docker}
pinned=infra/images/base-digest
base=$(sed -n 's/^FROM \(.*\)@.*PYTHON_DIGEST.*/\1/p' infra/images/Dockerfile)
if [ "${1:-}" = --pin ]; then
    "$engine" pull --quiet "$base" >/dev/null
    "$engine" image inspect --format '{{index .RepoDigests 0}}' "$base" | sed 's/.*@//' >"$pinned.new"
    grep -qx 'sha256:[0-9a-f]\{64\}' "$pinned.new"
    mv "$pinned.new" "$pinned"
    exit 0
fi

targets=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    targets+=("$1")
    shift
done
[ $# = 0 ] || shift
: "${TAG:?tag of the images}"
[ ${#targets[@]} -gt 0 ] || { echo "usage: $0 airflow | mlflow | ray-cpu | ray-cuda ..." >&2 && exit 2; }
digest=${PYTHON_DIGEST:-$(cat "$pinned" 2>/dev/null || true)}
: "${digest:?digest of the base image: run $0 --pin}"

# A clone holds what is committed and nothing else: no secret that lies in the folder gets in.
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git clone --quiet --no-hardlinks . "$context"
git -C "$context" remote remove origin
mkdir -p build
for target in "${targets[@]}"; do
    image=${REGISTRY:+$REGISTRY/}penstock-$target:$TAG
    if [ "$engine" = docker ]; then
        command=(docker buildx build --load)
        [ -z "${REGISTRY:-}" ] || command=(docker buildx build --push --sbom=true --provenance=mode=max)
    else
        command=("$engine" build --layers --format=docker --ignorefile="$context/infra/images/Dockerfile.dockerignore")
    fi
    "${command[@]}" --file="$context/infra/images/Dockerfile" --target="$target" \
        --build-arg="PYTHON_DIGEST=$digest" \
        --label="org.opencontainers.image.revision=$(git rev-parse HEAD)" \
        --tag="$image" "$@" "$context"
    # Without network and rights: it only reads what the image has.
    "$engine" run --rm --interactive --network=none --read-only --cap-drop=all --entrypoint=python \
        "$image" - <infra/images/bill_of_materials.py >"build/penstock-$target.cdx.json"
    if [ -n "${REGISTRY:-}" ] && [ "$engine" != docker ]; then
        "$engine" push "$image"
    fi
done
