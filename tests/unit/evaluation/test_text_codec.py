"""Unknown tokens are charged for the bytes they stand for, and nothing is ever paid back."""

import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.chat_template import template_characters
from pipelines.data.tokens.tokenizer import character_tokenizer, save_tokenizer
from pipelines.evaluation.text_codec import TextCodec
from pipelines.recipe.data_section import Instruction


def codec(tokenizer: Tokenizer, folder: Path) -> TextCodec:
    tokenizer.add_special_tokens(["<|endoftext|>"])
    save_tokenizer(tokenizer, folder)
    return TextCodec(folder)


def test_spaces_that_decoding_adds_pay_for_nothing(tmp_path: Path) -> None:
    words = {"?": 0, "a": 1, "+": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (document,) = codec(tokenizer, tmp_path).encode_texts(["a+a+a+a+é"])
    assert document.ids.tolist() == [1, 2, 1, 2, 1, 2, 1, 2, 0]
    assert document.spelling_nats == 0.0


def test_the_unknown_of_a_unigram_model_is_charged(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("a", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    known, unknown = codec(tokenizer, tmp_path).encode_texts(["a a", "a a☃☃"])
    assert known.spelling_nats == 0.0
    assert unknown.spelling_nats == pytest.approx(6 * math.log(256))


def test_only_an_answer_pays_for_what_it_loses(tmp_path: Path) -> None:
    known = template_characters(Instruction(kind="messages"))
    save_tokenizer(character_tokenizer(known), tmp_path)
    make_chat_tokenizer(tmp_path, Instruction(kind="messages"))
    (asked, said) = TextCodec(tmp_path).encode_conversations(
        [(("user", "\u2603"), ("assistant", "a")), (("user", "a"), ("assistant", "\u2603s"))]
    )
    assert asked.spelling_nats == 0.0
    assert said.spelling_nats == pytest.approx(3 * math.log(256))
