"""What 1,000 runs cost a command more than ten do: it is used every day, and by people who wait."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.core import storage
from pipelines.core.settings import PROJECT, load_settings
from pipelines.datasets.versions import DatasetVersion
from pipelines.platform.garbage_collection import Rules
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.run.records import DatasetRef, EvaluateRecord, Split, TrainRecord
from pipelines.run.workspace import Run
from tests.processor_time import seconds_of
from tests.unit.platform.test_garbage import Airflow, collect

FEW, MANY = 10, 1000
RECIPE = load_recipe("stdlib-code")


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    found = {count: tmp_path_factory.mktemp(f"home-{count}") for count in (FEW, MANY)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.os, "fsync", lambda _: None)  # it takes a minute in all
        for count, home in found.items():
            make_runs(home / "runs", count)
            make_versions(home / "datasets.git", count)
    return found


def make_runs(runs: Path, count: int) -> None:
    facts = {"git_commit": "0" * 40, "dirty": False, "recipe_fingerprint": RECIPE.fingerprint()}
    text = dump_yaml(RECIPE)
    for number in range(count):
        workspace = runs / f"run-{number:04d}"
        Run(dag_run_id=workspace.name, **facts).write(workspace)
        storage.write_text(workspace / "params.yaml", text)
        model = {"model": "model", "model_hash": str(number)}
        TrainRecord(**model, parameters=1, steps=1, tokens=1, metrics={}).write(workspace)
        scores = {"bits_per_byte": 1, "perplexity": 2, "baselines": {}, "samples": ()}
        EvaluateRecord(**scores, documents=1, bytes=1, data_hash="").write(workspace)
        storage.write_text(workspace / "outputs/evaluate/report.html", "")


def make_versions(repository: Path, count: int) -> None:
    """All in one go of git, which makes one at a time in a tenth of a second."""
    split = Split(documents=1, bytes=1, tokens=1, shards=())
    stream = []
    for number in range(1, count + 1):
        version = DatasetVersion(
            name="d",
            version=number,
            directory_hash="a" * 32,
            bytes=1,
            files=1,
            dataset=DatasetRef(vocab_size=1, train=split, validation=split),
            stats={f"column {each}": {"mean": 1.0, "bins": [1] * 10} for each in range(30)},
            recipe=RECIPE.to_dict(),
            source={},
            validation={"expectations": 9},
            run={},
        )
        made = "t <t@example.invalid> 1700000000 +0000"
        content = version.model_dump_json(exclude={"git_revision", "created"})
        stream.append(
            f"commit refs/heads/main\nmark :{number}\ncommitter {made}\ndata 0\n"
            f"M 100644 inline d/version.json\ndata {len(content.encode())}\n{content}\n"
            f"tag d@{number}\nfrom :{number}\ntagger {made}\ndata 0\n"
        )
    git = ["git", "-C", str(repository)]
    subprocess.run(["git", "init", "--quiet", "--bare", repository], check=True)
    subprocess.run([*git, "fast-import", "--quiet"], input="".join(stream), text=True, check=True)


@pytest.mark.parametrize(
    "words",
    [("report", "--json"), ("why", "--json"), ("data", "list")],
    ids=" ".join,
)
def test_a_command_of_every_day_takes_at_most_three_times_as_long(homes, monkeypatch, words):
    seconds = {}
    for count, home in homes.items():
        monkeypatch.setenv("PENSTOCK_HOME", str(home))
        monkeypatch.setenv("PENSTOCK_AIRFLOW_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
        monkeypatch.chdir(PROJECT)
        seconds[count] = seconds_of(sys.executable, "-m", "pipelines.cli", *words)
    print(words, seconds)
    assert seconds[MANY] <= 3 * seconds[FEW]


def test_the_collections_time_grows_with_the_runs_and_no_faster(homes, monkeypatch):
    def seconds(count: int) -> float:
        monkeypatch.setenv("PENSTOCK_HOME", str(homes[count]))
        airflow = Airflow({f"run-{number:04d}": "success" for number in range(count)})
        return timed(lambda: collect(load_settings(), airflow, rules=Rules(), delete=False))

    seconds(FEW)  # imports
    few = min(seconds(FEW) for _ in range(3))
    assert seconds(MANY) <= 2 * MANY / FEW * few


def timed(work: Callable[[], object]) -> float:
    before = time.process_time()  # os.times() knows hundredths only, which is what ten runs take
    work()
    return time.process_time() - before
