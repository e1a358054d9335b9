#!/bin/sh
# `penstock` in a container: whoever comes by `exec` has not come by the entrypoint, which knows
# where the secrets of its programs are.
PENSTOCK_PART="" exec /opt/penstock/infra/images/entrypoint.sh python -m pipelines.cli "$@"
