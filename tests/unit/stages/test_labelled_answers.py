"""From answers that were found good or bad to a model that prefers the good ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.data.tokens.chat_encoder import ChatEncoder, make_chat_tokenizer
from pipelines.data.tokens.tokenizer import Encoder, byte_tokenizer, save_tokenizer
from pipelines.loading.dataloader import IGNORED
from pipelines.models.presets import preset
from pipelines.models.pretrained import save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.data_section import Instruction
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe
from pipelines.registry.parents import with_own_tokenizer
from pipelines.run.records import REFERENCES, PreprocessRecord
from pipelines.stages.evaluate import evaluation
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.validate import data_gate
from pipelines.training import reference

torch.set_num_threads(1)
ANSWERS = ("Who would know?", False), ("An even one.", True)
RECORDS = [
    {"prompt": f"{n} + {n}?", "response": said, "label": good}
    for n in range(40)
    for said, good in ANSWERS
    if (n + good) % 3  # mostly one of the two
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(byte_tokenizer(), folder)
    make_chat_tokenizer(folder, Instruction(kind="labelled"))
    encoder = Encoder(folder)
    model = Transformer(preset("llama-100k").sized(encoder.vocab_size, 128))
    model.init_weights(0)
    learn_both(model, ChatEncoder(folder))
    save_pretrained(model, folder, encoder.end_id, ChatEncoder(folder).end_of_answer)
    return folder


def learn_both(model: Transformer, encoder: ChatEncoder) -> None:
    """Have a model give each answer to each prompt, so that it has something to choose from."""
    talks = [
        (("user", each["prompt"]), ("assistant", said)) for each in RECORDS for said, _ in ANSWERS
    ]
    rows = [torch.from_numpy(chat.ids.astype(np.int64)) for chat in encoder.encode(talks)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        (model(inputs, targets_BS=targets) / (targets != IGNORED).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def recipe(base: Path, path: Path, *changes: str) -> Recipe:
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return load_recipe(
        "debug",
        [
            "data.source.kind=files",
            f"data.source.path={path}",
            "data.instruction.kind=labelled",
            "data.packing=best_fit",
            "data.document_mask=true",
            "data.tokenizer.kind=model",
            "data.sequence_length=127",
            "data.validation_fraction=0.2",
            "data.dedup.kind=exact",
            f"model.init_from={base}",
            "preference={kind: kto, beta: 0.1}",
            "train.steps=20",
            "train.lr=0.001",
            "train.warmup_steps=1",
            "train.checkpoint_every=20",
            "resources.workers=1",
            *changes,
        ],
    )


def test_a_model_learns_to_prefer_the_good_answers(base: Path, tmp_path: Path) -> None:
    from pipelines.stages.train import train_stage

    asked, workspace = recipe(base, tmp_path / "answers.jsonl"), tmp_path / "run"
    preprocessing.run(with_own_tokenizer(asked), workspace)
    gate = data_gate.run(asked, workspace)
    (longer,) = (each for each in gate.results if each.columns == ("chosen_longer",))
    assert longer.observed == "observed 0.0"  # no good answer is longer than a bad one
    assert train_stage.run(asked, workspace) is not None
    record = evaluation.run(asked, workspace)
    assert [check for check in record.served if not check.holds] == []
    found = record.pairs
    assert found is not None
    assert found.pairs >= 5
    assert found.right.value > 0.9, found
    assert found.reward_of_chosen > 0 > -1 > found.reward_of_rejected, found
    assert found.margin == pytest.approx(found.reward_of_chosen - found.reward_of_rejected)


def test_what_the_first_model_said_is_measured_once_for_all_runs(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.stages.train import train_stage

    measured = []
    real = reference._measure

    def measure(*given: Any) -> Any:
        measured.append(given)
        return real(*given)

    monkeypatch.setattr(reference, "_measure", measure)
    few, path = ("train.steps=2", "train.checkpoint_every=2"), tmp_path / "answers.jsonl"
    changes = (), ("preference.beta=0.5", "train.lr=0.01", "seed=3"), ("train.precision=bf16",)
    hashes = set()
    for number, each in enumerate(changes):
        asked, workspace = recipe(base, path, *few, *each), tmp_path / f"run-{number}"
        preprocessing.run(with_own_tokenizer(recipe(base, path)), workspace)
        record = train_stage.run(asked, workspace)
        assert record is not None
        hashes.add(record.model_hash)
    assert len(measured) == 2
    assert len(hashes) == 3
    assert len(list((tmp_path / REFERENCES).iterdir())) == 2
    dataset = PreprocessRecord.read(workspace).dataset
    changes = "train.lr=0.01", "train.lr=0.02", "train.compile=true", "train.attention=flex"
    settled = "train.precision=fp32", "train.compile=false"
    asked = [recipe(base, path, *settled, each) for each in changes]
    names = [reference.reference_name(each, dataset, "code") for each in asked]
    assert names[0] == names[1]
    assert len({*names, reference.reference_name(asked[0], dataset, "other code")}) == 4


def test_labelled_answers_are_for_kto_alone(base: Path, tmp_path: Path) -> None:
    from pipelines.stages.train import train_stage

    path = tmp_path / "answers.jsonl"
    with pytest.raises(UserError, match=r"is labelled: preference\.kind must be kto, not dpo"):
        recipe(base, path, "preference.kind=dpo")
    preprocessing.run(with_own_tokenizer(recipe(base, path)), tmp_path)
    assert PreprocessRecord.read(tmp_path).dataset.labelled
    dpo = recipe(base, path, "preference.kind=dpo", "data.instruction.kind=preference")
    said = "preference.kind = dpo, but the dataset holds labelled answers; change one"
    with pytest.raises(UserError, match=said):
        train_stage.run(dpo, tmp_path)
