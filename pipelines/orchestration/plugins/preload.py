"""An Airflow plugin that imports once the modules that each task would import again.

Tasks are forked from the scheduler, and readers of DAG files from the DAG processor, so they find
these modules loaded. It loads only third-party packages, which do not change while Airflow runs;
each task imports our own code again. It passes over what an Airflow without our stages lacks.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

PARENTS = ("scheduler", "dag-processor")
MODULES = (
    "airflow.providers.standard.hooks.subprocess",
    "airflow.providers.standard.operators.hitl",
    "dvc.data_cloud",
    "dvc.dvcfile",
    "dvc.repo",
    "dvc.rwlock",
    "dvc.stage.cache",
    "httpx",
    "model_signing.signing",
    "numpy",
    "phonenumbers",
    "ruamel.yaml",
    "scmrepo.git",
    "tenacity",
)

if any(parent in sys.argv for parent in PARENTS):
    for module in MODULES:
        if find_spec(module.partition(".")[0]):
            import_module(module)
