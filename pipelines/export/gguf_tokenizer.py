"""A tokenizer in GGUF's metadata, if llama.cpp makes the same ids of a text.

llama.cpp cuts a text by a pattern that the file only names, and merges bytes as GPT-2 does. It
normalises nothing: a text that is not in NFC gets other ids where the tokenizer asks for NFC.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import UserError
from pipelines.data.tokens.chat_template import own_template, template_variables
from pipelines.data.tokens.fast_encoder import (
    PATTERNS,
    UnsuitedError,
    byte_vocabulary,
    normalizes,
    split_pattern,
)
from pipelines.data.tokens.tokenizer import TOKENIZER_FILE, Encoder, load_pretrained

if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.cpp's name of a pattern, with which a word that is a token is merged (False) or not (True).
_NAMES = {
    ("GPT-2", False): "gpt-2",
    ("GPT-4, Llama 3", False): "dbrx",
    ("GPT-4, Llama 3", True): "llama-bpe",
    ("Qwen 2", False): "qwen2",
}
# llama.cpp wants a list of merges, and GGUF has no empty one. No text has a piece of this name.
_NO_MERGES = ["<none> <none>"]


def add_tokenizer(writer: "GGUFWriter", source: Path, rows: int) -> None:
    """Write the tokenizer and the chat template of a registered folder into the metadata.

    Args:
        writer: The file, whose metadata is not written yet.
        source: A registered folder.
        rows: The rows of the embedding; those that no token has get placeholders.

    Raises:
        UserError: llama.cpp would make other ids, or a token has no row.
    """
    from gguf import TokenType

    tokenizer = load_pretrained(source)
    definition = json.loads(tokenizer.to_str())
    file = source / TOKENIZER_FILE
    try:
        name = _pattern_name(definition)
    except UnsuitedError as reason:
        raise UserError(
            f"{file}: llama.cpp has no such tokenizer: {reason}; use --format huggingface, with "
            "which vLLM and transformers serve it"
        ) from reason
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if max(vocabulary.values()) >= rows:
        raise UserError(
            f"{file}: its largest id is {max(vocabulary.values())}, but the model has {rows} rows; "
            "give the tokenizer that the model was trained with"
        )
    tokens, types = [f"[PAD{id_}]" for id_ in range(rows)], [TokenType.UNUSED] * rows
    for token, id_ in vocabulary.items():
        tokens[id_], types[id_] = token, TokenType.NORMAL
    for id_, added in tokenizer.get_added_tokens_decoder().items():
        types[id_] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    merges = [" ".join(pair) for pair in definition["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or _NO_MERGES)
    writer.add_eos_token_id(Encoder(source).end_id)
    first = _first_id(tokenizer, file)
    named = tokenizer.token_to_id(template_variables(source).get("bos_token", ""))
    if (begin := named if first is None else first) is not None:
        writer.add_bos_token_id(begin)
    writer.add_add_bos_token(first is not None)
    writer.add_add_eos_token(False)
    if (template := own_template(source)) is not None:
        writer.add_chat_template(template)


def _pattern_name(definition: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pattern by which the tokenizer cuts a text."""
    model = definition["model"]
    byte_vocabulary(model)
    normalizes(definition)
    for token in definition["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise UnsuitedError(f"{token['content']} takes spaces beside it, or wants some")
    match definition["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False} if not model["merges"]:
            return _NAMES["GPT-2", False]  # each byte has its id, however the text is cut
    pattern = split_pattern(definition)
    (known,) = (name for name, each in PATTERNS.items() if each == pattern)
    whole_words = bool(model["ignore_merges"])
    if (known, whole_words) not in _NAMES:
        raise UnsuitedError(f"{known}'s pattern with ignore_merges {str(whole_words).lower()}")
    return _NAMES[known, whole_words]


def _first_id(tokenizer: Any, file: Path) -> int | None:
    """Return the id that the tokenizer writes before each text; None if it writes none."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.encode("a").ids
    if ids == plain:
        return None
    if ids[1:] == plain:
        return int(ids[0])
    raise UserError(
        f"{file}: it makes {ids} of the text 'a', but llama.cpp adds only one token, at the "
        "beginning; use --format huggingface"
    )
