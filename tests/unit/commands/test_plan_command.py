"""`penstock plan` as a user and a script see it."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core.errors import UserError
from tests.processor_time import limit, seconds_of

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"


def answer(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_preset() -> None:
    found = answer("--model", "llama3-8b", "--gpu", "h100", "--gpus", "8")
    assert found["fits"]
    assert {"layouts", "flops", "hours", "cost"} <= found.keys()
    best, worst = found["layouts"][0], found["layouts"][-1]
    parts = {key: size for key, size in best["memory_gib"].items() if key != "total"}
    assert sum(parts.values()) == pytest.approx(best["memory_gib"]["total"])
    assert (best["why_not"], best["step_seconds"]) == (None, found["step_seconds"])
    assert worst["why_not"]


def test_nothing_fits_and_that_is_an_answer() -> None:
    found = answer("--model", "llama3-70b", "--gpu", "rtx4090", "--gpus", "1")
    assert (found["fits"], found["hours"], found["cost"]) == (False, None, None)
    assert all(each["why_not"] for each in found["layouts"])


def test_a_longer_context_is_planned_where_training_begins_anew() -> None:
    asked = ["--model", "gpt2-124m", "--gpu", "h100", "--gpus", "1"]
    usual, longer = answer(*asked), answer(*asked, "--set", "data.sequence_length=2048")
    assert longer["flops"] > usual["flops"]


def test_an_adapter_makes_it_fit() -> None:
    common = ("--model", "llama3-8b", "--gpu", "rtx4090", "--gpus", "1")
    assert not answer(*common)["fits"]
    assert answer(*common, "--adapter", "qlora")["fits"]


def test_sharding_is_kept() -> None:
    found = answer("--model", "gpt2-124m", "--gpus", "8", "--sharding", "optimizer")
    assert {each["sharding"] for each in found["layouts"] if "sharding" in each} == {"optimizer"}


@pytest.mark.parametrize("recipe", ["stdlib-code", "llama3-70b-fsdp-tp", "gpt-neox-20b-pp"])
def test_a_recipe_is_planned_as_it_is(recipe: str) -> None:
    found = answer("--recipe", recipe)
    assert found["fits"]
    assert found["asked"]["step_seconds"] == found["step_seconds"]


def test_a_recipe_for_other_gpus_has_layouts_for_these() -> None:
    found = answer("--recipe", "llama3-70b-fsdp-tp", "--gpus", "32", "--gpu", "h200")
    assert not found["fits"]
    assert "64 processes, but there are 32" in found["asked"]["why_not"]
    assert found["layouts"][0]["why_not"] is None


def test_a_recipe_that_starts_from_a_folder_takes_the_shape_of_a_preset() -> None:
    with pytest.raises(UserError, match=r"no such folder; planning reads its config\.json"):
        answer("--recipe", "llama3-8b-qlora")
    assert answer("--recipe", "llama3-8b-qlora", "--model", "llama3-8b", "--gpu", "rtx4090")["fits"]


def test_serving() -> None:
    four = answer("--model", "gpt3-175b", "--gpu", "a100-80", "--gpus", "4", "--serve")
    assert not four["fits"]
    eight = answer("--model", "gpt3-175b", "--gpu", "a100-80", "--gpus", "8", "--serve")
    assert eight["fits"]
    assert eight["devices"] >= 5
    assert not answer("--model", "gpt3-175b", "--gpu", "t4", "--serve")["fits"]


def test_serving_on_gpus_of_one_s_own() -> None:
    """Written off over four years, with power and a place in a rack."""
    common = ("--model", "llama3-8b", "--serve", "--gpus", "1")
    assert answer(*common)["bought"] is None
    found = answer(*common, "--own", "30000", "--kwh", "0.1")
    month = 30_000 / 48 + 0.7 * (1.56 * 0.1 * 730.5 + 184)
    assert found["bought"]["instance_month"] == pytest.approx(month)
    assert found["rented"]["instance_month"] > found["bought"]["instance_month"]
    arguments = ["plan", *common, "--own", "30000", "--kwh", "0.1"]
    assert f"USD bought  {month:,.0f} a month" in CliRunner().invoke(app, arguments).stdout


def test_sizes() -> None:
    assert answer("--model", "llama3-8b", "--adapter", "qlora", "--smallest")["t4"] == "1"
    assert answer("--model", "gpt2-124m", "--gpus", "1", "--largest")["none"] == "phi3-mini-4k"


@pytest.mark.parametrize("ending", ["png", "html"])
def test_a_picture(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"memory.{ending}"
    answer("--model", "llama3-8b", "--plot", str(path))
    start = path.read_bytes()[:15]
    assert start.startswith(b"\x89PNG") if ending == "png" else start == b"<!doctype html>"
    assert path.stat().st_size > 10_000


def test_a_user_sees_the_answer_first() -> None:
    arguments = ["plan", "--model", "llama3-8b", "--gpus", "8", "--storage", "1"]
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert lines[0] == "llama3-8b, 8.03B parameters on 8 x h100"
    assert lines[1].startswith("fits ")
    arguments = ["plan", "--model", "llama3-70b", "--gpu", "rtx4090", "--gpus", "1"]
    refused = CliRunner().invoke(app, arguments).stdout
    assert "does not fit: one, sharding none, recompute full: needs" in refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "plan: give a run"),
        (("--model", "llama3-7b"), "did you mean llama3"),
        (("--model", "llama3-8b", "--gpu", "h10"), "did you mean h100"),
        (("--model", "llama3-8b", "--plot", "memory.svg"), r"must end in \.png or \.html"),
        (("--smallest", "--largest"), "--smallest does not use --largest"),
        (("--smallest", "--gpu", "h100", "--gpus", "8"), "not use --gpu, --gpus"),
        (("--smallest", "--plot", "a.png"), "not use --plot"),
        (("--largest", "--adapter", "lora", "--price", "0"), "not use --adapter, --price"),
        (("--serve", "--adapter", "lora"), "--serve does not use --adapter"),
        (("--serve", "--sharding", "full", "--plot", "a.png"), "does not use --sharding, --plot"),
        (("--serve", "--smallest"), "not use --smallest"),
        (("--serve", "--mfu", "0.5"), "not use --mfu"),
        (("--serve", "--own", "30000"), "give both --own and --kwh"),
        (("--weights", "int8"), "training does not use --weights"),
        (("--own", "30000", "--kwh", "0.1"), "not use --own, --kwh"),
        (
            ("--model", "gpt2-124m", "--adapter", "lora", "--set", "data.sequence_length=2048"),
            "the context of gpt2-124m is 1024 tokens, but data.sequence_length = 2048",
        ),
    ],
)
def test_a_wrong_question_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        answer(*arguments)


def test_a_storage_gives_something() -> None:
    result = CliRunner().invoke(app, ["plan", "--model", "gpt2-124m", "--storage", "0"])
    assert result.exit_code == 2
    assert "0.001" in result.output


def test_an_answer_takes_a_second() -> None:
    command = [PENSTOCK, "plan", "--model", "llama3-70b", "--gpus", "512", "--json"]
    assert seconds_of(*command) < limit(1.5)  # 0.7 on a quiet machine


DRY = ("--recipe", "debug", "--gpu", "h100", "--gpus", "1", "--dry-run")


def test_a_dry_run_lies_beside_the_formula() -> None:
    tried = answer(*DRY)["dry_run"]
    (rank,) = tried["ranks"]
    assert sum(rank["memory"].values()) == tried["peak_bytes"] > 0
    assert rank["memory"].keys() <= tried["formula_bytes"].keys()
    assert rank["flops"] > 0
    assert all(wait["reason"] for wait in rank["waits"])


def test_a_dry_run_is_printed() -> None:
    said = CliRunner().invoke(app, ["plan", *DRY], catch_exceptions=False).stdout
    assert "dry run of one rank in" in said
    assert "GiB at the peak" in said
    assert "parallel/process_group.py" in said


def test_a_dry_run_needs_a_layout() -> None:
    with pytest.raises(UserError, match="64 processes, but there are 32"):
        answer("--recipe", "llama3-70b-fsdp-tp", "--gpus", "32", "--dry-run")


def test_what_auto_becomes_is_told() -> None:
    def said(gpu: str) -> str:
        command = ["plan", "--recipe", "debug", "--gpu", gpu, "--gpus", "1"]
        return CliRunner().invoke(app, command, catch_exceptions=False).stdout

    assert "settled   train.precision: auto is bf16 on a GPU with bf16" in said("a100-80")
    assert "settled   train.precision: auto is fp32 on a GPU without bf16" in said("t4")
    assert "settled   train.compile: auto is false on a CPU" in said("cpu")
