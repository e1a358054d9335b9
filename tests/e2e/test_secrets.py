"""Secrets are planted, a run goes through every stage, and then they are looked for everywhere."""

import secrets
import subprocess

from tests.conftest import PENSTOCK

# What a person's shell, from which a run is started, may hold.
IN_A_SHELL = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "PGPASSWORD",
)
MAY_HOLD = ("secrets", "airflow/airflow.cfg")  # of the home; both are their owner's alone


def test_no_secret_leaves_its_place(platform) -> None:
    planted = {name: secrets.token_hex(16) for name in IN_A_SHELL}
    values = {
        path.name: value
        for path in platform.settings.secrets.iterdir()
        if len(value := path.read_text().strip()) > 8
    }
    assert len(values) >= 6
    sought = {name: value.encode() for name, value in (values | planted).items()}
    arguments = set()
    command = [PENSTOCK, "run", "--recipe", "debug", "--set", "seed=20"]
    with subprocess.Popen(
        command,
        env=platform.environment | planted,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as run:
        while True:
            arguments |= {b"\0".join(map(str.encode, line)) for line in _arguments(platform)}
            try:
                output, _ = run.communicate(timeout=1)
            except subprocess.TimeoutExpired:
                continue
            break
    assert run.returncode == 0, output.decode()
    shown = {"arguments of processes": b"\n".join(arguments), "what the command printed": output}
    home = platform.settings.home
    for folder in (home, platform.runtime):
        for path in folder.rglob("*"):
            inside = str(path.relative_to(folder))
            if path.is_file() and not path.is_symlink() and not inside.startswith(MAY_HOLD):
                shown[str(path)] = path.read_bytes()
    assert any(name.endswith("airflow.db") for name in shown)  # XComs, and each run's conf
    assert any(name.endswith("mlflow.db") for name in shown)
    found = [
        (name, place) for name, value in sought.items() for place in shown if value in shown[place]
    ]
    assert found == []


def _arguments(platform) -> list[list[str]]:
    import psutil

    lines = []
    for process in platform.processes():
        try:
            lines.append(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return lines
