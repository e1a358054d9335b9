"""The reconciler is light: it runs beside a platform all the time."""

import subprocess
import sys


def test_it_imports_none_of_the_heavy_vendors():
    script = (
        "import pipelines.platform.reconciler, sys;"
        "print({'airflow', 'ray', 'mlflow', 'dvc', 'torch', 'great_expectations'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
