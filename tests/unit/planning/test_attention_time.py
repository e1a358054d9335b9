import pytest

from pipelines.models.presets import preset
from pipelines.parallel.layout import Layout
from pipelines.planning.hardware_table import ENTRIES, named
from pipelines.planning.memory_training import Training
from pipelines.planning.roofs import flops_per_token
from pipelines.planning.step_time import FLASH_1, attention_flops, attention_share, step_time

PEAK = {"a100": 312.0, "h100": 989.4}


@pytest.mark.parametrize(
    ("length", "width", "figures", "teraflops"),
    [(512, 64, "a100", 88), (16_384, 128, "a100", 189), (2048, 128, "h100", 265)],
)
def test_the_rate_is_the_published_one(length, width, figures, teraflops) -> None:
    assert attention_share(length, width, figures) * PEAK[figures] == pytest.approx(teraflops)


def test_between_lengths_the_rate_lies_between_and_beyond_them_it_is_the_last() -> None:
    short, middle, long = (attention_share(n, 128, "h100") for n in (4096, 6000, 8192))
    assert short < middle < long
    assert attention_share(262_144, 128, "h100") == attention_share(16_384, 128, "h100")
    assert attention_share(128, 128, "h100") == attention_share(512, 128, "h100")
    assert attention_share(8192, 128, "h100", FLASH_1) < attention_share(8192, 128, "h100")


def test_half_the_scores_are_made_and_3_5_times_instead_of_3() -> None:
    shape = preset("llama3-8b")
    whole = flops_per_token(shape, 8192) - flops_per_token(shape, 0)
    assert attention_flops(shape, 8192) == pytest.approx(whole / 2 * 3.5 / 3)


def test_long_samples_are_slower_on_an_h100_than_its_peak_tells() -> None:
    """FlashAttention 2 reaches 61% of an A100's peak and a third of an H100's."""
    shape = preset("llama3-8b")
    training = Training(Layout(), "none", 1, 1, sequence=65_536, precision="bf16")
    a100, h100 = (step_time(shape, training, named(gpu)) for gpu in ("a100-80", "h100"))
    assert a100.products / h100.products > a100.attention / h100.attention
    assert a100.attention / h100.attention == pytest.approx(328 / 189)


def test_hopper_s_own_figures_hold_for_hopper() -> None:
    assert {name for name, each in ENTRIES.items() if each.attention == "h100"} == {
        "b200",
        "h200",
        "h100",
        "h100-nvl",
        "h100-pcie",
    }
