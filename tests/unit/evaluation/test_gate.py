import math

import pyarrow as pa
import pytest

from pipelines.evaluation.gate import bits_per_byte, decide, refuse


def scores(*bits, ids="abcdef"):
    """Documents of 100 bytes at so many bits per byte each."""
    return pa.table(
        {
            "doc_id": list(ids[: len(bits)]),
            "bytes": [100] * len(bits),
            "nats": [each * 100 * math.log(2) for each in bits],
        }
    )


def test_bits_per_byte_weighs_documents_by_their_bytes():
    table = pa.table({"doc_id": ["a", "b"], "bytes": [10, 30], "nats": [0.0, 60 * math.log(2)]})
    assert bits_per_byte(table) == pytest.approx(1.5)


def test_the_first_model_is_promoted():
    verdict = decide(scores(2, 3), None, 0.5, "a", None)
    assert (verdict.decision, verdict.champion_bits_per_byte) == ("promoted", None)
    assert verdict.candidate_bits_per_byte == pytest.approx(2.5)


def test_a_better_model_is_promoted_with_both_numbers():
    verdict = decide(scores(1, 3), scores(2, 2.5), 0.0, "a", "b")
    assert verdict.decision == "promoted"
    assert "2.0000 bits per byte, champion 2.2500" in verdict.reason
    assert "better on 1 of the same 2 documents" in verdict.reason


def test_a_worse_model_is_refused_with_both_numbers():
    verdict = decide(scores(3), scores(2), 0.0, "a", "b")
    assert verdict.decision == "refused"
    assert "3.0000 bits per byte, champion 2.0000" in verdict.reason


def test_a_tie_is_refused():
    assert decide(scores(2, 2), scores(2, 2), 0.0, "a", "b").decision == "refused"


@pytest.mark.parametrize(("gain", "decision"), [(0.05, "refused"), (0.2, "promoted")])
def test_an_improvement_must_exceed_the_least(gain, decision):
    verdict = decide(scores(2 - gain), scores(2), 0.1, "a", "b")
    assert verdict.decision == decision
    assert ("by more than 0.1" in verdict.reason) == (decision == "refused")


def test_the_same_content_is_unchanged():
    assert decide(scores(2), None, 0.0, "a", "a").decision == "unchanged"


def test_the_order_of_documents_does_not_matter():
    champion = scores(2.5, 2, ids="ba")
    assert decide(scores(1, 2), champion, 0.0, "a", "b").decision == "promoted"


def test_other_documents_are_no_comparison():
    with pytest.raises(ValueError, match="different documents"):
        decide(scores(1, 2), scores(2, 3, ids="ac"), 0.0, "a", "b")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_is_never_promoted(bad):
    assert decide(scores(bad), None, 0.0, "a", None).decision == "refused"
    assert decide(scores(bad), scores(2), 0.0, "a", "b").decision == "refused"


def test_a_champion_without_scores_is_not_beaten():
    assert decide(scores(1), None, 0.0, "a", "b").decision == "refused"
    assert refuse(scores(1), "dirty").reason == "dirty"
