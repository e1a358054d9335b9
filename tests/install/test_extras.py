"""Each image has the packages of one extra: what runs there must be importable there."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from pipelines.core.settings import PROJECT
from tests.own_dag import OWN_DAG

# What a container of the extra runs: Airflow's parts and the stages beside them; Ray's jobs.
ENTRIES = {
    "airflow": (
        "dags.collect_garbage",
        "dags.data_refresh",
        "dags.llm_pipeline",
        "dags.llm_sweep",
        "pipelines.cli",
        "pipelines.commands.gc",
        "pipelines.commands.run",
        "pipelines.platform.airflow_config",
        "pipelines.platform.reconciler",
        "pipelines.stages.evaluate.evaluation",  # which publishes what the cache held
        "pipelines.stages.register.register_stage",
        "pipelines.stages.stage_process",
        "pipelines.stages.train",
        "pipelines.stages.validate.data_gate",
    ),
    "mlflow": (),
    "ray": (
        "pipelines.platform.ray_start",
        "ray_jobs.cluster_doctor",
        "ray_jobs.stage_job",
        "ray_jobs.train",
    ),
}
# What a container runs beside our modules.
PROGRAMS = {
    "airflow": ("airflow", "psycopg"),
    "mlflow": ("boto3", "jwt", "mlflow.server.auth", "psycopg"),
    "ray": ("ray.dashboard.agent", "ray.data", "ray.train"),
}
# What an extra lacks on purpose, although a module that it reaches imports it in a function.
LEFT_OUT = {
    "airflow": {
        "compressed_tensors": "exports are made with the extra `laptop`",
        "datasets": "documents are read by preprocess, which runs on Ray",
        "gguf": "exports are made with the extra `laptop`",
        "kvikio": "taken where a machine has it",
        "lm_eval": "tasks are run by evaluate, on Ray",
        "matplotlib": "curves are drawn by train and evaluate, on Ray; a plan's figure on a laptop",
        "peft": "adapters are checked by evaluate, on Ray",
        "onnx": "exports are made with the extra `laptop`",
        "onnxruntime": "exports are made with the extra `laptop`",
        "prometheus_client": "models are served with the extra `laptop`",
        "pyrage": "a home is backed up with the extra `laptop`",
        "supervisor": "`penstock up` starts its own platform with it",
    },
    "mlflow": {},
    "ray": {
        "kvikio": "taken where a machine has it",
        "model_signing": "models are signed and verified by register, beside Airflow",
    },
}
# What a DAG of another team and the reconciler import, and what they do without.
OPERATORS = (
    "pipelines.orchestration.links",
    "pipelines.orchestration.provider",
    "pipelines.orchestration.ray_job",
    "pipelines.orchestration.ray_job_trigger",
    "pipelines.orchestration.ray_jobs_hook",
    "pipelines.platform.reconciler",
)
NOT_NEEDED = ("dvc", "great_expectations", "mlflow", "ray", "torch")
IMPORT_ALL = """
import importlib, sys
for name in sys.stdin.read().split():
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error!r}")
"""
FIND_ALL = """
import sys
from importlib.util import find_spec
print(*[name for name in sys.stdin.read().split() if find_spec(name) is None])
"""


@pytest.fixture(scope="module")
def imports():
    return grimp.build_graph("pipelines", "ray_jobs", "dags", include_external_packages=True)


@pytest.fixture(params=ENTRIES)
def extra(request):
    return request.param


@pytest.fixture
def python(extra, tmp_path):
    """The interpreter of an environment that holds one extra, in the versions of the lock."""
    settings = [sys.executable, "infra/pip_settings.py"]
    exports = subprocess.run(settings, cwd=PROJECT, check=True, capture_output=True, text=True)
    uv = Path(sys.prefix) / "bin" / "uv"
    script = f"""{exports.stdout}
        "{uv}" venv --quiet --python "{sys.executable}" "{tmp_path}/alone"
        "{uv}" pip install --quiet --python "{tmp_path}/alone/bin/python" \
            --constraint requirements.lock --requirement pyproject.toml --extra {extra}"""
    subprocess.run(["bash", "-euc", script], cwd=PROJECT, check=True)
    return tmp_path / "alone" / "bin" / "python"


def printed_by(python, code, names, tmp_path):
    result = subprocess.run(
        [python, "-c", code],
        input="\n".join(names),
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
        | {"AIRFLOW_HOME": str(tmp_path / "airflow"), "PENSTOCK_HOME": str(tmp_path / "home")}
        | {"PYTHONPATH": str(PROJECT), "RAY_USAGE_STATS_ENABLED": "0"},
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_an_extra_alone_has_all_that_its_containers_import(extra, python, imports, tmp_path):
    entries = ENTRIES[extra]
    reached = set(entries).union(*map(imports.find_upstream_modules, entries))
    own = {name for name in reached if name.partition(".")[0] in ("pipelines", "ray_jobs", "dags")}
    packages = reached - own - set(sys.stdlib_module_names)

    missing = set(printed_by(python, FIND_ALL, packages, tmp_path).split())
    assert missing == set(LEFT_OUT[extra])

    lacking = set().union(*map(imports.find_modules_that_directly_import, missing))
    modules = sorted(own - lacking) + list(PROGRAMS[extra])
    printed = printed_by(python, IMPORT_ALL, modules, tmp_path).splitlines()
    # torchao warns of kernels for other Pythons, and Airflow writes its warnings to stdout.
    assert [line for line in printed if "torchao" not in line] == []


@pytest.mark.parametrize("extra", ["operators"], indirect=True)
def test_the_operator_is_there_without_the_large_libraries(python, tmp_path):
    assert printed_by(python, FIND_ALL, NOT_NEEDED, tmp_path).split() == list(NOT_NEEDED)
    assert printed_by(python, IMPORT_ALL, OPERATORS, tmp_path) == ""
    assert printed_by(python, OWN_DAG, (), tmp_path) == ""
