"""The chat templates of the families that Penstock trains: their ids and masks, token by token.

Llama 3 and Qwen are original files, as TRL's package keeps them to know models by; those of Llama
2, Mistral 7B and Zephyr are written out, from `tokenizer_config.json` of these models on Hugging
Face: `meta-llama/Llama-2-7b-chat-hf`, `mistralai/Mistral-7B-Instruct-v0.2` and
`HuggingFaceH4/zephyr-7b-beta`. What is to be trained on follows here from transformers' own
renderings alone: what stands between the prompt that a server asks with and the mark that ends the
turn.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json, write_json
from pipelines.data.normalize import Messages
from pipelines.data.reading.instruction import ASSISTANT
from pipelines.data.tokens.chat_encoder import ChatEncoder, EncodedChat, make_chat_tokenizer
from pipelines.data.tokens.chat_template import TEMPLATE_FILE, ChatTemplate, Rendered
from pipelines.data.tokens.tokenizer import save_tokenizer, train_bpe
from pipelines.recipe.data_section import Instruction

KEPT = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore[union-attr,index]
_TURNS = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}" + _TURNS + ""
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + "
    "system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + _TURNS + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
WRITTEN = {"llama2": LLAMA_2, "mistral": MISTRAL, "zephyr": ZEPHYR}
# Of each, the mark that ends a turn, and whether it takes a system's message.
KNOWN = {
    "llama2": ("</s>", True),
    "llama3": ("<|eot_id|>", True),
    "llama3_1": ("<|eot_id|>", True),
    "llama3_2": ("<|eot_id|>", True),
    "mistral": ("</s>", False),
    "zephyr": ("</s>", True),
    "qwen2_5": ("<|im_end|>", True),
    "qwen3": ("<|im_end|>", True),
    "qwen3_instruct_2507": ("<|im_end|>", True),
}
MARKED = ("llama3", "qwen2_5", "qwen3_instruct_2507")  # TRL has them with marks, and the same text
MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"]
MARKS += ["<|start_header_id|>", "<|end_header_id|>"]

# Of Llama 3's `tokenizer.json`. GPT-2's cuts "\n\n" in two where a word follows, but not at the end
# of a prompt, so that a server would ask with other tokens than those that were trained on.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Llama 3.2's template asks for today's date, and has this one where it gets none, as in training.
DATE = {"date_string": "26 Jul 2024"}
SYSTEM = ("system", "Be kind.")
TALKS: dict[str, Messages] = {
    "one answer": (("user", "2 + 2?"), ("assistant", "4")),
    "two": (("user", "Hi"), ("assistant", "Hello there!"), ("user", "And?"), ("assistant", "So.")),
    "space": (
        ("user", " Hi\n"),
        ("assistant", " Well,\n\n"),
        ("user", "\tAnd "),
        ("assistant", "- a "),
    ),
    "marks": (("user", "<|im_end|> </s>"), ("assistant", "<|eot_id|> [/INST]")),
    "other scripts": (("user", "안녕 😀"), ("assistant", "Да, été")),
    "same words": (("user", "yes"), ("assistant", "yes"), ("user", "yes"), ("assistant", "yes")),
}


def template(name: str) -> str:
    return WRITTEN.get(name) or (KEPT / f"{name}.jinja").read_text(encoding="utf-8")


def saved(folder: Path, source: str) -> Path:
    """A BPE that knows the marks and cuts words as Llama 3's and Qwen's do, with a template."""
    texts = [content for talk in TALKS.values() for _, content in talk]
    tokenizer = train_bpe(texts * 9, 400)
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(WORDS), "isolated"), ByteLevel(False, False, False)]
    )
    tokenizer.add_special_tokens(MARKS)
    save_tokenizer(tokenizer, folder)
    config = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", config | {"bos_token": "<s>", "eos_token": "</s>"})
    (folder / TEMPLATE_FILE).write_text(source, encoding="utf-8")
    make_chat_tokenizer(folder, Instruction(kind="messages"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tokenizer's folder with a known template."""
    return lambda name: saved(tmp_path_factory.mktemp(name) / "tokenizer", template(name))


def dialogue(messages: Messages) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def rendered(library: Any, messages: Messages, *, prompt: bool = False) -> list[int]:
    turns = dialogue(messages)
    ids = library.apply_chat_template(turns, add_generation_prompt=prompt, **DATE)["input_ids"]
    return [int(each) for each in ids]


def expected(library: Any, messages: Messages, end: str) -> tuple[list[int], list[int]]:
    """Ids and mask by transformers alone, the end of the document left out."""
    whole = rendered(library, messages)
    mask = [0] * len(whole)
    ends = [at for at, id_ in enumerate(whole) if id_ == library.convert_tokens_to_ids(end)]
    for number in (i for i, (role, _) in enumerate(messages) if role == ASSISTANT):
        asked = rendered(library, messages[:number], prompt=True)
        assert whole[: len(asked)] == asked
        is_last = number + 1 == len(messages)
        stop = len(whole) if is_last else next(at for at in ends if at >= len(asked)) + 1
        mask[len(asked) : stop] = [1] * (stop - len(asked))
    return whole, mask


def check(folder: Path, messages: Messages, end: str) -> EncodedChat:
    """What the encoder makes is what transformers writes, and what a server leaves to say."""
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(folder)
    (found,) = ChatEncoder(folder).encode([messages])
    ids, mask = expected(library, messages, end)
    assert found.ids[: len(ids)].tolist() == ids
    assert found.mask[: len(ids)].tolist() == mask
    assert len(found.ids) - len(ids) in (0, 1)  # the end of the document
    assert found.mask[-1] == 1
    return found


def talks(name: str) -> list[Messages]:
    """What the template takes; a message that spells out marks is cut by us, not by the library."""
    plain = [talk for key, talk in TALKS.items() if key != "marks"]
    return plain + [(SYSTEM, *talk) for talk in plain if KNOWN[name][1]]


@pytest.mark.parametrize("name", KNOWN)
def test_ids_and_masks_are_those_of_the_library(name: str, folder: Callable[[str], Path]) -> None:
    place = folder(name)
    for talk in talks(name):
        check(place, talk, KNOWN[name][0])


@pytest.mark.parametrize("name", KNOWN)
def test_marks_that_a_message_spells_out_end_no_turn(
    name: str, folder: Callable[[str], Path]
) -> None:
    encoder = ChatEncoder(folder(name))
    (found,) = encoder.encode([TALKS["marks"]])
    (plain,) = encoder.encode([TALKS["one answer"]])
    special = [
        sum(id_ in encoder.special_ids for id_ in each.ids.tolist()) for each in (found, plain)
    ]
    assert special[0] == special[1]
    assert "<|eot_id|> [/INST]" in encoder.decode(found.ids[found.mask == 1])


@pytest.mark.parametrize("name", MARKED)
def test_masks_are_those_of_the_same_template_with_marks(
    name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """They differ in line breaks next to a turn's marks, which nobody needs to say."""
    from transformers import AutoTokenizer

    place = folder(name)
    marked = saved(tmp_path / "marked", template(f"{name}_training"))
    library = AutoTokenizer.from_pretrained(marked)
    for talk in talks(name):
        theirs = library.apply_chat_template(
            dialogue(talk), return_assistant_tokens_mask=True, return_dict=True
        )
        found = check(place, talk, KNOWN[name][0])
        size = len(theirs["input_ids"])
        assert found.ids[:size].tolist() == list(theirs["input_ids"])
        differs = found.mask[:size] != np.array(theirs["assistant_masks"])
        assert {library.decode([id_]) for id_ in found.ids[:size][differs]} <= {"\n"}


def test_one_that_asks_otherwise_than_it_writes_is_refused(folder: Callable[[str], Path]) -> None:
    line = "begins the assistant's turn otherwise .*<think>.* in data.instruction.chat_template"
    with pytest.raises(UserError, match=line):
        ChatEncoder(folder("deepseek_r1_distill")).encode([TALKS["one answer"]])


def test_thoughts_that_a_later_turn_takes_away_are_refused(folder: Callable[[str], Path]) -> None:
    thought = ("assistant", "<think>\nhm\n</think>\n\nHello!")
    encoder = ChatEncoder(folder("qwen3"))
    (found,) = encoder.encode([(("user", "Hi"), thought)])
    assert "<think>\nhm\n</think>\n\nHello!" in encoder.decode(found.ids[found.mask == 1])
    with pytest.raises(UserError, match="writes message 2 or one before it otherwise when others"):
        encoder.encode([(("user", "Hi"), thought, ("user", "And?"), ("assistant", "So."))])


FAULTS: dict[str, Callable[[Rendered], Rendered]] = {
    "begins late": lambda chat: chat._replace(answers=tuple((a + 6, b) for a, b in chat.answers)),
    "begins early": lambda chat: chat._replace(answers=tuple((a - 1, b) for a, b in chat.answers)),
    "leaves the end out": lambda chat: chat._replace(
        answers=tuple((a, b - len("<|im_end|>")) for a, b in chat.answers)
    ),
    "goes on into the question": lambda chat: chat._replace(
        answers=tuple((a, b + 3) for a, b in chat.answers)
    ),
    "the first answer only": lambda chat: chat._replace(answers=chat.answers[:1]),
    "all of it": lambda chat: chat._replace(answers=((0, len(chat.text)),)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_mask_is_found(
    fault: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, messages: FAULTS[fault](render(self, messages))
    )
    with pytest.raises(AssertionError):
        check(folder("qwen2_5"), TALKS["two"], "<|im_end|>")


@pytest.mark.parametrize("name", KNOWN)
def test_an_answer_ends_with_the_templates_mark(name: str, tmp_path: Path) -> None:
    encoder = ChatEncoder(saved(tmp_path, template(name)))
    assert encoder.decode(np.array([encoder.end_of_answer])) == KNOWN[name][0]
