"""The pieces of an answer against its whole text, with every kind of tokenizer."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from pipelines.data.tokens.tokenizer import END_OF_TEXT, byte_tokenizer, train_bpe
from pipelines.export.triton_rows import Job, Pieces, decoded

TEXTS = ["größer 漢字かな 👩‍👩‍👧 é\n\n  x", "a 😀 b", "ab  \n", "\ufffd and \ufffd"]


def sentencepiece() -> Tokenizer:
    """As Llama 2's and Mistral's: a space is a letter, and what has no token is its bytes."""
    words = ["▁", "a", "b", "x", "▁a", "▁b", "▁and", "▁x", "é", "字"]
    names = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["</s>"])
    return made


@pytest.fixture(params=["bytes", "bpe", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "sentencepiece":
        return PreTrainedTokenizerFast(tokenizer_object=sentencepiece(), eos_token="</s>")
    made = byte_tokenizer() if request.param == "bytes" else train_bpe(TEXTS * 9, 400)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END_OF_TEXT)


def cut(tokenizer: Any, ids: list[int]) -> list[str]:
    job, pieces, made = Job([], len(ids)), Pieces(tokenizer), []
    for number, token in enumerate(ids, 1):
        job.made.append(token)
        job.ended = number == len(ids)
        made.append(pieces.next(job))
    return made


def test_the_pieces_are_the_whole_text(tokenizer: Any) -> None:
    """Also of tokens that are no text: half characters, and ends of text in between."""
    chance = random.Random(1)
    for _ in range(300):
        ids = [chance.randrange(len(tokenizer)) for _ in range(chance.randint(1, 40))]
        for text in chance.sample(TEXTS, 2):
            ids[chance.randrange(len(ids)) :] += tokenizer(text).input_ids
        assert "".join(cut(tokenizer, ids)) == decoded(tokenizer, ids)


def test_no_piece_is_half_a_character(tokenizer: Any) -> None:
    for text in TEXTS[:3]:
        ids = tokenizer(text).input_ids
        said = cut(tokenizer, ids)
        assert "".join(said) == decoded(tokenizer, ids) == text
        assert "\ufffd" not in "".join(said)
        assert sum(map(bool, said)) > 1


def test_a_long_answer_is_not_decoded_again_and_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer(TEXTS[1] * 100).input_ids
    lengths = []
    decode = tokenizer.decode

    def counted(tokens: list[int], **options: Any) -> str:
        lengths.append(len(tokens))
        return str(decode(tokens, **options))

    monkeypatch.setattr(tokenizer, "decode", counted)
    cut(tokenizer, ids)
    assert max(lengths) < 20
