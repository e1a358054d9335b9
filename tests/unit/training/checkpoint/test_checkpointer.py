"""What is saved comes back, what is not whole is never taken, and what is wrong is one line."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.storage import MARKER
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import DatasetRef, Split
from pipelines.training.checkpoint import dcp_files
from pipelines.training.checkpoint.checkpointer import Checkpoints, Position
from pipelines.training.checkpoint.state import identity
from pipelines.training.checkpoint.store import CheckpointStore
from tests.forked import exit_codes, start
from tests.s3_server import s3_bucket
from tests.settled import FP32


class Run:
    """A small model whose weights move at each step."""

    def __init__(self, place: Path | str, hidden: int = 24, layers: int = 2, **options: Any):
        shape = DecoderConfig(
            layers=layers,
            width=16,
            heads=2,
            kv_heads=1,
            hidden=hidden,
            vocab_size=50,
            context_length=16,
        )
        model = Transformer(shape)
        model.init_weights(seed=0)
        self.model = Parallelized(build_mesh(Layout(), torch.device("cpu")), [model])
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        self.store = CheckpointStore(place)
        self.checkpoints = Checkpoints(self.store, self.model, self.optimizer, **options)

    def step(self, number: int = 0) -> None:
        torch.manual_seed(number)
        tokens = torch.randint(50, (2, 9))
        self.model.parts[0](tokens[:, :-1], targets_BS=tokens[:, 1:]).backward()
        self.checkpoints.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        moments = [self.optimizer.state[p] for p in self.model.parameters()]
        return [p.detach().clone() for p in self.model.parameters()] + [
            each[key].clone() for each in moments for key in sorted(each)
        ]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def saved(place: Path | str, step: int = 3) -> Run:
    run = Run(place)
    for number in range(step):
        run.step(number)
    run.checkpoints.save(Position(step, 1.5))
    run.checkpoints.wait()
    return run


def test_weights_moments_and_position_come_back(place: str) -> None:
    run = saved(place)
    again = Run(place)
    assert again.checkpoints.restore() == Position(3, 1.5)
    assert same(again.state(), run.state())
    run.step(3)
    again.step(3)
    assert same(again.state(), run.state())


def test_nothing_is_restored_where_nothing_is(place: str) -> None:
    run = Run(place)
    before = run.state()
    assert run.checkpoints.restore() == Position()
    assert same(run.state(), before)


def test_a_save_holds_the_step_it_was_made_at(tmp_path: Path) -> None:
    """The copy is still being made while training goes on."""
    run = Run(tmp_path, hidden=20_000)
    run.step()
    states = {}
    for number in (1, 2, 3):
        states[number] = run.state()
        run.checkpoints.save(Position(number))
        run.step(number)
    run.checkpoints.wait()
    for newest in (3, 2):
        again = Run(tmp_path, hidden=20_000)
        assert again.checkpoints.restore().step == newest
        assert same(again.state(), states[newest])
        run.store.remove(newest)


def test_a_loss_scale_is_a_part_of_it(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    run = Run(tmp_path, others={"scaler": scaler})
    run.step()
    scaler.scale(torch.ones(()))
    scaler.update(new_scale=512.0)
    run.checkpoints.save(Position(1))
    run.checkpoints.wait()
    fresh = torch.amp.GradScaler("cpu", init_scale=1024)
    fresh.scale(torch.ones(()))
    Run(tmp_path, others={"scaler": fresh}).checkpoints.restore()
    assert fresh.get_scale() == 512.0


def test_the_newest_and_the_best_are_kept(place: str) -> None:
    run = Run(place, keep=2, keep_best=True)
    run.step()
    for step, losses in enumerate(([5.0], [2.0, 4.0], [1.0, 9.0], [3.5], [3.2]), 1):
        for loss in losses:
            run.checkpoints.note(loss)
        run.checkpoints.save(Position(step))
    run.checkpoints.wait()
    assert run.store.steps() == [2, 4, 5]
    assert run.store.facts(2)["loss"] == 3.0


def test_what_a_run_went_back_from_makes_no_checkpoint_worse(tmp_path: Path) -> None:
    run = saved(tmp_path)
    run.checkpoints.note(100.0)
    run.checkpoints.restore()
    run.checkpoints.note(2.0)
    run.checkpoints.save(Position(4))
    run.checkpoints.wait()
    assert run.store.facts(4)["loss"] == 2.0


def test_a_million_steps_come_after_a_few_less(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        run.checkpoints.save(Position(step))
    run.checkpoints.wait()
    assert run.store.steps() == [1_000_000, 1_000_001]
    assert {path.name for path in tmp_path.iterdir()} == {"step-1000000", "step-1000001"}


def test_a_torn_one_is_never_taken_and_goes(place: str) -> None:
    store = CheckpointStore(place)
    store.claim("a")
    run = saved(place, step=3)
    run.checkpoints.save(Position(4))
    run.checkpoints.wait()
    store._place.remove(f"step-000004/{MARKER}")
    assert Run(place).checkpoints.restore().step == 3
    store.claim("a")
    assert list(store._all()) == [3]
    store.claim("b")
    assert list(store._all()) == []


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(place: str, moment: str) -> None:
    """Save step 3, and die while step 4 is saved."""
    run = saved(place, step=3)
    if moment == "between files and marker":
        run.store.complete = die
    elif moment == "in the middle of a file":
        written: list[Any] = []
        write = filesystem._write_item

        def some(*arguments: Any) -> Any:
            written.append(write(*arguments))
            return die() if len(written) == 4 else written[-1]

        filesystem._write_item = some
    else:
        run.store.prune = die
    run.checkpoints.save(Position(4))
    run.checkpoints.wait()


@pytest.mark.parametrize(
    ("moment", "newest"),
    [("in the middle of a file", 3), ("between files and marker", 3), ("after the marker", 4)],
)
def test_a_process_that_is_killed_leaves_no_half_checkpoint(
    tmp_path: Path, moment: str, newest: int
) -> None:
    place = tmp_path / "checkpoints"
    dead = start(save_and_die, str(place), moment)
    assert exit_codes([dead]) == [-signal.SIGKILL]
    assert (place / "step-000004").is_dir()
    run = Run(place)
    assert run.checkpoints.restore().step == newest
    again = saved(tmp_path / "again", step=3)
    assert same(run.state(), again.state())


def test_an_earlier_try_of_the_same_step_is_no_part_of_it(tmp_path: Path) -> None:
    torn = tmp_path / "step-000003"
    torn.mkdir()
    (torn / "__9_0.distcp").write_bytes(b"of nine processes")
    saved(tmp_path)
    assert sorted(path.name for path in torn.iterdir()) == [".metadata", MARKER, "__0_0.distcp"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_write_that_is_refused_is_told_at_the_next_save_or_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    run = saved(tmp_path)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(dcp_files.FsspecWriter, "finish", refused)
        run.checkpoints.save(Position(4))
        line = r"step-000004: the checkpoint can't be written: .*Permission denied"
        with pytest.raises(UserError, match=line) as told:
            if ends:
                with run.checkpoints:
                    pass
            else:
                run.checkpoints.save(Position(5))
    assert "\n" not in str(told.value)
    assert run.store.steps() == [3]


def test_a_store_that_does_not_answer_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise ConnectionResetError("no answer")

    with s3_bucket("bucket"):
        run = saved("s3://bucket/run")
        monkeypatch.setattr(dcp_files.FsspecWriter, "finish", away)
        run.checkpoints.save(Position(4))
        with pytest.raises(UnreachableError, match=r"step-000004: .*can't be written: no answer"):
            run.checkpoints.wait()


def test_where_training_failed_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = saved(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp_files.FsspecWriter, "finish", full)
    with pytest.raises(ZeroDivisionError), run.checkpoints:
        run.checkpoints.save(Position(4))
        raise ZeroDivisionError
    assert "No space left" in caplog.text


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.98])
def test_a_truncated_file_is_one_line(tmp_path: Path, kept: float) -> None:
    saved(tmp_path)
    (path,) = tmp_path.rglob("*.distcp")
    os.truncate(path, int(path.stat().st_size * kept))
    line = r"step-000003: the checkpoint can't be loaded: .*__0_0.distcp"
    with pytest.raises(UserError, match=line) as raised:
        Run(tmp_path).checkpoints.restore()
    assert "\n" not in str(raised.value)


def test_a_flipped_bit_is_one_line(place: str) -> None:
    """Anywhere in a tensor's bytes, so that it is no structure that breaks."""
    run = saved(place)
    name = "step-000003/__0_0.distcp"
    files = run.store._place
    content = bytearray(
        Path(files.url(name)).read_bytes()
        if "://" not in place
        else files._store.cat_file(f"{files._path}/{name}")
    )
    weight = run.model.named_parameters()["layers.1.mlp.up_proj.weight"]
    at = content.index(weight.detach().numpy().tobytes()) + 1000
    content[at] ^= 1
    if "://" in place:
        files._store.pipe_file(f"{files._path}/{name}", bytes(content))
    else:
        Path(files.url(name)).write_bytes(content)
    with pytest.raises(UserError, match=r"__0_0.distcp: model.layers.1.mlp.up_proj.weight is dam"):
        Run(place).checkpoints.restore()


def test_a_missing_file_is_one_line(place: str) -> None:
    run = saved(place)
    run.store._place.remove("step-000003/__0_0.distcp")
    with pytest.raises(UserError, match=r"step-000003: .*__0_0.distcp.* is missing"):
        Run(place).checkpoints.restore()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            {"hidden": 32},
            r"model.layers.0.mlp.down_proj.weight is \(16, 24\) there, but \(16, 32\)",
        ),
        ({"layers": 3}, r"it has no model.layers.2.input_layernorm.weight"),
        ({"layers": 1}, r"it also has model.layers.1.input_layernorm.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_one_line(
    tmp_path: Path, other: dict[str, int], difference: str
) -> None:
    saved(tmp_path)
    with pytest.raises(UserError, match=f"of another model or adapter: {difference}") as raised:
        Run(tmp_path, **other).checkpoints.restore()
    assert "\n" not in str(raised.value)


def test_frozen_weights_are_left_to_where_they_came_from(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.model.modules[0].embed_tokens.requires_grad_(False)
    run.step()
    run.checkpoints.save(Position(1))
    run.checkpoints.wait()
    metadata = run.store.url(1) + "/.metadata"
    assert b"model.norm.weight" in Path(metadata).read_bytes()
    assert b"embed_tokens" not in Path(metadata).read_bytes()
    with pytest.raises(
        UserError, match=r"of another model or adapter: it has no model.embed_tokens"
    ):
        Run(tmp_path).checkpoints.restore()


def test_what_was_never_claimed_is_not_deleted(place: str) -> None:
    store = CheckpointStore(place)
    store._place.write("step-by-step/thesis.txt", "years")
    with pytest.raises(UserError, match=r"step-by-step is no checkpoint's, and would be deleted"):
        store.claim("a")
    assert store._place.read("step-by-step/thesis.txt") == "years"
    store._place.remove("step-by-step")
    store.claim("a")
    store.claim("b")
    assert store._place.list() == ["identity"]
    store.clear()
    assert store._place.list() == []


def test_only_a_folder_or_s3() -> None:
    with pytest.raises(UserError, match="a folder or an s3:// URL only"):
        CheckpointStore("gs://bucket")
    with pytest.raises(ValueError, match="password"):
        Recipe.model_validate({"name": "t", "train": {"checkpoints": "s3://me:secret@host/b"}})


def test_no_such_bucket_is_one_line() -> None:
    with (
        s3_bucket("bucket"),
        pytest.raises(UserError, match=r"s3://other/run: .*[bB]ucket") as raised,
    ):
        CheckpointStore("s3://other/run").claim("a")
    assert "\n" not in str(raised.value)


SPLIT = Split(documents=1, bytes=1, tokens=1, shards=())
DATASET = DatasetRef(vocab_size=50, train=SPLIT, validation=SPLIT)


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [
        ({"parallel": {"tp": 2, "sharding": "full"}}, True),
        ({"resources": {"workers": 4}}, True),
        ({"train": {"micro_batch_size": 4, "compile": True, "log_every": 3}}, True),
        ({"train": {"activation_checkpoint": "full", "checkpoints": "s3://bucket"}}, True),
        ({"train": {"attention": "varlen"}}, True),
        ({"data": {"reader": "pinned"}}, True),
        ({"seed": 7}, False),
        ({"train": {"lr": 0.5}}, False),
        ({"train": {"steps": 900}}, False),
        ({"train": {"global_batch_size": 32}}, False),
        ({"train": {"precision": "bf16"}}, False),
        ({"model": {"preset": "llama-125m"}}, False),
        ({"adapter": {"kind": "lora"}}, False),
    ],
)
def test_a_run_goes_on_unless_samples_or_mathematics_change(
    change: dict[str, Any], goes_on: bool
) -> None:
    changed = change | {"train": FP32 | change.get("train", {})}
    one = identity(Recipe.model_validate({"name": "t", "train": FP32}), DATASET)
    other = identity(Recipe.model_validate({"name": "t"} | changed), DATASET)
    assert (one == other) is goes_on


def test_facts_are_plain_json(tmp_path: Path) -> None:
    saved(tmp_path)
    facts = json.loads((tmp_path / "step-000003" / MARKER).read_text())
    assert facts == {"step": 3, "seconds": 1.5, "loss": None, "others": {}}
    shutil.move(tmp_path / "step-000003", tmp_path / "elsewhere" / "step-000003")
    assert Run(tmp_path / "elsewhere").checkpoints.restore() == Position(3, 1.5)
