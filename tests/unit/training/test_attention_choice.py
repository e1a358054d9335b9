"""What computes attention: the check, on a CPU with kernels of its own, and what follows from it.

No GPU is here, so that its facts are stood in for; the check computes for real.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import (
    _registry,
    current_flash_attention_impl,
    register_flash_attention_impl,
)

from pipelines.core.errors import SharedError
from pipelines.models.presets import preset
from pipelines.recipe.recipe import Recipe
from pipelines.training import attention_choice
from pipelines.training.attention_choice import Kernels, choose_kernels
from tests import varlen_on_cpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = preset("llama-1b")
DOCUMENTS: Any = SimpleNamespace(most_documents=4)


def recipe(**train: Any) -> Recipe:
    sections = {"data": {"sequence_length": 2048, "document_mask": True}}
    return Recipe.model_validate({"name": "t", "train": {"precision": "bf16"} | train, **sections})


def problem(dtype: torch.dtype = torch.bfloat16, window: int | None = None) -> Any:
    return attention_choice._Problem.drawn(SHAPE, dtype, CPU, window)


@pytest.mark.parametrize("window", [None, 50, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_that_is_right_passes_the_check(dtype: torch.dtype, window: int | None) -> None:
    before = dict(varlen_on_cpu.calls)
    assert attention_choice._why_it_differs(problem(dtype, window)) is None
    assert varlen_on_cpu.calls == {name: count + 1 for name, count in before.items()}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda found: found._replace(before=98),  # one position short
        lambda found: found._replace(before=-1),
        lambda found: found._replace(bounds_C=found.bounds_C[[0, 1, 2, 4, 5, 6]].contiguous()),
    ],
)
def test_a_kernel_that_is_wrong_is_named(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_choice.sequences
    monkeypatch.setattr(attention_choice, "sequences", lambda *asked: wrong(right(*asked)))
    why = attention_choice._why_it_differs(problem(window=100)) or ""
    assert "in the check on this GPU its result is off by" in why


def test_what_is_no_number_is_wrong() -> None:
    right = [torch.ones(3)] * 4
    nothing = [*right[:3], torch.tensor([1.0, torch.nan, 1.0])]
    why = attention_choice._difference(nothing, right, right, 0.01) or ""
    assert why.startswith("in the check on this GPU its values' gradient is off by nan")


def test_a_kernel_that_can_t_run_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise RuntimeError("no kernel image\n is available")

    monkeypatch.setattr(attention_choice, "sequences", missing)
    why = attention_choice._first_reason(lambda: attention_choice._why_it_differs(problem()))
    assert why == "RuntimeError: no kernel image is available"


def test_a_flash_attention_3_that_is_not_there_leaves_torch_s_own() -> None:
    """As torch looks for it, here for real."""
    why = attention_choice._first_reason(lambda: attention_choice._activated(problem()))
    assert why == "ModuleNotFoundError: No module named 'flash_attn_interface'"
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("asked", ["auto", "flex"])
def test_nothing_is_chosen_on_a_cpu(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    chosen = choose_kernels(recipe(attention=asked), SHAPE, DOCUMENTS, CPU, None)
    assert (chosen, caplog.text) == (Kernels("flex"), "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """A GPU of some capability, on which `varlen_attn` gives what the check says."""
    caplog.set_level("INFO")

    def made(capability: tuple[int, int], says: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Some")
        drawn = attention_choice._Problem.drawn
        there = classmethod(
            lambda _, config, dtype, _device, window: drawn(config, dtype, CPU, window)
        )
        monkeypatch.setattr(attention_choice._Problem, "drawn", there)
        if says is not None:
            monkeypatch.setattr(attention_choice, "_why_it_differs", lambda _: says)

    return made


def chosen(before: Kernels | None = None, **train: Any) -> Kernels:
    return choose_kernels(recipe(**train), SHAPE, DOCUMENTS, GPU, before)


def test_on_hopper_both_are_told_in_a_line(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    gpu((9, 0))
    assert chosen(attention="varlen") == Kernels("varlen")
    assert [record.message for record in caplog.records] == [
        "train.attention: varlen is varlen: the check on each GPU gives FlexAttention's result, "
        "within rounding",
        "FlashAttention 3 is not used, and torch's own FlashAttention 2 stays: its package is not "
        "installed: there is no module flash_attn_interface",
    ]


@pytest.mark.parametrize(
    ("capability", "train", "says", "why"),
    [
        ((7, 5), {"precision": "fp16"}, None, "NVIDIA Some is older than FlashAttention supports"),
        ((9, 0), {"deterministic": True}, None, "train.deterministic is set"),
        (
            (9, 0),
            {},
            None,
            "on Hopper FlashAttention 2 is slower, and FlashAttention 3 is not used: its",
        ),
        ((8, 0), {}, "its result is off", "its result is off"),
        ((8, 0), {"attention": "flex"}, None, "the recipe says so"),
    ],
)
def test_auto_stays_flex_and_says_why(
    capability: tuple[int, int],
    train: dict[str, Any],
    says: str | None,
    why: str,
    gpu: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu(capability, says)
    assert chosen(**train) == Kernels("flex")
    asked = train.get("attention", "auto")
    assert caplog.records[-1].message.startswith(f"train.attention: {asked} is flex: {why}")


def test_varlen_that_can_t_be_had_is_refused(gpu: Any) -> None:
    gpu((8, 0), "its result is off")
    with pytest.raises(SharedError, match=r"attention = varlen: its result is off; set flex or"):
        chosen(attention="varlen")


@pytest.mark.parametrize("asked", ["auto", "varlen"])
def test_a_run_keeps_what_it_began_with(asked: str, gpu: Any) -> None:
    """Without another check, which might end otherwise."""
    gpu((9, 0), "its result is off")
    assert chosen(Kernels("varlen"), attention=asked) == Kernels("varlen")
    gpu((9, 0))
    assert chosen(Kernels("flex")) == Kernels("flex")


@pytest.fixture
def flash_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A FlashAttention 3 that torch finds, and that computes with what torch has on a CPU."""
    monkeypatch.setattr(attention_choice, "find_spec", lambda _: "found")
    there = dict(_registry._FLASH_ATTENTION_IMPLS)
    register_flash_attention_impl("FA3", register_fn=lambda: SimpleNamespace(remove=lambda: None))
    yield
    _registry._FLASH_ATTENTION_IMPLS.update(there)
    attention_choice._restore_flash_2()


def test_flash_attention_3_is_activated_where_it_is_right(
    gpu: Any, flash_3: None, caplog: pytest.LogCaptureFixture
) -> None:
    gpu((9, 0))
    assert chosen() == Kernels("varlen", "FA3")
    assert current_flash_attention_impl() == "FA3"
    assert caplog.records[1].message.startswith("varlen_attn calls FlashAttention 3: the check")
    assert chosen(Kernels("varlen", "FA3")) == Kernels("varlen", "FA3")
    assert chosen(Kernels("varlen")) == Kernels("varlen")  # as the run began
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("why", ["deterministic", "another process", "wrong", "flex"])
def test_flash_attention_3_is_not_left_active_where_it_may_not_be(
    why: str, gpu: Any, flash_3: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0))
    train = {"attention": "flex" if why == "flex" else "varlen"}
    if why == "another process":
        answers = iter([[None], [None, "not here"]])  # of the choice before, and of this
        monkeypatch.setattr(attention_choice, "from_all", lambda _: next(answers))
    elif why == "wrong":
        monkeypatch.setattr(attention_choice, "_difference", lambda *_: "off")
    elif why == "deterministic":
        train["deterministic"] = True
    assert chosen(Kernels("varlen", "FA3"), **train).flash is None
    assert current_flash_attention_impl() is None


def test_one_process_that_can_t_decides_for_all(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu((8, 0))
    monkeypatch.setattr(attention_choice, "from_all", lambda mine: [mine, "the other can't"])
    assert chosen() == Kernels("flex")
    assert caplog.records[-1].message == "train.attention: auto is flex: the other can't"


def test_what_is_not_divided_is_left_alone(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    gpu((8, 0), "never asked")
    whole = recipe().model_copy(update={"data": Recipe(name="t").data})
    assert choose_kernels(whole, SHAPE, DOCUMENTS, GPU, None) == Kernels("flex")
    assert not caplog.records
