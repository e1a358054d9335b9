"""What evaluation says of held-out pairs of answers."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipelines.data.documents import DocumentWriter
from pipelines.data.normalize import Messages, conversation, shared_turns
from pipelines.data.tokens.chat_encoder import ChatEncoder, EncodedChat, make_chat_tokenizer
from pipelines.data.tokens.tokenizer import Encoder, byte_tokenizer, save_tokenizer
from pipelines.evaluation import preferences
from pipelines.evaluation.evaluation_page import write_report
from pipelines.evaluation.held_out_documents import each_once
from pipelines.evaluation.preferences import pair_rows, pair_score, score_pairs, show_pairs
from pipelines.evaluation.task_scores import compare_tasks, task_table
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_weights, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.data_section import Instruction
from pipelines.recipe.preference_section import Preference
from pipelines.recipe.recipe import PAIRS, SHORT_PAIRS, TaskLimit
from tests.unit.evaluation.test_evaluation_page import evaluation

torch.set_num_threads(1)
DPO = Preference(kind="dpo", beta=0.5)
ASKED: Messages = (("user", "Who?"), ("assistant", "Me."), ("user", "Why?"))
TALKS: list[tuple[Messages, Messages]] = [
    ((("user", "Hi"), ("assistant", "Hello!")), (("user", "Hi"), ("assistant", "Go away, you."))),
    ((*ASKED, ("assistant", "Because of this.")), (*ASKED, ("assistant", "No."))),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"model-{seed}")
        save_tokenizer(byte_tokenizer(), folder)
        make_chat_tokenizer(folder, Instruction(kind="preference"))
        encoder = Encoder(folder)
        model = Transformer(preset("llama-100k").sized(encoder.vocab_size, 128))
        model.init_weights(seed)
        save_pretrained(model, folder, encoder.end_id, ChatEncoder(folder).end_of_answer)
        made.append(folder)
    return made


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    path = tmp_path_factory.mktemp("documents") / "validation-00000.parquet"
    with DocumentWriter(path) as writer:
        for number, talk in enumerate(TALKS):
            writer.add(conversation(f"talk {number}", *talk))
    return each_once([pa.parquet.read_table(path)])


def log_probabilities(
    folder: Path, talk: Messages, given: int
) -> tuple[EncodedChat, Tensor, Tensor]:
    """The conversation, its tokens, and what the model says of each of them."""
    encoder = Encoder(folder)
    model = Transformer(preset("llama-100k").sized(encoder.vocab_size, 128))
    load_weights(model, folder)
    (chat,) = ChatEncoder(folder).encode([talk], [given])
    tokens = torch.tensor([encoder.end_id, *chat.ids.tolist()])
    with torch.no_grad():
        return chat, tokens, F.log_softmax(model(tokens[None, :-1])[0], dim=-1)


def log_likelihood(folder: Path, talk: Messages, given: int) -> tuple[float, int]:
    """That of the answer, and its tokens, by the model itself."""
    chat, tokens, logs = log_probabilities(folder, talk, given)
    said = logs.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(chat.mask) == 1]
    return float(said.sum()), len(said)


def test_both_answers_are_scored_beyond_what_they_have_in_common(
    models: list[Path], documents: pa.Table
) -> None:
    scores = score_pairs(models[0], documents, 0.75, reference=models[1])
    found = {row["doc_id"]: row for row in scores.to_pylist()}
    for talk in TALKS:
        row = found[conversation("", *talk).doc_id]
        for side, each in zip(("chosen", "rejected"), talk, strict=True):
            ours, reference = (log_likelihood(m, each, shared_turns(*talk)) for m in models)
            assert row[f"{side}_tokens"] == ours[1]
            assert row[f"{side}_nats"] == pytest.approx(-ours[0], rel=1e-5)
            assert row[f"{side}_reference_nats"] == pytest.approx(-reference[0], rel=1e-5)


def test_of_labelled_answers_good_ones_become_likelier_and_bad_ones_less(
    models: list[Path], tmp_path: Path
) -> None:
    (question, answer), (_, wrong) = TALKS[0]
    single = [((question, answer), (question,)), ((question,), (question, wrong))]
    with DocumentWriter(tmp_path / "validation-00000.parquet") as writer:
        for number, talk in enumerate(single):
            writer.add(conversation(f"talk {number}", *talk))
    table = each_once([pa.parquet.read_table(tmp_path / "validation-00000.parquet")])
    scores = score_pairs(models[0], table, 0.75, reference=models[1])
    ours, theirs = ([log_likelihood(m, t, 1)[0] for t in TALKS[0]] for m in models)
    rewards = [0.5 * (one - other) for one, other in zip(ours, theirs, strict=True)]
    found = pair_score(scores, Preference(kind="kto", beta=0.5), 0.975)
    assert found is not None
    assert (found.pairs, found.short_pairs, found.right_of_short) == (2, 0, None)
    assert found.reward_of_chosen == pytest.approx(rewards[0], rel=1e-4)
    assert found.reward_of_rejected == pytest.approx(rewards[1], rel=1e-4)
    assert found.margin == pytest.approx(rewards[0] - rewards[1], rel=1e-4)
    assert found.right.value == ((rewards[0] > 0) + (rewards[1] < 0)) / 2
    assert found.drift is not None  # over the good one


def test_drift_is_the_divergence_over_the_chosen_answers(
    models: list[Path], documents: pa.Table
) -> None:
    scores = score_pairs(models[0], documents, 0.75, reference=models[1])
    found = {row["doc_id"]: row["drift"] for row in scores.to_pylist()}
    for talk in TALKS:
        chat, tokens, ours = log_probabilities(models[0], talk[0], shared_turns(*talk))
        *_, reference = log_probabilities(models[1], talk[0], shared_turns(*talk))
        by_position = F.kl_div(reference, ours, reduction="none", log_target=True).sum(dim=-1)
        assert len(tokens) == len(chat.mask) + 1
        expected = by_position[torch.from_numpy(chat.mask) == 1].mean().item()
        assert found[conversation("", *talk).doc_id] == pytest.approx(expected, rel=1e-5)
    score = pair_score(scores, DPO, 0.975)
    assert score is not None
    assert score.figures()["pairs/drift"] == pytest.approx(sum(found.values()) / len(found))
    assert score.drift.lower is None  # two answers are too few


def test_answers_without_room_have_no_drift(
    models: list[Path], documents: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preferences, "_MOST_HELD", 0)
    scores = score_pairs(models[0], documents, 0.75, reference=models[1])
    assert np.isnan(scores["drift"].to_numpy()).all()
    assert pair_score(scores, DPO, 0.975).drift is None


def test_a_model_prefers_nothing_to_itself(models: list[Path], documents: pa.Table) -> None:
    scores = score_pairs(models[0], documents, 0.75, reference=models[0])
    found = pair_score(scores, DPO, 0.975)
    assert found is not None
    assert found.drift.value == 0
    assert (found.pairs, found.short_pairs, found.right.value, found.margin) == (2, 1, 0, 0)
    assert set(found.figures()) >= {"pairs/right", "pairs/right_of_short", "pairs/margin"}


def made_up(chosen: np.ndarray, rejected: np.ndarray, gain: np.ndarray) -> pa.Table:
    """Scores of answers of so many tokens, of which each became likelier by so much."""
    sides = {"chosen": (chosen, gain[0]), "rejected": (rejected, gain[1])}
    columns = {"doc_id": [str(number) for number in range(len(chosen))]}
    columns["drift"] = np.full(len(chosen), np.nan)
    for side, (tokens, likelier) in sides.items():
        columns[f"{side}_tokens"], columns[f"{side}_nats"] = tokens, 100 - likelier
        columns[f"{side}_reference_nats"] = np.full(len(tokens), 100.0)
    return pa.table(columns)


def test_a_reward_is_what_the_loss_compares() -> None:
    scores = made_up(np.array([2, 8]), np.array([4, 4]), np.array([[2.0, 4.0], [1.0, 3.0]]))
    by_answer, by_token = (
        pair_score(scores, by, 0.975) for by in (DPO, Preference(kind="ipo", beta=0.5))
    )
    assert by_answer is not None
    assert by_token is not None
    assert by_answer.margin == pytest.approx(0.5 * ((2 - 1) + (4 - 3)) / 2)
    assert by_token.margin == pytest.approx(0.5 * ((2 / 2 - 1 / 4) + (4 / 8 - 3 / 4)) / 2)
    assert (by_answer.right.value, by_token.right.value) == (1.0, 0.5)


def test_a_model_that_only_says_more_is_refused_by_the_short_answers() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.permuted(np.tile([[5], [20]], (1, 200)), axis=0)
    noise = draw.normal(size=(2, 200))
    honest = made_up(*lengths, noise + np.array([[1.5], [0.0]]))
    games = made_up(*lengths, noise + 3.0 * (lengths == 20))
    tables = [task_table(pair_rows(each, DPO)) for each in (games, honest)]
    limits = TaskLimit(task=PAIRS, max_loss=1.0), TaskLimit(task=SHORT_PAIRS, max_loss=0.05)
    whole, short = compare_tasks(*tables, limits, 0.95)
    assert whole.questions == 200
    assert short.questions == (lengths[0] < lengths[1]).sum()
    assert (whole.regressed, short.regressed) == (False, True)
    assert short.candidate < 0.2 < 0.7 < short.champion


def test_the_report_shows_chosen_rejected_and_generated(
    models: list[Path], documents: pa.Table, tmp_path: Path
) -> None:
    shown = show_pairs(models[0], documents, 8)
    assert [each[:3] for each in shown] == [("Hi", "Hello!", "Go away, you.")]
    scores = score_pairs(models[0], documents, 0.75)
    full = evaluation()
    record = full.record.model_copy(
        update={"pairs": pair_score(scores, Preference(kind="orpo"), 0.975)}
    )
    (tmp_path / "curve.png").write_bytes(b"")
    page = tmp_path / "report.html"
    write_report(
        full.__class__(**{**full.__dict__, "record": record, "pairs": shown}),
        tmp_path / "curve.png",
        page,
    )
    text = page.read_text()
    assert all(words in text for words in ("Go away, you.", "the chosen answer has the larger"))
    assert math.isfinite(record.pairs.margin)


def test_without_pairs_there_are_no_figures(models: list[Path], documents: pa.Table) -> None:
    nothing = documents.set_column(
        documents.schema.get_field_index("rejected"), "rejected", pa.nulls(2, pa.string())
    )
    assert pair_score(score_pairs(models[0], nothing, 0.75), DPO, 0.975) is None
