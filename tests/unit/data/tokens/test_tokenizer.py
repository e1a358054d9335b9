import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipelines.core.errors import UserError
from pipelines.data.tokens.tokenizer import (
    END_OF_TEXT,
    Encoder,
    byte_tokenizer,
    character_tokenizer,
    copy_pretrained,
    save_tokenizer,
    tokenizer_fingerprint,
    train_bpe,
)
from pipelines.recipe.data_section import Tokenizer as TokenizerRecipe

CORPUS = [
    "  leading spaces, 'quotes' isn't it . \n\n\ttabs\n        indented = 1\n",
    "日本語 のテキスト。 Ünïcödé Ελληνικά العربية \u00a0 \x1c \x85",
    "emoji 😀 👩‍👩‍👧 e\u0301 <|endoftext|> inside",
]
MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "char": lambda: character_tokenizer("".join(CORPUS)),
    "byte": byte_tokenizer,
    "bpe": lambda: train_bpe(CORPUS * 4, 400),
}


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_tokenizer(MAKERS[request.param](), folder)
    return folder


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_transformers_loads_the_folder_and_agrees(folder: Path) -> None:
    auto, encoder = auto_tokenizer(folder), Encoder(folder)
    assert auto.eos_token == auto.bos_token == auto.pad_token == END_OF_TEXT
    assert auto.eos_token_id == encoder.end_id
    assert len(auto) == encoder.vocab_size
    for text in [*CORPUS[:2], " ", "\n", " a", "a "]:
        ids = auto(text)["input_ids"]
        assert auto.decode(ids) == text
        assert [*ids, encoder.end_id] == encoder.encode([text])[0].tolist()


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_any_text_comes_back_exactly(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp(name)
    save_tokenizer(MAKERS[name](), folder)
    encoder, auto = Encoder(folder), auto_tokenizer(folder)

    @settings(max_examples=200)
    @given(st.text())
    @example(" leading")
    @example("\r\n\x00\x1c")
    @example(END_OF_TEXT)
    def round_trip(text: str) -> None:
        ids = encoder.encode([text])[0][:-1]
        assert encoder.decode(ids) == text
        assert auto.decode(ids.tolist()) == text

    round_trip()


def test_text_of_known_characters_comes_back_exactly(tmp_path: Path) -> None:
    save_tokenizer(MAKERS["char"](), tmp_path)
    encoder, auto = Encoder(tmp_path), auto_tokenizer(tmp_path)

    @settings(max_examples=200)
    @given(st.text(alphabet=sorted(set("".join(CORPUS)))))
    def round_trip(text: str) -> None:
        ids = encoder.encode([text])[0][:-1]
        assert len(ids) == len(text)
        assert encoder.decode(ids) == auto.decode(ids.tolist()) == text

    round_trip()


def test_text_cannot_forge_the_end_of_a_document(folder: Path) -> None:
    encoder = Encoder(folder)
    ids = encoder.encode([f"emoji {END_OF_TEXT} inside"])[0]
    assert ids.tolist().count(encoder.end_id) == 1
    assert encoder.decode(ids[:-1]) == f"emoji {END_OF_TEXT} inside"


def test_a_byte_is_its_own_id() -> None:
    every = bytes(range(128)).decode()
    assert byte_tokenizer().encode(every).ids == list(range(128))
    assert byte_tokenizer().encode("é").ids == list("é".encode())
    assert byte_tokenizer().get_vocab_size() == 257


def test_an_unknown_character_is_marked(tmp_path: Path) -> None:
    save_tokenizer(character_tokenizer("abc"), tmp_path)
    encoder = Encoder(tmp_path)
    assert encoder.decode(encoder.encode(["a😀"])[0][:-1]) == "a<|unk|>"


def test_bpe_training_is_deterministic_and_keeps_its_size() -> None:
    first, second = (train_bpe(CORPUS * 9, 300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 300
    assert first.token_to_id(END_OF_TEXT) == 0


def test_ids_have_the_shards_type(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    assert Encoder(tmp_path).encode(["a"])[0].dtype == np.uint16


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Another project's tokenizer: its own end token, and a post-processor's leading token."""
    folder = tmp_path / "theirs"
    tokenizer = train_bpe(CORPUS, 280)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(4)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_pretrained_tokenizer_keeps_its_own_end(pretrained: Path, tmp_path: Path) -> None:
    copy_pretrained(pretrained, tmp_path / "copy")
    encoder = Encoder(tmp_path / "copy")
    ids = encoder.encode(["a text longer than four tokens"])[0]
    assert encoder.decode(ids) == "a text longer than four tokens</s>"
    assert (tmp_path / "copy/tokenizer.json").read_bytes() == (
        pretrained / "tokenizer.json"
    ).read_bytes()


def test_a_bare_tokenizer_file_gains_an_end(pretrained: Path, tmp_path: Path) -> None:
    alone = shutil.move(pretrained / "tokenizer.json", tmp_path / "alone.json")
    copy_pretrained(alone, tmp_path / "copy")
    assert auto_tokenizer(tmp_path / "copy").eos_token == END_OF_TEXT
    assert Encoder(tmp_path / "copy").end_id == 0


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_no_tokenizer_there_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as raised:
        copy_pretrained(path, tmp_path / "copy")
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_end_token_that_is_not_there_is_one_line(pretrained: Path, tmp_path: Path) -> None:
    (pretrained / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    copy_pretrained(pretrained, tmp_path / "copy")
    with pytest.raises(UserError, match=r"eos_token '<end>' is not in tokenizer\.json"):
        Encoder(tmp_path / "copy")


def test_the_fingerprint_follows_a_pretrained_tokenizers_content(pretrained: Path) -> None:
    recipe = TokenizerRecipe(kind="pretrained", path=str(pretrained))
    before = tokenizer_fingerprint(recipe)
    assert [entry["path"] for entry in before] == ["tokenizer.json", "tokenizer_config.json"]
    (pretrained / "tokenizer_config.json").write_text("{}")
    assert tokenizer_fingerprint(recipe) != before
    assert tokenizer_fingerprint(TokenizerRecipe(kind="bpe")) == []
