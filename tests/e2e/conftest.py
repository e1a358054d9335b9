"""One run of the DAG for the whole session; whoever needs a finished run shares it."""

import json

import pytest


@pytest.fixture(scope="session")
def first_run(platform):
    """The summary of a first `penstock run`, of the default recipe."""
    done = platform.penstock("run", "--json", timeout=900)
    assert done.returncode == 0, done.stderr + "\n".join(
        f"{log}\n{log.read_text()[-3000:]}"
        for log in (platform.settings.home / "airflow/logs").rglob("attempt=*.log")
    )
    return json.loads(done.stdout)
