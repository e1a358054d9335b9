"""`penstock data` on real versions, where no platform is up."""

import json

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core.errors import UserError
from pipelines.core.machine import free_port
from pipelines.datasets import versions
from pipelines.datasets.dataset_publishing import make
from tests.unit.datasets.dataset_workspace import make_workspace


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(home))
        for number in (1, 2):
            make(make_workspace(home / f"run-{number}", "some text\n" * 50 * number))
        yield home


def data(home, *arguments, **variables):
    environment = {
        "PENSTOCK_HOME": str(home),
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{free_port()}",  # nobody's
        "no_proxy": "*",
        **variables,
    }
    return CliRunner().invoke(app, ["data", *arguments], env=environment)


def test_list_has_a_line_for_each_version(home):
    done = data(home, "list")
    assert done.exit_code == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title.split()[:2] == ["version", "made"]
    assert [line.split()[0] for line in lines] == ["small@1", "small@2"]
    for word in ("1,000", "debug", "passed 3", versions.find("small@1").directory_hash[:8]):
        assert word in lines[0]


def test_list_as_json_holds_every_fact(home):
    first, second = json.loads(data(home, "list", "small", "--json").stdout)
    assert (first["label"], second["label"]) == ("small@1", "small@2")
    assert (second["documents"], second["tokens"]) == (2, 2000)
    assert second["recipe"]["name"] == "debug"
    assert second["validation"]["expectations"] == 3
    assert second["git_revision"]


def test_show_says_how_it_was_made_and_that_no_registry_answers(home):
    done = data(home, "show", "small@1")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("small@1\n")
    for word in ("run-1", "cccccccccccc", "passed 3", "1,000 (500 held out)", "penstock up"):
        assert word in done.stdout
    assert json.loads(data(home, "show", "small", "--json").stdout)["label"] == "small@2"


def test_show_names_the_models_trained_on_it(home, mlflow_uri, mlflow_client, mlflow_run):
    mlflow_client.create_registered_model("trained-on-small")
    for trained_on in ("small@1", "other@2=3, small@1=7", "small@12", "very-small@1=1, web@1=2"):
        mlflow_client.create_model_version(
            "trained-on-small",
            "file:///nowhere",
            run_id=mlflow_run,
            tags={"penstock.dataset": trained_on},
        )
    shown = data(home, "show", "small@1", "--json", MLFLOW_TRACKING_URI=mlflow_uri)
    assert json.loads(shown.stdout)["models"] == [
        "trained-on-small version 1",
        "trained-on-small version 2",
    ]
    other = data(home, "show", "small@2", MLFLOW_TRACKING_URI=mlflow_uri)
    assert "none yet" in other.stdout


def test_verify_is_silent_of_nothing(home):
    done = data(home, "verify", "small@1")
    assert done.exit_code == 0
    assert "all sound" in done.stdout
    oid = versions.find("small@2").dataset.train.shards[0].md5
    victim = home / "dataset-store/files/md5" / oid[:2] / oid[2:]
    sound = victim.read_bytes()
    victim.chmod(0o644)
    victim.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    done = data(home, "verify", "small@2")
    victim.write_bytes(sound)
    assert done.exit_code == 1
    assert "small@2: tokens/train-00000.bin is damaged" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["show", "small@9"], "small has no version 9; it has 1, 2"),
        (["verify", "smal"], "did you mean small?"),
        (["list", "other"], "there are small"),
        (["show", "Small@1"], "write name@N"),
    ],
)
def test_a_wrong_name_is_one_line(home, arguments, line):
    error = data(home, *arguments).exception
    assert isinstance(error, UserError)
    assert line in str(error)
    assert "\n" not in str(error)


def test_no_version_at_all_is_said(tmp_path):
    done = data(tmp_path, "list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "data_refresh" in done.stderr
    assert json.loads(data(tmp_path, "list", "--json").stdout) == []
