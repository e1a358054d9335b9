"""The curve as a table, in units that compare, and what DVC's own command makes of it."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT
from pipelines.evaluation.loss_curve import CurvePoint, parse_curve, read_history, write_curve
from pipelines.evaluation.slices import write_slices
from pipelines.run.records import Split
from pipelines.run.verdict import Estimate, Slice, SliceScore

DVC = Path(sys.prefix) / "bin" / "dvc"


def test_a_history_is_told_in_bytes_of_text(tmp_path: Path) -> None:
    points = [{"step": 10, "tokens": 300, "loss": 3 * math.log(2)}, {"step": 20, "tokens": 600}]
    points[1]["loss"] = math.nan
    history = tmp_path / "history.jsonl"
    history.write_text("".join(json.dumps(point) + "\n" for point in points))
    training = Split(documents=1, bytes=4000, tokens=1000, shards=())
    first, second = read_history(history, training)
    assert first == CurvePoint(10, 1200, 3 * math.log(2), pytest.approx(0.75))
    assert (second.step, second.text_bytes) == (20, 2400)
    assert math.isnan(second.loss) and math.isnan(second.bits_per_byte)


def test_what_is_written_is_read_again_to_the_last_digit(tmp_path: Path) -> None:
    points = [CurvePoint(1, 2, 0.1 + 0.2, 1e-17), CurvePoint(2, 4, math.nan, math.inf)]
    write_curve(points, tmp_path / "curve.csv")
    text = (tmp_path / "curve.csv").read_text()
    assert text.splitlines()[::2] == ["step,text_bytes,loss,bits_per_byte", "2,4,,"]
    first, second = parse_curve(text)
    assert first == points[0]
    assert math.isnan(second.loss) and math.isnan(second.bits_per_byte)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of DVC's with the project's own dvc.yaml, and a run's outputs committed."""
    folder = tmp_path_factory.mktemp("workspace")
    shutil.copy(PROJECT / "dvc.yaml", folder)
    run(folder, "git", "init", "-q")
    run(folder, sys.executable, "-m", "dvc", "init", "-q")
    write_outputs(folder, loss=3.0)
    run(folder, "git", "add", "-A")
    run(folder, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    write_outputs(folder, loss=2.0)
    return folder


def write_outputs(folder: Path, loss: float) -> None:
    points = [CurvePoint(step, 100 * step, loss / step, loss / step) for step in (1, 2, 3)]
    points.append(CurvePoint(4, 400, math.nan, math.nan))
    write_curve(points, folder / "outputs/evaluate/loss_curve.csv")
    slices = [
        SliceScore(
            slice=Slice(dimension="language", name=name),
            documents=20,
            bytes=400,
            bits_per_byte=Estimate(value=loss, lower=None, upper=4.0),
        )
        for name in ("en", "ko")
    ]
    write_slices(slices, folder / "outputs/evaluate/slices.csv")


def run(folder: Path, *command: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "DVC_NO_ANALYTICS": "1", "HOME": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_dvc_shows_both_plots(workspace: Path) -> None:
    shown = json.loads(run(workspace, str(DVC), "plots", "show", "--json", "--split"))
    assert shown.get("errors") is None
    (curve,), (slices,) = (shown["data"][name] for name in ("training_loss", "slices"))
    values = curve["anchor_definitions"]["<DVC_METRIC_DATA>"]
    assert [(each["text_bytes"], each["bits_per_byte"]) for each in values[:2]] == [
        ("100", "2.0"),
        ("200", "1.0"),
    ]
    bars = slices["anchor_definitions"]["<DVC_METRIC_DATA>"]
    axes = slices["content"]["encoding"]
    assert [axes[axis]["field"] for axis in ("x", "y")] == ["bits_per_byte", "slice"]
    assert [(each["slice"], each["bits_per_byte"]) for each in bars] == [
        ("language en", "2.0"),
        ("language ko", "2.0"),
    ]


def test_dvc_sets_a_run_beside_another(workspace: Path) -> None:
    shown = json.loads(run(workspace, str(DVC), "plots", "diff", "--json", "--split", "HEAD"))
    (curve,) = shown["data"]["training_loss"]
    assert set(curve["revisions"]) == {"HEAD", "workspace"}
    first = {
        each["rev"]: each["bits_per_byte"]
        for each in curve["anchor_definitions"]["<DVC_METRIC_DATA>"]
        if each["step"] == "1"
    }
    assert first == {"HEAD": "3.0", "workspace": "2.0"}
