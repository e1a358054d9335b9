"""What was learned by heart is found, and it is what greedy generation gives."""

import hashlib
import json
import random
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipelines.data.reading.instruction import ASSISTANT, USER
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.evaluation.memorisation import find_passages, measure_memorisation
from pipelines.evaluation.text_codec import TextCodec
from pipelines.models.pretrained import load_pretrained
from pipelines.recipe.data_section import Instruction
from pipelines.recipe.evaluation_section import Safety
from tests.unit.evaluation.fitting import fit

ASKED = Safety(documents=20, prefix_tokens=12, continuation_tokens=16)


def letters(seed: int) -> str:
    """Nothing that could be guessed."""
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=60))


def documents(texts: list[str]) -> pa.Table:
    ids = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    return pa.table({"doc_id": ids, "text": texts})


LEARNED = documents([letters(seed) for seed in range(8)])
OTHERS = documents([letters(seed) for seed in range(100, 112)])


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows what it learned by heart, and nothing else."""
    return fit(tmp_path_factory.mktemp("parrot"), LEARNED["text"].to_pylist(), 250)


def test_what_was_learned_by_heart_is_extracted_and_nothing_else(parrot: Path) -> None:
    training = pa.concat_tables([LEARNED, documents([letters(seed) for seed in range(20, 22)])])
    found, extracted = measure_memorisation(parrot, training, OTHERS, ASKED, 0.975)
    assert (found.prefix_tokens, found.continuation_tokens) == (12, 16)
    assert (found.training.passages, found.training.extracted) == (10, 8)
    assert found.training.share is not None
    assert found.training.share.value == 0.8
    assert found.training.share.lower == pytest.approx(0.4902, abs=1e-4)  # Wilson's, of 8 in 10
    assert sorted(extracted) == sorted(LEARNED["doc_id"].to_pylist())
    assert (found.held_out.passages, found.held_out.extracted) == (12, 0)


def test_extracted_is_what_greedy_generation_gives(parrot: Path) -> None:
    """Token by token, also of passages that a model gets half right."""
    training = documents([*LEARNED["text"].to_pylist()[:4], *OTHERS["text"].to_pylist()[:4]])
    model = load_pretrained(parrot).eval()
    right = []
    for passage in find_passages(TextCodec(parrot), training, 20, 12, 16):
        ids = passage.ids[:13].tolist()
        for _ in range(16):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        if ids == passage.ids.tolist():
            right.append(passage.doc_id)
    assert 0 < len(right) < 8
    assert measure_memorisation(parrot, training, OTHERS, ASKED, 0.975)[1] == right


def test_a_model_that_learned_other_texts_extracts_nothing(parrot: Path) -> None:
    found, extracted = measure_memorisation(parrot, OTHERS, LEARNED, ASKED, 0.975)
    assert (found.training.extracted, extracted) == (0, [])
    assert found.held_out.extracted == 8


def test_passages_are_the_first_documents_beginnings(parrot: Path) -> None:
    codec = TextCodec(parrot)
    found = find_passages(codec, LEARNED, 5, 12, 16)
    assert [passage.doc_id for passage in found] == LEARNED["doc_id"].to_pylist()[:5]
    for passage, text in zip(found, LEARNED["text"].to_pylist(), strict=False):
        assert passage.ids[0] == codec.end_id
        assert codec.decode(passage.ids[1:]) == text[:28]


def test_what_is_too_short_is_passed_over(parrot: Path) -> None:
    short = documents(["x" * 27, "y" * 28, "", "z" * 29])
    found = find_passages(TextCodec(parrot), short, 20, 12, 16)
    assert [bytes(passage.ids.tolist()[1:2]) for passage in found] == [b"y", b"z"]
    # A text longer than the prefix and shorter than the continuation.
    assert find_passages(TextCodec(parrot), documents(["x" * 40]), 20, 10, 50) == []
    nothing, extracted = measure_memorisation(parrot, short.slice(0, 1), OTHERS, ASKED, 0.975)
    assert (nothing.training.passages, nothing.training.share, extracted) == (0, None, [])


def test_a_short_context_shortens_both(parrot: Path) -> None:
    long = Safety(documents=5, prefix_tokens=100, continuation_tokens=500)
    found, _ = measure_memorisation(parrot, LEARNED, OTHERS, long, 0.975)
    assert (found.prefix_tokens, found.continuation_tokens) == (64, 64)  # of a context of 128


def test_only_what_the_assistant_says_is_expected(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    make_chat_tokenizer(tmp_path, Instruction(kind="messages"))
    talks = [[[USER, "u" * 40], [ASSISTANT, "a" * 20]], [[USER, "u" * 40], [ASSISTANT, "no"]]]
    table = pa.table(
        {
            "doc_id": ["0", "1"],
            "text": ["", ""],
            "messages": [json.dumps(talk) for talk in talks],
        }
    )
    codec = TextCodec(tmp_path)
    (passage,) = find_passages(codec, table, 5, 12, 16)
    assert passage.doc_id == "0"
    assert codec.decode(passage.ids[:13]).endswith("<|im_start|>assistant\n")
    assert codec.decode(passage.ids[13:]) == "a" * 16
