"""A model that starts from a chat model talks as its parent does, through the real stages."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from pipelines.data.tokens.chat_template import PLAIN_CHATML, TEMPLATE_FILE
from pipelines.recipe.recipe_files import load_recipe
from pipelines.registry.parents import with_own_tokenizer
from pipelines.run.records import output_folder
from pipelines.stages.preprocess import preprocessing

OWN = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize("template", [OWN, PLAIN_CHATML], ids=["its own", "ChatML"])
@pytest.mark.parametrize("kind", ["messages", "none"])
def test_a_child_of_a_chat_model_keeps_its_parents_template(template, kind, tiny_model, tmp_path):
    from pipelines.stages.train import train_stage

    parent = shutil.copytree(tiny_model, tmp_path / "parent")
    (parent / TEMPLATE_FILE).write_text(template)
    turns = ([{**MESSAGES[0], "content": f"Hi {n}?"}, MESSAGES[1]] for n in range(40))
    lines = (json.dumps({"messages": each, "text": each[0]["content"]}) for each in turns)
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    recipe = load_recipe(
        "debug",
        [
            "data.source.kind=files",
            f"data.source.path={tmp_path / 'data.jsonl'}",
            f"data.instruction.kind={kind}",
            "data.tokenizer.kind=model",
            "data.sequence_length=16",
            f"model.init_from={parent}",
            "train.steps=2",
            "train.warmup_steps=1",
            "train.checkpoint_every=2",
            "resources.workers=1",
        ],
    )
    workspace = tmp_path / "run"
    preprocessing.run(with_own_tokenizer(recipe), workspace)
    record = train_stage.run(recipe, workspace)
    child = output_folder(workspace, "train") / record.model
    assert (child / TEMPLATE_FILE).read_text() == template
    asked = {"tokenize": False, "add_generation_prompt": True}
    said, wanted = (
        AutoTokenizer.from_pretrained(each).apply_chat_template(MESSAGES[:1], **asked)
        for each in (child, parent)
    )
    assert said == wanted
