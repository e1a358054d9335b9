#!/usr/bin/env bash
# Makes $VIRTUAL_ENV for an image, in the Dockerfile:
#   packages.sh EXTRA [INDEX OF PYTORCH'S WHEELS]
# What no process of the image loads is left out, and of the rest what they load has its bytecode: a process
# that may not write there would compile some thousand modules at each start.
set -euo pipefail
extra=$1 torch_index=${2:-}

# uv does not read pip's configuration: hand on its indexes, links and certificates.
settings=$(python pip_settings.py)
eval "$settings"
python -m venv --without-pip "$VIRTUAL_ENV"
if [ -n "$torch_index" ]; then
    # Alone and first: this index has other packages, too, and not in the lock's versions. Of two
    # builds of one version the one with a suffix, such as +cpu, counts as the newer.
    uv pip install --no-deps --default-index "$torch_index" --index-strategy unsafe-best-match \
        --constraint requirements.lock torch
fi
uv pip install --constraint requirements.lock --requirement pyproject.toml --extra "$extra"

cd "$VIRTUAL_ENV"/lib/python3*/site-packages
# PyTorch's own test programs and those of protoc, Ray for Java, what C++ beside pyarrow would need,
# and tests.
rm -rf torch/test torch/bin/{test_*,protoc*} ray/jars pyarrow/{include,src}
for package in matplotlib networkx numpy pandas pyarrow scipy sklearn sympy; do
    if [ -d $package ]; then
        find $package -type d -name tests -prune -exec rm -r {} +
    fi
done
# Symbol tables, for debuggers only.
for library in torch/lib/libtorch_{cpu,python}.so ray/_raylet.so pyarrow/libarrow*.so.*; do
    if [ -f "$library" ]; then
        strip --strip-unneeded "$library"
    fi
done

compiled=(mlflow pydantic sqlalchemy alembic flask fastapi starlette uvicorn)
imported="boto3 pandas pyarrow.dataset"
case $extra in
airflow)
    rm -rf torch/include # nothing is compiled beside Airflow
    compiled+=(airflow cadwyn dvc dvc_data dvc_objects flask_appbuilder great_expectations)
    imported+=" dvc.repo great_expectations model_signing phonenumbers s3fs torch transformers"
    imported+=" transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama"
    ;;
ray)
    compiled+=(dvc dvc_data dvc_objects great_expectations)
    compiled+=(ray/{_common,_private,autoscaler,core,dashboard,data,experimental,runtime_env,scripts,train,util})
    imported+=" dvc.repo great_expectations lm_eval phonenumbers ray.data ray.train.torch s3fs torch transformers"
    imported+=" torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp"
    imported+=" transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama"
    ;;
mlflow)
    imported+=" jwt psycopg"
    ;;
esac
for package in "${compiled[@]}"; do
    if [ -e "$package" ]; then
        python -m compileall -q -j 0 "$package"
    fi
done
for module in $imported; do
    AIRFLOW_HOME=/tmp/airflow python -c "import $module"
done
rm -rf /tmp/airflow
