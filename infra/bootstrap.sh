#!/usr/bin/env bash
# Makes .venv with what requirements.lock names, what that needs on this machine (CUDA's libraries,
# say), the project itself, editable, and nothing else. Does nothing when neither that nor pyproject.toml changed since.
# With the argument `user`: without what only developers need, unless that is there already.
# With the argument `bench`: .venv-bench from requirements-bench.lock, without the project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
"" | user) VENV=.venv LOCK=requirements.lock ;;
bench) VENV=.venv-bench LOCK=requirements-bench.lock ;;
*) echo "usage: $0 [user | bench]" >&2 && exit 2 ;;
esac
STAMP=$VENV/installed

die() {
    echo "error: $*" >&2
    exit 1
}

wanted() { # scripts of a virtual environment hold its path: a moved project is installed anew
    pwd
    echo "${1:-all}"
    cat "$LOCK" pyproject.toml
}

packages() { # the versions to install, with what they need on this machine
    if [ "${1:-}" = user ]; then
        "$VENV/bin/uv" pip compile --quiet --no-header pyproject.toml --extra laptop --constraint "$LOCK"
        echo "$uv"
    else
        "$VENV/bin/uv" pip compile --quiet --no-header "$LOCK"
    fi
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11)
                or sys.implementation.name != "cpython")' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    die "CPython 3.11 or newer is needed; python3 here is: $(python3 --version 2>&1 || true)"
}

make_venv() {
    local python
    python=$(find_python)
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || die "python3 -m venv failed; on Debian: apt-get install python3-venv"
}

if [ -e "$STAMP" ] && { cmp -s "$STAMP" <(wanted) || cmp -s "$STAMP" <(wanted "$@"); }; then
    exit 0
fi
command -v c++ g++ clang++ >/dev/null ||
    die "no C++ compiler, which torch.compile needs; on Debian: apt-get install g++"
if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    make_venv
fi
uv=$(grep '^uv==' requirements.lock)
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$uv"
# uv does not read pip's configuration: hand on its indexes, links and certificates.
eval "$("$VENV/bin/python" infra/pip_settings.py)"
export VIRTUAL_ENV="$PWD/$VENV"
# A plain sync of the lock would remove what a CUDA torch needs: the lock is from a CPU machine.
# Bytecode once here, not in a dozen processes at their first start, which on a slow disk or a busy
# machine takes longer than Ray waits for its own.
packages "$@" | "$VENV/bin/uv" pip sync --compile-bytecode -
if [ "$VENV" = .venv ]; then
    "$VENV/bin/uv" pip install --no-deps --editable .
fi
wanted "$@" >"$STAMP"
