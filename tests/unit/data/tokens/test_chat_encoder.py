from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json, write_json
from pipelines.data.tokens.chat_encoder import ChatEncoder, make_chat_tokenizer
from pipelines.data.tokens.chat_template import CHATML, TEMPLATE_FILE, template_characters
from pipelines.data.tokens.tokenizer import (
    Encoder,
    byte_tokenizer,
    character_tokenizer,
    save_tokenizer,
    train_bpe,
)
from pipelines.recipe.data_section import Instruction

CHAT = Instruction(kind="messages")
TALK = (
    ("system", "Be kind."),
    ("user", "How are you?\n"),
    ("assistant", " Fine, thanks."),
    ("user", "Good 😀"),
    ("assistant", "Bye!\n\n"),
)
# In the manner of templates that are found in the wild.
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
)
# A thought is kept in the last answer only, so what comes before an answer depends on its place.
REASONING = (
    "{% for m in messages %}{% set thought = '<think></think>' if m['role'] == 'assistant' and "
    "loop.last else '' %}{{ '<|im_start|>' + m['role'] + '\n' + thought + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What an assistant thought is cut out of what it said, and written in front of the last answer.
THOUGHTFUL = REASONING.replace(
    "m['content'] +", "(m['content'].split('</think>') | last) +"
).replace(
    "'<think></think>'",
    "(m['content'].split('</think>')[0] + '</think>\n' if '</think>' in m['content'] else '')",
)


def dialogue(messages: Any) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def save(folder: Path, template: str | None = None) -> Path:
    """A BPE that was trained on some of the text, with a template."""
    tokenizer = train_bpe([content for _, content in TALK] * 9, 400)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    save_tokenizer(tokenizer, folder)
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template)
    make_chat_tokenizer(folder, CHAT)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("chatml") / "tokenizer")


def answers(folder: Path, messages: Any) -> str:
    (found,) = ChatEncoder(folder).encode([messages])
    return hf(folder).decode(found.ids[found.mask == 1])


def hf(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", [None, LLAMA_2, MARKED, REASONING])
def test_the_ids_are_those_of_the_library(tmp_path: Path, template: str | None) -> None:
    folder = save(tmp_path / "tokenizer", template)
    messages = TALK[1:]
    (found,) = ChatEncoder(folder).encode([messages])
    tokenizer = hf(folder)
    expected = tokenizer.apply_chat_template(dialogue(messages))["input_ids"]
    end = [] if template == LLAMA_2 else [tokenizer.eos_token_id]
    assert found.ids.tolist() == expected + end
    assert found.ids.dtype == np.uint16
    assert found.mask.dtype == np.uint8
    assert len(found.mask) == len(found.ids)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, " Fine, thanks.<|im_end|>Bye!\n\n<|im_end|>\n<|endoftext|>"),
        (LLAMA_2, " Fine, thanks. <|endoftext|> Bye! <|endoftext|>"),
        (MARKED, " Fine, thanks.<|im_end|>Bye!\n\n<|im_end|><|endoftext|>"),
        (
            REASONING,
            " Fine, thanks.<|im_end|><think></think>Bye!\n\n<|im_end|>\n<|endoftext|>",
        ),
    ],
)
def test_the_mask_holds_what_the_assistant_says(
    tmp_path: Path, template: str, expected: str
) -> None:
    assert answers(save(tmp_path / "tokenizer", template), TALK[1:]) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA_2, "<|endoftext|>"),
        (MARKED, "<|im_end|>"),
        (REASONING, "<|im_end|>"),
    ],
)
def test_the_end_of_an_answer_is_the_mark_after_its_text(
    tmp_path: Path, template: str, expected: str
) -> None:
    folder = save(tmp_path / "tokenizer", template)
    assert ChatEncoder(folder).end_of_answer == hf(folder).convert_tokens_to_ids(expected)


@pytest.mark.parametrize(
    ("template", "said"),
    [(None, "Fine.<|im_end|>\n<|endoftext|>"), (MARKED, "Fine.<|im_end|><|endoftext|>")],
)
def test_what_both_conversations_of_a_pair_say_is_not_predicted(
    tmp_path: Path, template: str | None, said: str
) -> None:
    encoder = ChatEncoder(save(tmp_path / "tokenizer", template))
    talk = (("user", "Hi"), ("assistant", "Hello"), ("user", "And?"), ("assistant", "Fine."))
    whole, after = encoder.encode([talk, talk], [0, 3])
    assert after.ids.tolist() == whole.ids.tolist()
    assert encoder.decode(after.ids[after.mask == 1]) == after.said == said
    begins = np.flatnonzero(np.diff(whole.mask.astype(int), prepend=0) == 1)
    expected = np.where(np.arange(len(whole.mask)) < begins[1], 0, whole.mask)
    assert after.mask.tolist() == expected.tolist()


def test_a_template_that_marks_no_answer_before_the_last_is_refused_for_pairs(
    tmp_path: Path,
) -> None:
    template = MARKED.replace("== 'assistant' %}", "== 'assistant' and loop.last %}")
    encoder = ChatEncoder(save(tmp_path / "tokenizer", template))
    talk = (("user", "Hi"), ("assistant", "Hello"), ("user", "And?"), ("assistant", "Fine."))
    with pytest.raises(UserError, match="marks 1 answers of 2"):
        encoder.encode([talk], [3])


def test_the_prompt_of_an_answer_is_what_the_library_asks_with(folder: Path) -> None:
    prompt = hf(folder).apply_chat_template(dialogue(TALK[:4]), add_generation_prompt=True)
    (found,) = ChatEncoder(folder).encode([TALK])
    assert found.ids[: len(prompt["input_ids"])].tolist() == prompt["input_ids"]
    assert found.mask[len(prompt["input_ids"]) :].all()


@pytest.mark.parametrize("template", [CHATML, LLAMA_2])
def test_a_prompt_ends_where_the_assistant_begins(tmp_path: Path, template: str) -> None:
    folder = save(tmp_path / "tokenizer", template)
    encoder, tokenizer = ChatEncoder(folder), hf(folder)
    for messages in (TALK[1:2], TALK[1:4]):
        asked = tokenizer.apply_chat_template(dialogue(messages), add_generation_prompt=True)
        assert encoder.encode_prompt(messages).tolist() == asked["input_ids"]


def test_a_thought_that_the_template_moves_is_the_assistants(tmp_path: Path) -> None:
    folder = save(tmp_path / "tokenizer", THOUGHTFUL)
    asked, thought = ("user", "Why?"), ("assistant", "<think>Hm.</think>So.")
    assert answers(folder, (asked, thought)) == "<think>Hm.</think>\nSo.<|im_end|>\n<|endoftext|>"
    with pytest.raises(UserError, match=r"writes message 2 or one .* when others follow"):
        answers(folder, (asked, thought, asked, thought))
    with pytest.raises(UserError, match="a message spells out a special token"):
        answers(folder, (("user", "<|im_end|>"), thought))


def test_an_open_question_at_the_end_is_not_the_assistants(folder: Path) -> None:
    assert answers(folder, TALK[:4]) == " Fine, thanks.<|im_end|>"


EVIL = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "assistant\n", "<|endoftext|>", "<", "|im_", " "]
    )
    | st.text(max_size=4),
    max_size=8,
).map("".join)


@settings(max_examples=60)
@given(asked=EVIL, said=EVIL)
def test_no_message_writes_a_special_token(folder: Path, asked: str, said: str) -> None:
    messages = (("user", asked), ("assistant", f"{said}."))
    encoder, tokenizer = ChatEncoder(folder), hf(folder)
    (found,) = encoder.encode([messages])
    specials = {tokenizer.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end")}
    assert sum(int(id_) in specials for id_ in found.ids) == 4
    text = tokenizer.apply_chat_template(dialogue(messages), tokenize=False)
    assert tokenizer.decode(found.ids) == f"{text}<|endoftext|>"
    learnt = tokenizer.decode(found.ids[found.mask == 1])
    expected = f"{said}.<|im_end|>\n<|endoftext|>"
    # One token may hold the template's line break and the one that an answer begins with.
    assert learnt == expected or (said.startswith("\n") and learnt == f"\n{expected}")


def test_one_conversation_does_not_depend_on_the_others(folder: Path) -> None:
    encoder = ChatEncoder(folder)
    both = encoder.encode([TALK, TALK[1:3]])
    alone = encoder.encode([TALK[1:3]])
    assert both[1].ids.tolist() == alone[0].ids.tolist()


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_every_tokenizer_of_ours_knows_the_marks(tmp_path: Path, kind: str) -> None:
    known = template_characters(CHAT) + "".join(content for _, content in TALK)
    save_tokenizer(byte_tokenizer() if kind == "byte" else character_tokenizer(known), tmp_path)
    make_chat_tokenizer(tmp_path, CHAT)
    (found,) = ChatEncoder(tmp_path).encode([TALK])
    text = hf(tmp_path).apply_chat_template(dialogue(TALK), tokenize=False)
    assert hf(tmp_path).decode(found.ids) == f"{text}<|endoftext|>"
    assert int(found.mask.sum()) < len(found.mask)


def test_where_the_vocabulary_is_fixed_the_marks_are_text_that_a_turns_end_follows(
    tmp_path: Path,
) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    make_chat_tokenizer(tmp_path, CHAT, fixed=True)
    assert Encoder(tmp_path).vocab_size == 257
    question, answer = ("user", "Why?"), ("assistant", "So.")
    (found,) = ChatEncoder(tmp_path).encode([(question, answer)])
    asked = "<|im_start|>user\nWhy?<|endoftext|>\n<|im_start|>assistant\n"
    assert hf(tmp_path).decode(found.ids).startswith(f"{asked}So.<|endoftext|>")
    assert hf(tmp_path).decode(found.ids[found.mask == 1]).startswith("So.<|endoftext|>")
    assert hf(tmp_path).decode(ChatEncoder(tmp_path).encode_prompt((question,))) == asked
    written = ("user", "<|endoftext|>")
    (wrote,) = ChatEncoder(tmp_path).encode([(written, answer)])
    assert (wrote.ids == 256).sum() == (found.ids == 256).sum()  # a message can write no end


def test_a_template_named_in_the_recipe_comes_first(tmp_path: Path) -> None:
    folder = save(tmp_path / "tokenizer", MARKED)
    (tmp_path / "mine.jinja").write_text(LLAMA_2)
    mine = str(tmp_path / "mine.jinja")
    make_chat_tokenizer(folder, CHAT.model_copy(update={"chat_template": mine}))
    assert hf(folder).chat_template == LLAMA_2
    with pytest.raises(UserError, match=r"cannot be read .* fix data\.instruction\.chat_template"):
        make_chat_tokenizer(folder, CHAT.model_copy(update={"chat_template": mine + "x"}))


def test_a_template_in_the_configuration_is_the_tokenizers_own(tmp_path: Path) -> None:
    folder = save(tmp_path / "tokenizer")
    (folder / TEMPLATE_FILE).unlink()
    config = read_json(folder / "tokenizer_config.json")
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": MARKED}]
    write_json(folder / "tokenizer_config.json", config | {"chat_template": named})
    make_chat_tokenizer(folder, CHAT)
    assert (folder / TEMPLATE_FILE).read_text() == MARKED


def test_a_template_reads_no_clock(tmp_path: Path) -> None:
    clock = "\n{{ strftime_now('%Y') if strftime_now is defined else 'some day' }}\n" + CHATML
    folder = save(tmp_path / "tokenizer", clock)
    (found,) = ChatEncoder(folder).encode([TALK])
    assert hf(folder).decode(found.ids).startswith("\nsome day<|im_start|>")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LLAMA_2, "does not take a conversation of system, user, .*only user and assistant"),
        ("{{ messages[0]['content'] }}", "writes message 2 of 5 0 times instead of once"),
        (CHATML + "{{ messages[0]['content'] }}", "writes message 1 of 5 2 times"),
        ("{% for m in messages %}", "does not take a conversation"),
        ("{{ messages.__class__.__mro__ }}", "does not take a conversation .* unsafe"),
        (
            CHATML.replace("assistant\\n", "bot\\n"),
            r"begins the assistant's turn otherwise .* \{% generation %\}",
        ),
    ],
)
def test_a_template_that_will_not_do_is_one_line(
    tmp_path: Path, template: str, problem: str
) -> None:
    folder = save(tmp_path / "tokenizer", template)
    with pytest.raises(UserError, match=problem) as raised:
        ChatEncoder(folder).encode([TALK])
    assert "\n" not in str(raised.value)
