"""Sound tokenizers and templates pass after a real preprocess, and planted faults are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, processors

from pipelines.core.storage import read_json, write_json
from pipelines.data.tokens.chat_encoder import ChatEncoder
from pipelines.data.tokens.chat_template import TEMPLATE_FILE
from pipelines.data.tokens.tokenizer import Encoder
from pipelines.evaluation.held_out_documents import read_documents
from pipelines.evaluation.served_text import check_text
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.records import VALIDATION, PreprocessRecord, output_folder
from pipelines.stages.preprocess import preprocessing
from tests.unit.data.tokens.test_known_templates import KNOWN, saved, template

WORDS = ["the", "valve", "opens", "water", "flows", "through", "a", "pipe", "turns", "wheels"]
BPE = ("data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=300")


@dataclass
class Made:
    """The outputs of a real preprocess, and the folder of a model that was trained on them."""

    preprocess: Path
    served: Path

    def failing(self) -> set[str]:
        documents = read_documents(self.preprocess / "documents", VALIDATION, 1 << 20)
        return {each.name for each in self.check(documents) if not each.holds}

    def check(self, documents: pa.Table) -> tuple:
        dataset = PreprocessRecord.read(self.preprocess.parent.parent).dataset
        return check_text(self.served, self.preprocess, dataset, documents)


def make(folder: Path, chat: bool, *overrides: str) -> Made:
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, 12)) + "." for _ in range(240)]
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in zip(texts[::2], texts[1::2], strict=True)
    ]
    plain = [{"text": text} for text in texts]
    lines = "\n".join(json.dumps(row) for row in (rows if chat else plain))
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_text(lines)
    return preprocessed(
        folder, f"data.instruction.kind={'messages' if chat else 'none'}", *overrides, chat=chat
    )


def preprocessed(folder: Path, *overrides: str, chat: bool = True) -> Made:
    recipe = load_recipe(
        "debug",
        [
            "data.source.kind=files",
            f"data.source.path={folder / 'data.jsonl'}",
            "data.validation_fraction=0.2",
            *overrides,
        ],
    )
    preprocessing.run(recipe, folder / "run")
    preprocess = output_folder(folder / "run", "preprocess")
    served = shutil.copytree(preprocess / "tokenizer", folder / "served")
    end = Encoder(served).end_id
    write_json(served / "config.json", {"eos_token_id": end})
    ends = [ChatEncoder(served).end_of_answer, end] if chat else end
    write_json(served / "generation_config.json", {"eos_token_id": ends})
    return Made(preprocess, served)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
@pytest.mark.parametrize("chat", [False, True], ids=["texts", "conversations"])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_sound_tokenizers_pass(kind: str, chat: bool, packing: str, tmp_path: Path) -> None:
    tokenizer = f"data.tokenizer.kind={kind}", "data.tokenizer.vocab_size=300"
    made = make(tmp_path, chat, *tokenizer, f"data.packing={packing}", "data.sequence_length=256")
    assert made.failing() == set()


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("name", KNOWN)
def test_sound_templates_pass(name: str, packing: str, tmp_path: Path) -> None:
    tokenizer = saved(tmp_path / "kept", template(name))
    made = make(
        tmp_path,
        True,
        "data.tokenizer.kind=pretrained",
        f"data.tokenizer.path={tokenizer}",
        f"data.packing={packing}",
        "data.sequence_length=256",
    )
    assert made.failing() == set()


def test_sound_pairs_pass_and_another_mask_is_found(tmp_path: Path) -> None:
    before = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Yes?"}]
    rows = [
        {
            "prompt": [*before, {"role": "user", "content": f"{n} + 1?"}],
            "chosen": [{"role": "assistant", "content": f"It is {n + 1}."}],
            "rejected": [{"role": "assistant", "content": "Never. " * (1 + 40 * (n % 5 == 0))}],
        }
        for n in range(60)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    made = preprocessed(
        tmp_path,
        "data.instruction.kind=preference",
        "preference.kind=simpo",
        "data.packing=best_fit",
        "data.document_mask=true",
        "data.tokenizer.kind=byte",
        "data.sequence_length=350",
    )
    assert 0 < read_json(made.preprocess / "stats.json")["left_out_pairs"] < 60
    assert made.failing() == set()
    (mask,) = (made.preprocess / "tokens").glob("validation-*.mask")
    mask.write_bytes(bytes(mask.stat().st_size))
    assert made.failing() == {"training data"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("texts"), False, *BPE)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("talks"), True, *BPE)


def _begin_twice(made: Made) -> None:
    tokenizer = Tokenizer.from_file(str(made.served / "tokenizer.json"))
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    twice = processors.TemplateProcessing("<|endoftext|> <|endoftext|> $A", special_tokens=[end])
    tokenizer.post_processor = twice
    tokenizer.save(str(made.served / "tokenizer.json"))


def _end_each_text(made: Made) -> None:
    tokenizer = Tokenizer.from_file(str(made.served / "tokenizer.json"))
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "$A <|endoftext|>", special_tokens=[end]
    )
    tokenizer.save(str(made.served / "tokenizer.json"))


def _exchange_ids(made: Made) -> None:
    values = read_json(made.served / "tokenizer.json")
    vocabulary = values["model"]["vocab"]
    vocabulary["e"], vocabulary["a"] = vocabulary["a"], vocabulary["e"]
    write_json(made.served / "tokenizer.json", values)


def _lose_merges(made: Made) -> None:
    values = read_json(made.served / "tokenizer.json")
    values["model"]["merges"] = values["model"]["merges"][:5]
    write_json(made.served / "tokenizer.json", values)


def _stop_elsewhere(made: Made) -> None:
    write_json(made.served / "generation_config.json", {"eos_token_id": 7})


def _go_on_after_an_answer(made: Made) -> None:
    end = Encoder(made.served).end_id
    write_json(made.served / "generation_config.json", {"eos_token_id": end})


def _never_stop(made: Made) -> None:
    write_json(made.served / "generation_config.json", {})


def _drift(made: Made) -> None:
    path = made.served / TEMPLATE_FILE
    path.write_text(path.read_text().replace("\\n", " ", 1))


def _lose_template(made: Made) -> None:
    (made.served / TEMPLATE_FILE).unlink()


def _learn_the_questions(made: Made) -> None:
    for path in made.preprocess.rglob("validation*.mask"):
        path.write_bytes(bytes([1]) * path.stat().st_size)


FAULTS: dict[str, tuple[bool, Callable[[Made], None], str]] = {
    "a beginning token twice": (False, _begin_twice, "tokenizer"),
    "an ending token after each prompt": (False, _end_each_text, "tokenizer"),
    "two ids exchanged": (False, _exchange_ids, "tokenizer"),
    "lost merges": (False, _lose_merges, "training data"),
    "another end": (False, _stop_elsewhere, "end of text"),
    "no end": (False, _never_stop, "end of text"),
    "no end of answers": (True, _go_on_after_an_answer, "end of text"),
    "another end of answers": (True, _stop_elsewhere, "end of text"),
    "a drifted template": (True, _drift, "conversations"),
    "a lost template": (True, _lose_template, "conversations"),
    "a wrong loss mask": (True, _learn_the_questions, "training data"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(fault: str, texts: Made, talks: Made, tmp_path: Path) -> None:
    chat, plant, name = FAULTS[fault]
    sound = talks if chat else texts
    run = shutil.copytree(sound.preprocess.parent.parent, tmp_path / "run")
    served = shutil.copytree(sound.served, tmp_path / "served")
    made = Made(output_folder(run, "preprocess"), served)
    assert made.failing() == set()
    plant(made)
    assert name in made.failing()
