"""An Airflow plugin: what each task would import anew is imported once.

Tasks are forked from the scheduler, and the readers of DAG files from the DAG processor: they find
these modules loaded. Other people's packages only, as those don't change while Airflow runs; our
own code is read afresh by each task.
"""

import sys
from importlib import import_module

PARENTS = ("scheduler", "dag-processor")
MODULES = (
    "airflow.providers.standard.hooks.subprocess",
    "airflow.providers.standard.operators.hitl",
    "dvc.repo",
    "dvc.stage.cache",
    "httpx",
    "numpy",
    "tenacity",
)

if any(parent in sys.argv for parent in PARENTS):
    for module in MODULES:
        import_module(module)
