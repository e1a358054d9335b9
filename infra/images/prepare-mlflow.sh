#!/bin/sh
# What MLflow needs once before its servers start: the tables of its version, and those of its users.
set -eu
mlflow db upgrade "$MLFLOW_BACKEND_STORE_URI"
python -m mlflow.server.auth db upgrade --url "$MLFLOW_BACKEND_STORE_URI"
