"""Each mistake that can be known before a run begins, and what in *prepare* refuses it."""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.settings import PROJECT, load_settings
from pipelines.core.storage import write_json
from pipelines.data.tokens.tokenizer import byte_tokenizer, character_tokenizer, save_tokenizer
from pipelines.datasets.dataset_publishing import make
from pipelines.models.config import DecoderConfig
from pipelines.models.lora import add_adapters, chosen_sizes
from pipelines.models.peft_format import save_adapter
from pipelines.models.pretrained import save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.orchestration.cluster_plan import plan_on_cluster
from pipelines.recipe.recipe_files import load_recipe, override_values
from pipelines.registry.parents import Settled, settle_run, with_folders
from pipelines.run.records import output_folder
from pipelines.stage_cache import dvc_cache
from pipelines.stages import beforehand, places_beforehand
from pipelines.stages.beforehand import ALONE, CHECKS, PUBLISHING, Check, check_beforehand
from tests.forked import exit_codes, start
from tests.unit.datasets.dataset_workspace import make_workspace, validate
from tests.unit.orchestration.test_cluster_plan import node, ray_says

CHAT = ("data.instruction.kind=prompt_response",)
BASE = "model.init_from={base}"
NOBODY = 65534


def plan(run: Settled) -> None:
    """What *prepare* does after the checks, on a cluster of one small node."""
    with ray_says({"result": True, "msg": "", "data": {"summary": [node()]}}) as url:
        os.environ["RAY_API_SERVER_ADDRESS"] = url
        plan_on_cluster(load_settings(), run.ready, run.source)


def settle(run: Settled) -> None:
    """What *prepare* does before the checks."""
    settle_run(run.recipe)


# The rows of docs/projects.md that no check refuses.
ELSEWHERE = {
    settle: (
        "preprocess",
        "a text, a dataset version or a registered model that is missing or can't be read",
    ),
    plan: (
        "train",
        "more workers than the cluster has GPUs (or CPUs); a model that does not fit into the "
        "devices' memory",
    ),
}


class Mistake(NamedTuple):
    """What refuses it, what the recipe says, what the user reads, and the environment."""

    by: Callable[[Settled], None]
    overrides: tuple[str, ...]
    told: str
    variables: Mapping[str, str] = MappingProxyType({})


def of_dataset(label: str) -> tuple[str, ...]:
    return ("data.source.kind=dataset", f"data.source.path={label}")


# {tmp} is a folder with broken files, {base} a model, {bare} the same without its tokenizer.
MISTAKES = {
    "no such text": Mistake(
        settle,
        ("data.source.kind=files", "data.source.path={tmp}/none.txt"),
        "{tmp}/none.txt: no such file or folder; fix data.source.path",
    ),
    "no such dataset": Mistake(settle, of_dataset("none@1"), "no dataset is named 'none'"),
    "no such model": Mistake(
        settle, ("model.init_from=models:/none@champion",), "no model is registered as 'none'"
    ),
    "more workers than there are processors": Mistake(
        plan,
        ("resources.workers=5", "train.global_batch_size=20"),
        "resources.workers = 5: the Ray cluster has 4 CPUs",
    ),
    "a model that is too large": Mistake(
        plan, ("model.preset=llama3-70b",), "no layout for this number of devices fits"
    ),
    "no tokenizer": Mistake(
        beforehand.check_tokenizer,
        ("data.tokenizer.kind=pretrained", "data.tokenizer.path={tmp}/none.json"),
        "no such file; data.tokenizer.path names a tokenizer.json",
    ),
    "a broken tokenizer": Mistake(
        beforehand.check_tokenizer,
        ("data.tokenizer.kind=pretrained", "data.tokenizer.path={tmp}/broken.json"),
        "not a tokenizer.json",
    ),
    "a base without a tokenizer": Mistake(
        beforehand.check_tokenizer,
        ("model.init_from={bare}", "data.tokenizer.kind=model"),
        "model.init_from = {bare}: that folder has no tokenizer.json: put the one",
    ),
    "no chat template": Mistake(
        beforehand.check_template,
        (*CHAT, "data.instruction.chat_template={tmp}/none.jinja"),
        "fix data.instruction.chat_template",
    ),
    "a broken chat template": Mistake(
        beforehand.check_template,
        (*CHAT, "data.instruction.chat_template={tmp}/broken.jinja"),
        "fix the data or data.instruction.chat_template",
    ),
    "no such country": Mistake(
        beforehand.check_cleaning,
        ("data.pii.phone_region=XX",),
        "data.pii.phone_region = 'XX': no country has this code",
    ),
    "no such script": Mistake(
        beforehand.check_cleaning,
        ("data.filters.character_set.scripts=[Klingon]",),
        "Unicode has no script 'Klingon'",
    ),
    "no such extension": Mistake(
        beforehand.check_extensions,
        ("data.filters.extensions=[{name: none}]",),
        "none",
    ),
    "a new tokenizer of the base's size": Mistake(
        beforehand.check_base_tokenizer,
        (BASE, "data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=257"),
        "data.tokenizer.kind = 'bpe' makes a new tokenizer, but model.init_from = {base} knows "
        "the ids of the one that it was trained with; set data.tokenizer.kind = model",
    ),
    "a tokenizer of characters": Mistake(
        beforehand.check_base_tokenizer,
        (BASE, "data.tokenizer.kind=char"),
        "data.tokenizer.kind = 'char' makes a new tokenizer",
    ),
    "a tokenizer of an extension": Mistake(
        beforehand.check_base_tokenizer,
        (
            BASE,
            "data.tokenizer.kind=extension",
            "data.tokenizer.extension={name: none}",
            "data.tokenizer.vocab_size=257",
        ),
        "data.tokenizer.kind = 'extension' makes a new tokenizer",
    ),
    "another model's tokenizer of the same size": Mistake(
        beforehand.check_base_tokenizer,
        (BASE, "data.tokenizer.kind=pretrained", "data.tokenizer.path={tmp}/other"),
        "data.tokenizer is another tokenizer, but model.init_from = {base}",
    ),
    "a chat template's marks that the base has no room for": Mistake(
        beforehand.check_base_tokenizer,
        (BASE, *CHAT),
        "data.tokenizer gives 259 token ids, but the vocabulary of model.init_from = {base} is 257",
    ),
    "a new tokenizer on a base without one": Mistake(
        beforehand.check_base_tokenizer,
        ("model.init_from={bare}", "data.tokenizer.kind=bpe"),
        "that folder has no tokenizer.json: put the one that it was trained with there, or name it",
    ),
    "a tokenizer that is too large for a base without one": Mistake(
        beforehand.check_base_tokenizer,
        (
            "model.init_from={bare}",
            "data.tokenizer.kind=pretrained",
            "data.tokenizer.path={tmp}/large",
        ),
        "data.tokenizer gives 302 token ids, but the vocabulary of model.init_from = {bare} is 257",
    ),
    "data with the ids of another tokenizer": Mistake(
        beforehand.check_dataset_tokenizer,
        (BASE, *of_dataset("other@1")),
        "data.source: other@1 has the ids of another tokenizer, but model.init_from = {base}",
    ),
    "a mixture with the ids of another tokenizer": Mistake(
        beforehand.check_dataset_tokenizer,
        (BASE, "data.source.kind=mixture", "data.source.mixture={other: 2, third: 1}"),
        "data.source: other@1 has the ids of another tokenizer",
    ),
    "data with more ids than a base without a tokenizer": Mistake(
        beforehand.check_dataset_tokenizer,
        ("model.init_from={small}", *of_dataset("other@1")),
        "data.source: other@1 gives 257 token ids, but the vocabulary of model.init_from = {small}",
    ),
    "a context that is too long": Mistake(
        beforehand.check_engine,
        (BASE, "data.sequence_length=128"),
        "its context is 64 tokens, but data.sequence_length = 128",
    ),
    "a batch that cannot be divided": Mistake(
        beforehand.check_engine,
        ("train.global_batch_size=4", "resources.workers=5"),
        "global_batch_size",
    ),
    "no such layer": Mistake(
        beforehand.check_adapter, (BASE, "adapter.kind=lora", "adapter.targets=[wq]"), "wq"
    ),
    "no adapter there": Mistake(
        beforehand.check_adapter,
        (BASE, "adapter.kind=lora", "adapter.init_from={tmp}"),
        "give an adapter in peft's format",
    ),
    "adapters of a deeper model": Mistake(
        beforehand.check_adapter,
        (BASE, "adapter.kind=lora", "adapter.init_from={tmp}/deeper"),
        "is not a complete adapter for this model",
    ),
    "adapters of a wider model": Mistake(
        beforehand.check_adapter,
        (BASE, "adapter.kind=lora", "adapter.init_from={tmp}/wider"),
        "it belongs to another model",
    ),
    "streamed data that are nowhere": Mistake(
        beforehand.check_reader,
        ("data.reader=object_store",),
        "data.reader = 'object_store' streams a dataset version from its remote",
    ),
    "a remote without the data": Mistake(
        beforehand.check_dataset_files,
        of_dataset("other@1"),
        "the list of its files: its object",
        {"PENSTOCK_DATASETS_REMOTE": "{tmp}/empty"},
    ),
    "a remote that is away": Mistake(
        beforehand.check_dataset_files,
        of_dataset("other@1"),
        "s3://bucket/data does not answer",
        {
            "PENSTOCK_DATASETS_REMOTE": "s3://bucket/data",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        },
    ),
    "a home that can't be written": Mistake(
        beforehand.check_home,
        (),
        "PENSTOCK_HOME: {tmp}/broken.json/home can't be written",
        {"PENSTOCK_HOME": "{tmp}/broken.json/home"},
    ),
    "checkpoints below a file": Mistake(
        beforehand.check_checkpoints,
        ("train.checkpoints={tmp}/broken.json/there",),
        "train.checkpoints: {tmp}/broken.json/there/penstock-probe cannot be written",
    ),
    "copies of checkpoints below a file": Mistake(
        beforehand.check_checkpoints,
        ('train.more_checkpoints=[{place: "{tmp}/broken.json/there"}]',),
        "train.more_checkpoints: {tmp}/broken.json/there/penstock-probe cannot be written",
    ),
    "a disk that is too small": Mistake(
        beforehand.check_disk,
        ("model.preset=llama3-70b",),
        "3 checkpoints and the model take at least",
    ),
    "a disk that is too small for checkpoints elsewhere": Mistake(
        beforehand.check_disk,
        ("model.preset=llama3-70b", "train.checkpoints=/dev/shm/penstock-none"),
        "/dev/shm/penstock-none has",
    ),
    "a disk that is too small for copies of checkpoints": Mistake(
        beforehand.check_disk,
        (
            "model.preset=llama3-70b",
            "train.more_checkpoints=[{place: /dev/shm/penstock-none}]",
        ),
        "/dev/shm/penstock-none has",
    ),
    "no bias templates": Mistake(
        beforehand.check_bias_templates,
        ("evaluate.bias.enabled=true", "evaluate.bias.templates={tmp}/none.json"),
        "none.json",
    ),
    "no task file": Mistake(
        beforehand.check_tasks,
        ("evaluate.harness.files=[{tmp}/none.yaml]",),
        "evaluate.harness.files: {tmp}/none.yaml",
    ),
    "a task file that is none": Mistake(
        beforehand.check_tasks,
        ("evaluate.harness.files=[{tmp}/broken.yaml]",),
        "the file has no `task:` key with a name",
    ),
    "an MLflow that is away": Mistake(
        beforehand.check_tracking,
        (),
        "no MLflow at http://127.0.0.1:9: ",
        {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
    ),
    "no key to sign with": Mistake(
        beforehand.check_signing_key,
        (),
        "{tmp}/none.pem: no key to sign the model with",
        {"PENSTOCK_SIGNING_KEY": "{tmp}/none.pem"},
    ),
    "uncommitted changes where the gate refuses them": Mistake(
        beforehand.check_clean,
        ("register.require_clean=true",),
        "register.require_clean: {tmp}/project has uncommitted changes",
    ),
    "a remote that can't be written": Mistake(
        beforehand.check_pushing,
        (),
        "PENSTOCK_DATASETS_REMOTE: {tmp}/broken.json/store can't be written",
        {"PENSTOCK_DATASETS_REMOTE": "{tmp}/broken.json/store"},
    ),
    "a repository that can't be written": Mistake(
        beforehand.check_pushing,
        (),
        "PENSTOCK_DATASETS_URL = {tmp}/broken.json/datasets.git can't be written",
        {"PENSTOCK_DATASETS_URL": "{tmp}/broken.json/datasets.git"},
    ),
    "a repository that is away": Mistake(
        beforehand.check_pushing,
        (),
        "no version can be pushed",
        {"PENSTOCK_DATASETS_URL": "http://127.0.0.1:9/datasets.git"},
    ),
}


@pytest.fixture
def world(home, tiny_model, tmp_path, monkeypatch):
    """Fills a text with the places of this test."""
    bare = shutil.copytree(tiny_model, tmp_path / "bare", ignore=lambda *_: ["tokenizer.json"])
    small = shutil.copytree(bare, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    write_json(small / "config.json", config | {"vocab_size": 200})
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "broken.jinja").write_text("{% for")
    (tmp_path / "broken.yaml").write_text("metrics: !function my.metric\n")
    characters = list(map(chr, range(0x100, 0x100 + 255)))
    save_tokenizer(character_tokenizer(characters), tmp_path / "other")
    save_tokenizer(character_tokenizer(map(chr, range(0x100, 0x22C))), tmp_path / "large")
    make_project(tmp_path / "project")
    monkeypatch.setattr(beforehand, "PROJECT", tmp_path / "project")
    places = {"{tmp}": tmp_path, "{base}": tiny_model, "{bare}": bare, "{small}": small}

    def fill(text):
        for word, place in places.items():
            text = text.replace(word, str(place))
        return text

    return fill


def make_project(folder):
    folder.mkdir()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", "-C", folder]
    (folder / "README.md").write_text("one\n")
    for command in (["init", "-q"], ["add", "README.md"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    (folder / "README.md").write_text("two\n")


def publish(tmp_path, name, tokenizer):
    workspace = make_workspace(tmp_path / f"run-{name}", f"some text of {name}\n" * 40, name=name)
    save_tokenizer(tokenizer, output_folder(workspace, "preprocess") / "tokenizer")
    validate(workspace)
    make(workspace)


def publish_wanted(tmp_path, overrides):
    """The datasets that a recipe names: making one takes a second."""
    for name in ("other", "third", "same"):
        if any(name in override for override in overrides):
            characters = map(chr, range(0x100, 0x100 + 255))
            made = byte_tokenizer() if name == "same" else character_tokenizer(characters)
            publish(tmp_path, name, made)


def write_adapter(folder, layers, width, only=""):
    shape = DecoderConfig(
        layers=layers,
        width=width,
        heads=2,
        kv_heads=1,
        hidden=32,
        vocab_size=257,
        context_length=64,
    )
    adapter = load_recipe("debug", ["adapter.kind=lora", f"model.init_from={folder}"]).adapter
    model = Transformer(shape)
    sizes = {name: size for name, size in chosen_sizes(model, adapter).items() if only in name}
    add_adapters(model, sizes, adapter, torch.float32)
    save_adapter(model, folder)


def test_a_stage_without_an_adapter_is_refused_before_the_run(tmp_path):
    layers, base = 2, tmp_path / "base"
    write_adapter(tmp_path / "adapter", layers, 16, only="layers.1.")
    shape = {"layers": layers, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 32}
    model = Transformer(DecoderConfig(**shape, vocab_size=257, context_length=64))
    save_pretrained(model, base)
    values = ["adapter.kind=lora", f"model.init_from={base}", "parallel.pp=2"]
    recipe = load_recipe("debug", [*values, f"adapter.init_from={tmp_path / 'adapter'}"])
    with pytest.raises(UserError, match="the stage of layers 0 to 0 has nothing to train"):
        beforehand.check_adapter(Settled(recipe, recipe, {}))
    alone = override_values(recipe, {"parallel.pp": 1})
    beforehand.check_adapter(Settled(alone, alone, {}))


def settled(overrides):
    """What a run starts from; the standard library is not read, which takes seconds."""
    recipe = load_recipe("debug", overrides)
    if recipe.data.source.is_published:
        return settle_run(recipe)
    return Settled(recipe, with_folders(recipe), {})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_the_run(mistake, world, tmp_path, monkeypatch):
    by, overrides, told, variables = MISTAKES[mistake]
    publish_wanted(tmp_path, overrides)
    write_adapter(tmp_path / "deeper", 2, 16)
    write_adapter(tmp_path / "wider", 1, 32)
    if by is settle:
        recipe = load_recipe("debug", [world(each) for each in overrides])
        run = Settled(recipe, recipe, {})
    else:
        run = settled([world(each) for each in overrides])
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # which `plan` sets
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("t\n")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, world(value))
    with pytest.raises(UserError) as refused:
        by(run)
    assert world(told) in str(refused.value)
    assert "\n" not in str(refused.value)
    if by not in ELSEWHERE:
        with pytest.raises(UserError, match=re.escape(world(told))):
            check_beforehand(run, PUBLISHING)


def test_every_check_has_a_mistake_that_it_refuses():
    assert {each.by for each in MISTAKES.values()} == {c.run for c in PUBLISHING} | {*ELSEWHERE}
    assert set(CHECKS) < set(PUBLISHING)


def test_the_documentation_lists_what_is_refused():
    text = (PROJECT / "docs/projects.md").read_text().split("## Refused before it begins")[1]
    rows = [tuple(map(str.strip, row.split("|")[1:3])) for row in re.findall(r"^\|.*", text, re.M)]
    listed = [(stage, mistake) for mistake, stage in rows[2:]]
    assert sorted(listed) == sorted(
        [*((c.stage, c.mistake) for c in PUBLISHING), *ELSEWHERE.values()]
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (BASE, "adapter.kind=lora", *CHAT, "data.tokenizer.kind=model"),
        (BASE, "data.tokenizer.kind=byte"),
        (BASE, "data.tokenizer.kind=pretrained", "data.tokenizer.path={base}"),
        (BASE, *of_dataset("same@1")),
        ("model.init_from={bare}", *of_dataset("other@1")),
        ("model.init_from={bare}", "data.tokenizer.kind=pretrained", "data.tokenizer.path={base}"),
        (BASE, "adapter.kind=lora", "adapter.init_from={tmp}/adapter", "data.tokenizer.kind=model"),
    ],
    ids=[
        "no base",
        "the base's tokenizer",
        "bytes",
        "the same file",
        "a dataset of the same ids",
        "a dataset and a base without a tokenizer",
        "a base without a tokenizer",
        "its own adapters",
    ],
)
def test_what_is_right_passes(overrides, world, tmp_path):
    publish_wanted(tmp_path, overrides)
    write_adapter(tmp_path / "adapter", 1, 16)
    check_beforehand(settled([world(each) for each in overrides]), PUBLISHING)


def test_the_same_tokenizer_in_other_files_passes(world, tmp_path, tiny_model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        values = json.loads((tiny_model / name).read_text())
        write_json(tmp_path / "again" / name, values)
    assert (tmp_path / "again/tokenizer.json").read_text() != (
        tiny_model / "tokenizer.json"
    ).read_text()
    pretrained = ("data.tokenizer.kind=pretrained", "data.tokenizer.path={tmp}/again")
    check_beforehand(settled([world(each) for each in (BASE, *pretrained)]), CHECKS)


def test_all_that_is_wrong_is_told_at_once(home):
    run = settled(["data.pii.phone_region=XX", "data.reader=object_store"])
    with pytest.raises(UserError, match=r"no country has this code.*; and data\.reader"):
        check_beforehand(run, CHECKS)


def test_an_outage_alone_is_tried_again_and_a_mistake_beside_it_is_not(home, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="no MLflow at"):
        check_beforehand(settled([]), CHECKS)
    with pytest.raises(UserError, match=r"no country has this code.*no MLflow at") as refused:
        check_beforehand(settled(["data.pii.phone_region=XX"]), CHECKS)
    assert not isinstance(refused.value, UnreachableError)


def test_what_hangs_is_an_outage_and_holds_up_nothing(monkeypatch):
    monkeypatch.setattr(beforehand, "_PATIENCE_S", 0.1)
    over = threading.Event()
    hangs = Check("train", lambda _: over.wait(60), "a disk that hangs", alone=False)
    with pytest.raises(UnreachableError, match=r"no answer in 0\.1 s, .*: a disk that hangs"):
        check_beforehand(settled([]), [hangs, hangs])
    over.set()


def test_an_mlflow_that_answers_nothing_is_an_outage(home, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setattr("pipelines.tracking.mlflow_client._TIMEOUT_S", 0.2)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(UnreachableError, match="no MLflow at"):
            beforehand.check_tracking(settled([]))


def test_artifacts_that_can_not_be_written_are_refused(home, mlflow_client, tmp_path):
    (tmp_path / "file").touch()
    mlflow_client.create_experiment(
        f"lost-{tmp_path.name}", artifact_location=str(tmp_path / "file/below")
    )
    told = f"MLflow's artifact store: {tmp_path}/file/below can't be written"
    with pytest.raises(UserError, match=re.escape(told)):
        beforehand.check_tracking(settled([f"name=lost-{tmp_path.name}"]))


def test_mlflow_is_left_as_it_was(home, mlflow_client):
    before = [each.name for each in mlflow_client.search_registered_models()]
    beforehand.check_tracking(settled([]))
    assert [each.name for each in mlflow_client.search_registered_models()] == before


def test_a_push_that_is_tried_leaves_no_ref(home):
    beforehand.check_pushing(settled([]))
    refs = subprocess.run(
        ["git", "-C", home / "datasets.git", "for-each-ref"], capture_output=True, check=True
    )
    assert refs.stdout == b""


def test_data_that_the_disk_has_no_room_for_are_refused(home, monkeypatch):
    debug = load_recipe("debug", ["data.source.max_documents=null"])
    source = {"source": {"inputs": [{"path": "a", "bytes": 2**60}]}}
    run = Settled(debug, debug, source)
    monkeypatch.setattr(places_beforehand, "shares_blocks", lambda *_: False)
    all_of_it = "the data, their copy in the stage cache, 3 checkpoints and the model take at least"
    with pytest.raises(UserError, match=f"{all_of_it} 576,461 TB"):
        places_beforehand.check_disk(run)
    # An earlier run had the same text: its data may be in the stage cache.
    write_json(load_settings().runs / "before/source.json", source)
    with pytest.raises(
        UserError, match="the data, 3 checkpoints and the model take at least 288,230 TB"
    ):
        places_beforehand.check_disk(run)
    # Of how much of it will be read nothing is known.
    few = load_recipe("debug", ["data.source.max_documents=9"])
    places_beforehand.check_disk(Settled(few, few, source))


def test_published_data_count_as_they_are_unless_they_are_streamed(home, tmp_path):
    publish(tmp_path, "same", byte_tokenizer())
    whole = places_beforehand._data_bytes(settled(of_dataset("same@1")))
    assert whole > 40 * len("some text of same\n")
    streamed = settled([*of_dataset("same@1"), "data.reader=object_store"])
    assert places_beforehand._data_bytes(streamed) == 0


def test_two_disks_share_no_blocks(tmp_path):
    assert not dvc_cache.shares_blocks(tmp_path, Path("/dev/shm"))


def test_alone_are_the_checks_that_ask_nothing_but_the_recipe(world, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", world("{tmp}/broken.json/home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    start = ("model.init_from=models:/none@champion", "data.tokenizer.kind=model")
    recipe = load_recipe("debug", [*start, *CHAT])
    check_beforehand(Settled(recipe, recipe, {}), ALONE)


def as_nobody(work, *arguments):
    """Exit with 0 if a user other than root is refused in one line."""
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        work(*arguments)
    except UserError as error:
        raise SystemExit(0 if "\n" not in str(error) and "denied" in str(error) else 3) from error
    raise SystemExit(4)


def settle_files(path):
    settle_run(load_recipe("debug", ["data.source.kind=files", f"data.source.path={path}"]))


def check_places(checkpoints, home):
    os.environ["PENSTOCK_HOME"] = home
    run = settled([f"train.checkpoints={checkpoints}"])
    (check,) = (check for check in CHECKS if check.run is beforehand.check_checkpoints)
    for each in (check, Check("preprocess", beforehand.check_home, "", alone=False)):
        with pytest.raises(UserError, match="denied"):
            check_beforehand(run, [each])
    raise UserError("denied")


@pytest.fixture
def closed():
    """A folder that everybody may enter, with a file and a folder that only their owner may."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "text.txt").write_text("text")
        (Path(folder) / "text.txt").chmod(0o000 if os.geteuid() else 0o600)
        (Path(folder) / "folder").mkdir()
        (Path(folder) / "folder/text.txt").write_text("text")
        (Path(folder) / "folder").chmod(0o000 if os.geteuid() else 0o700)
        yield Path(folder)
        (Path(folder) / "folder").chmod(0o700)


@pytest.mark.parametrize("name", ["text.txt", "folder", "folder/text.txt"])
def test_a_text_that_this_user_may_not_read_is_refused(name, closed):
    process = start(as_nobody, settle_files, str(closed / name))
    assert exit_codes([process]) == [0]


def test_places_that_this_user_may_not_write_are_refused(closed):
    process = start(as_nobody, check_places, str(closed / "folder/to"), str(closed / "folder/home"))
    assert exit_codes([process]) == [0]
