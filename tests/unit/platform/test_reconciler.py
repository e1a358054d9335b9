"""The reconciler is light: it runs beside a platform all the time."""

import subprocess
import sys

from pipelines.core.settings import load_settings
from pipelines.orchestration.jobs_api import ADDRESS_FILE, TOKEN_FILE
from pipelines.platform import reconciler


def test_it_imports_none_of_the_heavy_vendors():
    script = (
        "import pipelines.platform.reconciler, sys;"
        "print({'airflow', 'ray', 'mlflow', 'dvc', 'torch', 'great_expectations'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_cluster_that_many_tasks_name_is_asked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    for task, token in (("a", "old"), ("b", "new"), ("c", "new"), ("d", "")):
        folder = tmp_path / "runs" / task
        folder.mkdir(parents=True)
        (folder / ADDRESS_FILE).write_text("https://ray.example.org\n")
        if token:
            (folder / TOKEN_FILE).write_text(token)
    found = {folder.name for folder in reconciler._with_clusters(load_settings())}
    assert len(found) == 3  # an old token may not be accepted any more
    assert {"a", "d"} < found
