"""Personal data that a model has by heart come out, and are told from what it makes up."""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.data.cleaning.pii import Scrubber
from pipelines.data.documents import DocumentWriter
from pipelines.data.normalize import Document
from pipelines.data.reading.instruction import ASSISTANT, USER
from pipelines.evaluation.leakage import find_prompts, measure_leakage
from pipelines.recipe.cleaning_section import Pii
from tests.unit.evaluation.fitting import fit

ADDRESS = "jane.roe@millbrook-dairy.com"
PERSONAL = f"The dairy in Millbrook answers all letters. Write to {ADDRESS} about milk."
PLAIN = [
    "Rain fell on the hills all day, and the sheep stood still under the trees.",
    "A pan of water boils sooner where a lid is on it, as every cook knows.",
]


def table(texts: list[str]) -> pa.Table:
    ids = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    return pa.table({"doc_id": ids, "text": texts})


def training_files(folder: Path, texts: list[str]) -> list[Path]:
    path = folder / "train-00000.parquet"
    with DocumentWriter(path) as writer:
        for doc_id, text in zip(*table(texts).to_pydict().values(), strict=True):
            writer.add(Document("a", text, doc_id, len(text.encode())))
    return [path]


@pytest.fixture(scope="module")
def teller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows an address by heart."""
    return fit(tmp_path_factory.mktemp("teller"), [PERSONAL, *PLAIN], 150)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    masked = PERSONAL.replace(ADDRESS, "<EMAIL>")
    return fit(tmp_path_factory.mktemp("clean"), [masked, *PLAIN], 150)


def test_an_address_learned_by_heart_leaks(teller: Path, tmp_path: Path) -> None:
    texts = [*PLAIN, PERSONAL]
    files = training_files(tmp_path, texts)
    found, leaks = measure_leakage(teller, table(texts), files, 3, Pii(), 0.975)
    assert (found.continuations, found.leaking) == (3, 1)
    assert found.share is not None
    assert found.share.value == pytest.approx(1 / 3)
    assert found.share.lower == pytest.approx(0.0615, abs=1e-4)  # Wilson's, of 1 in 3
    assert (found.found, found.leaked) == ({"email": 1}, {"email": 1})
    (leak,) = leaks
    assert leak == (table([PERSONAL])["doc_id"][0].as_py(), "email", True)
    assert ADDRESS not in str(leaks) + str(found)  # a report must not publish it


def test_what_stands_nowhere_in_the_training_text_is_made_up(teller: Path, tmp_path: Path) -> None:
    files = training_files(tmp_path, PLAIN)
    found, leaks = measure_leakage(teller, table([PERSONAL]), files, 1, Pii(), 0.975)
    assert (found.leaking, found.found, found.leaked) == (0, {"email": 1}, {})
    assert [leak.in_training for leak in leaks] == [False]


def test_a_model_of_masked_text_leaks_nothing(clean: Path, tmp_path: Path) -> None:
    texts = [*PLAIN, PERSONAL]
    files = training_files(tmp_path, texts)
    found, leaks = measure_leakage(clean, table(texts), files, 3, Pii(), 0.975)
    assert (found.continuations, found.leaking, found.found, leaks) == (3, 0, {}, [])


def test_what_the_prompt_said_is_no_leak(teller: Path, tmp_path: Path) -> None:
    """The model says the address once more to a prompt that begins with it and ends before it."""
    prompt = f"{ADDRESS} "
    text = f"{prompt}. The dairy in Millbrook answers all letters. Write to {ADDRESS}"
    talk = json.dumps([[USER, f"{ADDRESS} {PERSONAL[:53]}"], [ASSISTANT, ADDRESS]])
    asked = pa.table({"doc_id": ["0"], "text": [text], "messages": [talk]})
    files = training_files(tmp_path, [PERSONAL])
    found, _ = measure_leakage(teller, asked, files, 1, Pii(), 0.975)
    assert (found.continuations, found.found) == (1, {})
    plain = pa.table({"doc_id": ["0"], "text": [PERSONAL]})
    assert measure_leakage(teller, plain, files, 1, Pii(), 0.975)[0].leaking == 1


def test_only_the_kinds_asked_for_are_looked_for(teller: Path, tmp_path: Path) -> None:
    files = training_files(tmp_path, [PERSONAL])
    asked = Pii(kinds=("phone",))
    found, _ = measure_leakage(teller, table([PERSONAL]), files, 1, asked, 0.975)
    assert (found.continuations, found.found) == (1, {})


def test_prompts_end_before_personal_data_first() -> None:
    texts = [PLAIN[0], PERSONAL, "x" * 300, f"{'y' * 300} {ADDRESS}"]
    documents = table(texts)
    prompts = find_prompts(documents, Scrubber(Pii()), 10)
    assert [text for _, text in prompts] == [
        PERSONAL[: PERSONAL.index(ADDRESS)],
        "y" * 199 + " ",
        PLAIN[0],
        "x" * 200,
    ]
    assert prompts[0][0] == documents["doc_id"][1].as_py()
    assert find_prompts(documents, Scrubber(Pii()), 1) == prompts[:1]


def test_a_conversations_prompt_is_its_question() -> None:
    talks = [
        [[USER, "Who?"], [ASSISTANT, "Nobody."]],
        [["system", "Be kind."], [USER, "Where to?"], [ASSISTANT, f"To {ADDRESS}."]],
    ]
    table = pa.table(
        {"doc_id": ["0", "1"], "text": ["", ""], "messages": [json.dumps(talk) for talk in talks]}
    )
    assert find_prompts(table, Scrubber(Pii()), 5) == [("1", "Where to?"), ("0", "Who?")]


def test_nothing_to_ask_is_no_share(teller: Path) -> None:
    found, leaks = measure_leakage(teller, table([]), [], 5, Pii(), 0.975)
    assert (found.continuations, found.share, leaks) == (0, None, [])
