"""The choice, by numbers given; and the numbers, measured on a small model."""

import math
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.core.errors import UserError
from pipelines.evaluation.bootstrap import bits_per_byte
from pipelines.evaluation.perplexity import score_documents
from pipelines.export.right_size import GB, Budget, Variant, assess_variants, choose
from pipelines.export.variants import measure_variants
from pipelines.models.presets import preset
from tests.unit.export.models import PROMPTS, small, write_registered

CONFIG = preset("llama2-7b").sized(32_000, 4096)
SIZES = {"bf16": 13.5, "int8": 6.9, "int4": 3.9}  # GB of 6.7 billion weights


def variants(int8: float = 1.003, int4: float = 1.03) -> list[Variant]:
    scores = {"bf16": 1.0001, "int8": int8, "int4": int4}
    return [Variant(name, int(gb * GB), scores[name], 1.0) for name, gb in SIZES.items()]


def budget(gb: float, max_loss: float = 0.05, sequences: int = 1) -> Budget:
    return Budget(gb, max_loss, sequences, tokens=4096)


def chosen(given: Budget, of: list[Variant] | None = None) -> str:
    return choose(assess_variants(of or variants(), CONFIG, 1.0, given), given).variant.name


@pytest.mark.parametrize(
    ("gb", "sequences", "name"),
    [
        (24, 1, "bf16"),  # 13.5 of weights and 2.1 of keys and values
        (16, 1, "int8"),
        (16, 4, "int4"),  # 8.6 of keys and values
        (24, 4, "int8"),
    ],
)
def test_the_best_that_fits(gb: float, sequences: int, name: str) -> None:
    assert chosen(budget(gb, sequences=sequences)) == name


def test_of_those_that_fit_fewer_bits_per_byte_win_whatever_the_size() -> None:
    assert chosen(budget(80), variants(int8=0.9999)) == "int8"
    assert chosen(budget(80), variants(int8=1.0001)) == "int8"  # equal to bf16, and smaller


def test_a_variant_that_loses_too_much_is_not_chosen_because_it_fits() -> None:
    given = budget(16, max_loss=0.01, sequences=4)
    with pytest.raises(UserError) as caught:
        chosen(given)
    line = str(caught.value)
    assert "no variant fits 16 GB within a loss of 0.01 bits per byte at 4 x 4096 tokens" in line
    for numbers in ("bf16 needs 22.3 GB and loses +0.0001", "int4 needs 12.7 GB and loses +0.0300"):
        assert numbers in line


def test_a_model_that_broke_is_never_chosen() -> None:
    assert chosen(budget(16, sequences=4, max_loss=1.0)) == "int4"
    with pytest.raises(UserError, match=r"loses [+]?nan"):
        chosen(budget(16, sequences=4, max_loss=1.0), variants(int4=math.nan))


def test_a_tenth_of_the_memory_is_the_engines() -> None:
    (judged,) = assess_variants(variants()[:1], CONFIG, 1.0, budget(16))
    total = judged.memory.total / GB
    assert 15 < total < 16
    assert not judged.fits
    assert assess_variants(variants()[:1], CONFIG, 1.0, budget(total / 0.9 + 0.01))[0].fits


def test_what_is_measured_is_what_was_written(registered: Path, tmp_path: Path) -> None:
    documents = pa.table({"doc_id": list("abcd"), "text": [prompt * 9 for prompt in PROMPTS]})

    def score(folder: Path) -> float:
        return bits_per_byte(score_documents(folder, documents))

    problems: list[str] = []
    found = measure_variants(registered, tmp_path, score, 32, problems.append)
    assert [each.name for each in found] == ["bf16", "int8", "int4"]
    assert not problems
    sizes = [each.weight_bytes for each in found]
    assert sizes == sorted(sizes, reverse=True)
    for each in found:
        assert each.bits_per_byte == score(tmp_path / each.name)
        assert each.load_seconds > 0
        # Files hold a header beside the tensors, and nothing else.
        size = (tmp_path / each.name / "model.safetensors").stat().st_size
        assert 0 < size - each.weight_bytes < 20_000


def test_a_form_that_a_model_can_not_take_is_said_and_left_out(tmp_path: Path) -> None:
    source = write_registered(small("gpt2-124m"), tmp_path / "source")
    problems: list[str] = []
    (tmp_path / "scratch").mkdir()
    found = measure_variants(source, tmp_path / "scratch", lambda folder: 1.0, 32, problems.append)
    assert [each.name for each in found] == ["bf16"]
    assert [problem[:5] for problem in problems] == ["int8:", "int4:"]
