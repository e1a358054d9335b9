import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as cutters

from pipelines.data.tokens import fast_encoder
from pipelines.data.tokens.fast_encoder import (
    HARD_TEXTS,
    PATTERNS,
    TiktokenBpe,
    UnsuitedError,
    byte_alphabet,
)
from pipelines.data.tokens.tokenizer import (
    END_OF_TEXT,
    TIKTOKEN,
    Encoder,
    byte_tokenizer,
    character_tokenizer,
    save_tokenizer,
    train_bpe,
)

CORPUS = [
    *HARD_TEXTS,
    "def isn't_it(self):\n        return self.x  # we'll see, don't we?\n\n\n" * 9,
    "The zebra's 12345 apples, HTMLParser and camelCaseWords; naïve café, Zürich. " * 9,
    "日本語のテキスト。日本 日本語 한국어를 한국에서 한글 한글 Ελληνικά και العربية русский язык "
    * 9,
    "aaaa aaaaaaa aba 000 2024 2025 ====== ------ <|im_start|> <tool_call> 😀😀👩‍👩‍👧 ",
]


def split_trained(pattern: str, size: int = 900) -> Tokenizer:
    """A BPE trained with a pattern of its own, as newer models have; its end comes last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cutters.Sequence(
        [
            cutters.Split(Regex(pattern), "isolated"),
            cutters.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=byte_alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    """A tokenizer whose `tokenizer.json` was edited."""
    definition = json.loads(tokenizer.to_str())
    change(definition)
    return Tokenizer.from_str(json.dumps(definition))


def as_converted_from_tiktoken(definition: dict[str, Any]) -> None:
    """As Llama 3: every split of a token is a merge, and some tokens come of no merge."""
    model = definition["model"]
    for extra in ("Ġzebrafish", "xqzzq", "ĠHTMLParsers", "ãģĹãģ¾ãģĹ"):
        model["vocab"][extra] = len(model["vocab"])
    definition["added_tokens"][0]["id"] = len(model["vocab"])
    pieces = model["vocab"].items()
    model["merges"] = [
        [token[:cut], token[cut:]]
        for token, _ in sorted(pieces, key=lambda item: item[1])
        for cut in range(1, len(token))
        if token[:cut] in model["vocab"] and token[cut:] in model["vocab"]
    ]
    model["ignore_merges"] = True


def qwen_like() -> Tokenizer:
    tokenizer = split_trained(PATTERNS["Qwen 2"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def with_a_token_that_no_text_becomes() -> Tokenizer:
    """`abc` is listed as a + bc, but ab is merged first; tiktoken would find it all the same."""
    names = [*byte_alphabet(), "ab", "bc", "abc", "abcd"]
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("abc", "d")]
    vocabulary = {name: id_ for id_, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = cutters.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "ours": lambda: train_bpe(CORPUS, 900),
    "ours, small": lambda: train_bpe(CORPUS, 260),
    "GPT-2": lambda: split_trained(PATTERNS["GPT-2"]),
    "GPT-4": lambda: split_trained(PATTERNS["GPT-4, Llama 3"]),
    "GPT-4o": lambda: split_trained(PATTERNS["GPT-4o"]),
    "Llama 3": lambda: changed(
        split_trained(PATTERNS["GPT-4, Llama 3"]), as_converted_from_tiktoken
    ),
    "Qwen 2": qwen_like,
    "unreachable": with_a_token_that_no_text_becomes,
}


@pytest.fixture(scope="module", params=MAKERS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Encoder, Tokenizer]:
    """Our encoder of a tokenizer and the tokenizer itself, to which special tokens are text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = MAKERS[request.param]()
    save_tokenizer(tokenizer, folder)
    tokenizer.encode_special_tokens = True
    return Encoder(folder), tokenizer


def check(pair: tuple[Encoder, Tokenizer], text: str) -> None:
    encoder, tokenizer = pair
    theirs = tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.encode([text])[0].tolist() == [*theirs, encoder.end_id]


HARD_CHARACTERS = "".join(HARD_TEXTS[:4]) + "abcd'strelvdm \n\r\t09" * 3
texts = st.one_of(
    st.text(),
    st.text(alphabet=HARD_CHARACTERS),
    st.lists(
        st.one_of(
            st.sampled_from(
                [*CORPUS, END_OF_TEXT, "<tool_call>", " zebrafish", "xqzzq", "abc", "abcd", "'S"]
            ),
            st.tuples(st.sampled_from(" \n\ta1=é한\r'"), st.integers(1, 1200)).map(
                lambda run: run[0] * run[1]
            ),
            st.text(alphabet=HARD_CHARACTERS, max_size=20),
        ),
        max_size=9,
    ).map("".join),
)


def test_any_text_has_the_ids_of_tokenizers(pair: tuple[Encoder, Tokenizer]) -> None:
    assert pair[0].engine == TIKTOKEN
    fast = TiktokenBpe(json.loads(pair[1].to_str()))
    assert all(fast.encode(text) is not None for text in CORPUS if text.isascii())

    @settings(max_examples=300)
    @given(texts)
    @example("zabcd abcd abc")
    @example(" zebrafish zebrafish xqzzq axqzzq HTMLParsers")
    def same(text: str) -> None:
        check(pair, text)

    same()


@st.composite
def made_up(draw: st.DrawFn) -> Tokenizer:
    """Any vocabulary over three letters, with any of the merges that could make its tokens."""
    tokens = draw(st.lists(st.text("abc", min_size=2, max_size=5), min_size=1, unique=True))
    vocabulary = {name: id_ for id_, name in enumerate([*byte_alphabet(), *tokens])}
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in draw(st.permutations(range(1, len(token))))
        if token[:cut] in vocabulary and token[cut:] in vocabulary and draw(st.integers(0, 3))
    ]
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=draw(st.booleans()))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cutters.ByteLevel(add_prefix_space=False)
    return tokenizer


@settings(max_examples=400)
@given(made_up(), st.lists(st.text("abc", max_size=30), max_size=5))
def test_whatever_the_merges_what_tiktoken_encodes_is_right(
    tokenizer: Tokenizer, words: list[str]
) -> None:
    try:
        fast = TiktokenBpe(json.loads(tokenizer.to_str()))
    except UnsuitedError as reason:
        assert "made after it" in str(reason)
        return
    for word in words:
        ids = fast.encode(word)
        assert ids is None or ids.tolist() == tokenizer.encode(word).ids


@pytest.mark.parametrize("name", PATTERNS)
def test_all_of_unicode_is_cut_alike(name: str) -> None:
    """Every assigned character and some others, after and before those that patterns name.

    Of ideographs and Hangul syllables, blocks of some ten thousand letters alike, one in 16.
    """
    tokenizer = split_trained(PATTERNS[name], 400)
    fast = TiktokenBpe(json.loads(tokenizer.to_str()))
    points = [*range(0x20000), *range(0xE0000, 0xE0200), *range(0x33500, 0x110000, 97)]
    points = [point for point in points if not 0xD800 <= point < 0xE000]
    alike = [*range(0x3400, 0xA000), *range(0xAC00, 0xD7A4), *range(0x20000, 0x33500)]
    characters = [chr(point) for point in sorted({*points} - {*alike} | {*alike[::16]})]
    for start in range(0, len(characters), 5000):
        text = "".join(f"'{one}a {one} 1{one}\n" for one in characters[start : start + 5000])
        ids = fast.encode(text)
        assert ids is not None
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def raw_tiktoken(tokenizer: Tokenizer) -> tiktoken.Encoding:
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    ranks = {
        bytes(byte_of[character] for character in name): id_
        for name, id_ in tokenizer.get_vocab(with_added_tokens=False).items()
    }
    return tiktoken.Encoding(
        "", pat_str=PATTERNS["GPT-2"], mergeable_ranks=ranks, special_tokens={}
    )


@pytest.mark.parametrize("text", ["abc", "zabcd"])
def test_where_tiktoken_differs_tokenizers_encodes(text: str) -> None:
    tokenizer = with_a_token_that_no_text_becomes()
    theirs = tokenizer.encode(text).ids
    assert raw_tiktoken(tokenizer).encode_ordinary(text) != theirs
    fast = TiktokenBpe(json.loads(tokenizer.to_str()))
    assert fast.encode(text) is None
    assert fast.encode("ab bc") is not None


@pytest.mark.parametrize(
    "text",
    ["a" * 1_000_000, " " * 1_000_000, " " * 300_000 + "x", "\n" * 300_000 + "x", "=-" * 300_000],
    ids=["letters", "spaces", "spaces before a word", "newlines", "signs"],
)
def test_a_text_without_a_cut_takes_no_time(text: str, tmp_path: Path) -> None:
    tokenizer = train_bpe(CORPUS, 400)
    save_tokenizer(tokenizer, tmp_path)
    encoder = Encoder(tmp_path)
    assert encoder.engine == TIKTOKEN
    began = time.process_time()
    ids = encoder.encode([text])[0]
    assert time.process_time() - began < 20  # a quadratic algorithm takes hours
    assert ids[:-1].tolist() == tokenizer.encode(text).ids


def test_documents_of_both_engines_keep_their_order(tmp_path: Path) -> None:
    tokenizer = qwen_like()
    save_tokenizer(tokenizer, tmp_path)
    given = ["plain", "e\u0301", "<tool_call>", "", "more"]
    found = Encoder(tmp_path).encode(given)
    assert [ids[:-1].tolist() for ids in found] == [tokenizer.encode(text).ids for text in given]
    assert Encoder(tmp_path).encode([]) == []


def trained_with(cutter: cutters.PreTokenizer) -> Tokenizer:
    tokenizer = train_bpe(CORPUS, 300)
    tokenizer.pre_tokenizer = cutter
    return tokenizer


def edited(**settings: object) -> Tokenizer:
    def change(definition: dict[str, Any]) -> None:
        definition["model"].update(settings)

    return changed(train_bpe(CORPUS, 300), change)


def normalised() -> Tokenizer:
    tokenizer = train_bpe(CORPUS, 300)
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def shuffled(definition: dict[str, Any]) -> None:
    definition["model"]["merges"].reverse()


def without_a_byte(definition: dict[str, Any]) -> None:
    del definition["model"]["vocab"]["Ā"]


def makes_what_is_older(definition: dict[str, Any]) -> None:
    definition["model"]["vocab"] |= {"zq": 900, "qz": 1000, "zqz": 950}
    definition["model"]["merges"] += [["z", "q"], ["z", "qz"], ["q", "z"]]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (byte_tokenizer, "cut in a way"),
        (lambda: character_tokenizer("abc"), "cut in a way"),
        (lambda: trained_with(cutters.ByteLevel(add_prefix_space=True)), "cut in a way"),
        (lambda: split_trained(r"\w+|\W+"), "cut in a way"),
        (lambda: trained_with(cutters.Metaspace()), "cut in a way"),
        (lambda: edited(dropout=0.1), "has dropout"),
        (lambda: edited(byte_fallback=True), "has byte_fallback"),
        (lambda: changed(train_bpe(CORPUS, 300), shuffled), "not in the order of ids"),
        (lambda: changed(train_bpe(CORPUS, 256), without_a_byte), "not every byte"),
        (lambda: changed(train_bpe(CORPUS, 300), makes_what_is_older), "made after it"),
        (normalised, "normalised"),
    ],
)
def test_what_tiktoken_cannot_do_is_named(
    make: Callable[[], Tokenizer], reason: str, tmp_path: Path
) -> None:
    tokenizer = make()
    with pytest.raises(UnsuitedError, match=reason):
        TiktokenBpe(json.loads(tokenizer.to_str()))
    save_tokenizer(tokenizer, tmp_path)
    encoder = Encoder(tmp_path)
    assert encoder.engine.startswith("tokenizers: ")
    assert reason in encoder.engine
    assert encoder.encode(["b"])[0].tolist()[:-1] == tokenizer.encode("b").ids


def test_a_difference_at_load_time_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if an engine's regular expressions had changed their meaning."""
    tokenizer = train_bpe(CORPUS, 400)
    save_tokenizer(tokenizer, tmp_path)
    tokenizer.encode_special_tokens = True
    monkeypatch.setattr(fast_encoder, "_GPT2", r"\S+|\s+")
    encoder = Encoder(tmp_path)
    assert encoder.engine == "tokenizers: tiktoken's ids differ"
    assert len(caplog.records) == 1
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert encoder.encode([text])[0].tolist() == [*ids, encoder.end_id]
