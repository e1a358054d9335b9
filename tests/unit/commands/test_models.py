"""`penstock models` on a real registry, and where no platform is up."""

import getpass
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core.errors import UserError
from pipelines.core.machine import free_port
from pipelines.registry.promotion import promote
from pipelines.registry.registration import register
from pipelines.tracking.tracked_run import MODEL_HASH_TAG

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"


@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["show", "a-model"],
        ["promote", "a-model@1"],
        ["rollback", "a-model"],
        ["generate", "a-model@champion"],
    ],
)
def test_a_registry_that_is_down_is_one_quick_line(command: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    environment = os.environ | {"MLFLOW_TRACKING_URI": url, "no_proxy": "*", "NO_PROXY": "*"}
    began = time.monotonic()
    result = subprocess.run(
        [PENSTOCK, "models", *command], env=environment, capture_output=True, text=True
    )
    seconds = time.monotonic() - began
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert url in line
    assert "penstock up" in line
    assert seconds < 8  # 0.7 on a machine with nothing else to do; MLflow's client takes 13


@pytest.fixture
def versions(name, folders, mlflow_run):
    """Two versions, of which the second is champion."""
    tags = {MODEL_HASH_TAG: "aa", "penstock.bits_per_byte": "2.5"}
    first = register(folders, name, mlflow_run, tags, "the first")
    second = register(folders, name, mlflow_run, {MODEL_HASH_TAG: "bb"}, "of elsewhere")
    promote(second, None, "run 7", "0.1 bits per byte better")
    return first, second


def models(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_promote_and_rollback_say_who_is_champion_and_show_says_why(name, versions):
    assert models("promote", f"{name}@1", "--why", "it is kinder") == (
        f"{name}@1 is the champion now; before: 2\n"
    )
    assert models("promote", f"{name}@1") == f"{name}@1 is the champion already\n"
    done = json.loads(models("rollback", name, "--why", "it was not", "--json"))
    assert (done["champion_before"], done["version"], done["aliases"]) == (1, 2, ["champion"])
    shown = models("show", name)
    assert f"{name} version 2 @champion" in shown
    assert "score  2.5000 bits per byte" in shown
    assert "score  not known" in shown  # a version that no run of ours made
    user = f"{getpass.getuser()}@{socket.gethostname()}"
    trail = [line.split(" UTC  ")[1] for line in shown.split("audit trail\n")[1].splitlines()]
    assert trail == [
        "promote none → 2 by run 7: 0.1 bits per byte better",
        f"promote 2 → 1 by {user}: it is kinder",
        f"rollback 1 → 2 by {user}: it was not",
    ]


def test_show_and_list_as_json(name, versions):
    shown = json.loads(models("show", name, "--json"))
    assert [each["version"] for each in shown["versions"]] == [2, 1]
    (entry,) = shown["audit"]
    assert (entry["from"], entry["to"], entry["previous"]) == (None, 2, None)
    listed = [each for each in json.loads(models("list", "--json")) if each["name"] == name]
    others = {"challenger": None, "previous": None}
    assert listed == [{"name": name, "latest": 2, "champion": 2, **others}]
    assert f"{name}  versions to 2, champion 2\n" in models("list")


def test_a_promotion_names_its_version(name, versions):
    with pytest.raises(UserError, match="add a version"):
        models("promote", name)
    with pytest.raises(UserError, match="no version or alias '9'"):
        models("promote", f"{name}@9")
    with pytest.raises(UserError, match="'a/b' is not a model's name"):
        models("promote", "a/b@1")
