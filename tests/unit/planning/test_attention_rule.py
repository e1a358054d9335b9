"""What of `train.attention: auto` follows from the recipe and the data, on whatever device."""

from dataclasses import replace

import pytest

from pipelines.models.presets import preset
from pipelines.planning.attention_rule import is_divided, why_not_by_itself, why_not_flash
from pipelines.recipe.recipe import Recipe

SHAPE = preset("llama-1b")


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"name": "t", "data": {"sequence_length": 1024}} | sections)


@pytest.mark.parametrize(
    ("masked", "window", "expected"),
    [(False, None, False), (True, None, True), (False, 1024, False), (False, 1023, True)],
)
def test_what_hides_earlier_tokens(masked: bool, window: int | None, expected: bool) -> None:
    asked = recipe(data={"sequence_length": 1024, "document_mask": masked})
    assert is_divided(asked, replace(SHAPE, sliding_window=window)) is expected


def test_what_flash_attention_takes() -> None:
    for precision in ("bf16", "fp16", "fp8", "auto"):
        assert why_not_flash(SHAPE, precision) is None
    for precision in ("fp32", "tf32"):
        assert precision in (why_not_flash(None, precision) or "")
    odd = replace(SHAPE, width=36, heads=3, kv_heads=3)
    assert "have 12" in (why_not_flash(odd, "bf16") or "")
    assert "sinks" in (why_not_flash(replace(SHAPE, sinks=True), "bf16") or "")


def test_auto_keeps_to_flex_where_it_is_deterministic_or_documents_are_short() -> None:
    asked = recipe(data={"sequence_length": 4096})
    assert why_not_by_itself(asked, 8) is None
    assert "may hold 9 documents" in (why_not_by_itself(asked, 9) or "")
    asked = recipe(train={"deterministic": True})
    assert "deterministic" in (why_not_by_itself(asked, 1) or "")
