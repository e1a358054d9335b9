"""Each mistake that can be known before a run begins, and the stage where it showed before."""

import os
import subprocess

import pytest

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.recipe.recipe_files import load_recipe
from pipelines.stages import beforehand
from pipelines.stages.beforehand import CHECKS, check_beforehand

CHAT = ("data.instruction.kind=prompt_response",)


def test_what_is_right_passes(home, tiny_model):
    check_beforehand(load_recipe("debug"))
    start = (f"model.init_from={tiny_model}", "adapter.kind=lora", *CHAT)
    tokenizer = ("data.tokenizer.kind=model", f"data.tokenizer.path={tiny_model}")
    check_beforehand(load_recipe("debug", [*start, *tokenizer]))


# The stage where it showed before; what the recipe says; what the user reads. {tmp} is a folder
# with broken files, {base} a model.
MISTAKES = {
    "no tokenizer": (
        "preprocess",
        ("data.tokenizer.kind=pretrained", "data.tokenizer.path={tmp}/none.json"),
        "no such file; data.tokenizer.path names a tokenizer.json",
    ),
    "a broken tokenizer": (
        "preprocess",
        ("data.tokenizer.kind=pretrained", "data.tokenizer.path={tmp}/broken.json"),
        "not a tokenizer.json",
    ),
    "no chat template": (
        "preprocess",
        (*CHAT, "data.instruction.chat_template={tmp}/none.jinja"),
        "fix data.instruction.chat_template",
    ),
    "a broken chat template": (
        "preprocess",
        (*CHAT, "data.instruction.chat_template={tmp}/broken.jinja"),
        "fix the data or data.instruction.chat_template",
    ),
    "no such country": (
        "preprocess",
        ("data.pii.phone_region=XX",),
        "data.pii.phone_region = 'XX': no country has this code",
    ),
    "no such script": (
        "preprocess",
        ("data.filters.character_set.scripts=[Klingon]",),
        "Unicode has no script 'Klingon'",
    ),
    "a vocabulary that is too large": (
        "train",
        ("model.init_from={base}", *CHAT),
        "data.tokenizer gives 259 token ids, but the vocabulary of model.init_from = {base} is 257",
    ),
    "another model's tokenizer": (
        "train",
        (
            "model.init_from={base}",
            "data.tokenizer.kind=bpe",
            "data.tokenizer.vocab_size=300",
        ),
        "data.tokenizer gives 300 token ids",
    ),
    "a context that is too long": (
        "train",
        ("model.init_from={base}", "data.sequence_length=128"),
        "its context is 64 tokens, but data.sequence_length = 128",
    ),
    "no such layer": (
        "train",
        ("model.init_from={base}", "adapter.kind=lora", "adapter.targets=[wq]"),
        "wq",
    ),
    "no adapter there": (
        "train",
        ("model.init_from={base}", "adapter.kind=lora", "adapter.init_from={tmp}"),
        "give an adapter in peft's format",
    ),
    "a batch that cannot be divided": (
        "train",
        ("train.global_batch_size=4", "resources.workers=5"),
        "global_batch_size",
    ),
    "streamed data that are nowhere": (
        "train",
        ("data.reader=object_store",),
        "data.reader = 'object_store' streams a dataset version from its remote",
    ),
    "checkpoints below a file": (
        "train",
        ("train.checkpoints={tmp}/broken.json/there",),
        "train.checkpoints: {tmp}/broken.json/there/penstock-probe cannot be written",
    ),
    "a disk that is too small": (
        "train",
        ("model.preset=llama3-70b",),
        "3 checkpoints and the model take",
    ),
    "no bias templates": (
        "evaluate",
        ("evaluate.bias.enabled=true", "evaluate.bias.templates={tmp}/none.json"),
        "none.json",
    ),
    "no task file": (
        "evaluate",
        ("evaluate.harness.files=[{tmp}/none.yaml]",),
        "evaluate.harness.files: {tmp}/none.yaml",
    ),
    "a task file that is none": (
        "evaluate",
        ("evaluate.harness.files=[{tmp}/broken.yaml]",),
        "the file has no `task:` key with a name",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_the_run(mistake, home, tiny_model, tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "broken.jinja").write_text("{% for")
    (tmp_path / "broken.yaml").write_text("metrics: !function my.metric\n")
    stage, overrides, told = MISTAKES[mistake]
    filled = [
        each.replace("{tmp}", str(tmp_path)).replace("{base}", str(tiny_model))
        for each in overrides
    ]
    recipe = load_recipe("debug", filled)
    wanted = told.replace("{tmp}", str(tmp_path)).replace("{base}", str(tiny_model))
    with pytest.raises(UserError) as refused:
        check_beforehand(recipe)
    assert wanted in str(refused.value)
    assert "\n" not in str(refused.value)
    assert stage in {check.stage for check in CHECKS if refuses(check, recipe)}


def refuses(check, recipe):
    try:
        check.run(recipe)
    except UserError:
        return True
    return False


def test_a_missing_key_to_sign_with_is_refused(home):
    load_settings().signing_key.unlink()
    with pytest.raises(UserError, match="no key to sign the model with"):
        check_beforehand(load_recipe("debug"))


def test_uncommitted_changes_are_refused_where_the_gate_would(home, tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", "-C", tmp_path]
    (tmp_path / "README.md").write_text("one\n")
    for command in (["init", "-q"], ["add", "README.md"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(beforehand, "PROJECT", tmp_path)
    recipe = load_recipe("debug", ["register.require_clean=true"])
    check_beforehand(recipe)
    (tmp_path / "README.md").write_text("two\n")
    with pytest.raises(UserError, match=r"^register\.require_clean: .* has uncommitted changes"):
        check_beforehand(recipe)


def test_all_that_is_wrong_is_told_at_once(home):
    recipe = load_recipe("debug", ["data.pii.phone_region=XX", "data.reader=object_store"])
    with pytest.raises(UserError, match=r"no country has this code.*; and data\.reader"):
        check_beforehand(recipe)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_checkpoints_that_nobody_may_write_are_refused(home, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        check_beforehand(load_recipe("debug", [f"train.checkpoints={tmp_path}/there"]))
