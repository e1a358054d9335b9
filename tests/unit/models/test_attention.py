import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pipelines.models import attention
from pipelines.models.attention import (
    Mask,
    attend,
    attend_with_sinks,
    attention_mask,
    narrower,
    positions,
    sequences,
)
from tests import varlen_on_cpu

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [4, 5, 5, 5, 5, 5, 5, 9]])


def test_a_token_sees_its_document_and_window_only() -> None:
    mask = attention_mask(DOCUMENTS, 8, 3, CPU)
    assert isinstance(mask, torch.Tensor)
    for row in range(2):
        for query in range(8):
            seen = [
                key
                for key in range(query + 1)
                if DOCUMENTS[row, key] == DOCUMENTS[row, query] and query - key < 3
            ]
            assert mask[row, 0, query].nonzero().flatten().tolist() == seen


@pytest.mark.parametrize("window", [None, 8, 9])
def test_a_window_as_long_as_the_sample_is_no_mask(window: int | None) -> None:
    assert attention_mask(None, 8, narrower(window, 8), CPU) is None


def test_a_mask_can_be_demanded() -> None:
    mask = attention_mask(None, 8, 8, CPU)
    assert isinstance(mask, torch.Tensor)
    assert torch.equal(mask, torch.ones(8, 8, dtype=torch.bool).tril())


@pytest.mark.parametrize("mask", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("flex", [False, True])
def test_sinks_take_a_share_of_the_softmax(
    mask: torch.Tensor | None, flex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways to compute them, against the formula, with gradients where this CPU has them."""
    from torch.nn.attention import flex_attention

    torch.manual_seed(0)
    shapes = (2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16), (4,)
    inputs = q, k, v, sinks = [torch.randn(shape, requires_grad=True) for shape in shapes]
    visible = attention_mask(mask, 8, 8, CPU)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = (q @ keys.mT / 4).masked_fill(~visible, -math.inf)
    further = sinks.view(1, 4, 1, 1).expand(2, 4, 8, 1)
    expected = torch.cat((scores, further), dim=-1).softmax(dim=-1)[..., :-1] @ values
    if flex:
        monkeypatch.setattr(attention, "_compiled", lambda name: getattr(flex_attention, name))
        rows, seen = None if mask is None else 2, attention._visible(mask, 8)
        visible = flex_attention.create_block_mask(seen, rows, None, 8, 8, device="cpu")
        q, k, v, sinks = (x.detach() for x in inputs)  # it has no gradients on a CPU
        torch.testing.assert_close(attend_with_sinks(q, k, v, visible, sinks), expected.detach())
        return
    found = attend_with_sinks(q, k, v, visible, sinks)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for mine, right in zip(
        *(torch.autograd.grad(out, inputs, weights) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(("documents", "window"), [(DOCUMENTS, None), (DOCUMENTS, 3), (None, 3)])
def test_the_block_mask_of_a_gpu_says_the_same(
    documents: torch.Tensor | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention, here not compiled, against a mask tensor."""
    from torch.nn.attention import flex_attention

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    expected = attend(q, k, v, attention_mask(documents, 8, window, CPU))
    monkeypatch.setattr(attention, "_compiled", lambda name: getattr(flex_attention, name))
    visible = attention._visible(documents, window)
    blocks = flex_attention.create_block_mask(
        visible, None if documents is None else 2, None, 8, 8, device="cpu"
    )
    torch.testing.assert_close(attend(q, k, v, blocks), expected)


def test_a_compiled_block_takes_new_documents_without_compiling_again() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    make = torch.compile(create_block_mask, backend=backend)
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    for step in range(3):
        documents = DOCUMENTS.roll(step, dims=1)
        mask = make(attention._visible(documents, None), 2, None, 8, 8, device="cpu")
        expected = attend(q, k, v, attention_mask(documents, 8, None, CPU))
        torch.testing.assert_close(compiled(q, k, v, mask), expected)
    assert len(graphs) == 2


def test_sequences_are_the_documents_of_all_rows_and_empty_ones() -> None:
    found = sequences(DOCUMENTS, (2, 8), None, 4, CPU)
    assert found is not None
    assert found.bounds_C.tolist() == [0, 3, 5, 8, 9, 15, 16, 16, 16]
    assert (found.bounds_C.dtype, found.longest, found.before) == (torch.int32, 8, -1)
    exactly = sequences(DOCUMENTS, (2, 8), None, 3, CPU)
    assert exactly is not None and exactly.bounds_C.tolist() == [0, 3, 5, 8, 9, 15, 16]
    one_token_each = sequences(torch.arange(8).expand(2, 8), (2, 8), None, 99, CPU)
    assert one_token_each is not None and one_token_each.bounds_C.tolist() == list(range(17))


def test_sequences_of_a_window_are_the_rows() -> None:
    found = sequences(None, (2, 8), 3, 1, CPU)
    assert found is not None
    assert (found.bounds_C.tolist(), found.before) == ([0, 8, 16], 2)  # and itself
    assert sequences(None, (2, 8), 8, 1, CPU) is None


def test_more_documents_than_there_is_room_for_are_found() -> None:
    with pytest.raises(RuntimeError, match="more documents than were counted"):
        sequences(DOCUMENTS, (2, 8), None, 2, CPU)


def with_gradients(mask: Mask, compiled: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 8, 16) for heads in (4, 2, 2, 4)]
    q, k, v, gradient = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    out = run(q, k, v, mask)
    return [out, *torch.autograd.grad(out, leaves, gradient)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("documents", "window"),
    [(DOCUMENTS, None), (DOCUMENTS, 3), (DOCUMENTS, 1), (None, 3), (None, 1)],
)
def test_attention_within_sequences_is_attention_under_the_mask(
    documents: Tensor | None, window: int | None, compiled: bool
) -> None:
    within = sequences(documents, (2, 8), window, 5, CPU)
    before = dict(varlen_on_cpu.calls)
    found = with_gradients(within, compiled)
    assert all(varlen_on_cpu.calls[name] == before[name] + 1 for name in before)
    expected = with_gradients(attention_mask(documents, 8, window, CPU))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_compiled_block_takes_new_sequences_without_compiling_again() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    for step in range(3):
        documents = DOCUMENTS.roll(step, dims=1).cummax(dim=1).values
        expected = attend(q, k, v, attention_mask(documents, 8, None, CPU))
        found = compiled(q, k, v, sequences(documents, (2, 8), None, 6, CPU))
        torch.testing.assert_close(found, expected)
    assert len(graphs) == 1


def test_positions_begin_anew_in_each_document() -> None:
    tokens = torch.zeros(2, 8)
    assert positions(tokens, DOCUMENTS).tolist() == [
        [0, 1, 2, 0, 1, 0, 1, 2],
        [0, 0, 1, 2, 3, 4, 5, 0],
    ]
    assert positions(tokens, None).tolist() == [list(range(8))]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_no_attention_on_a_gpu_writes_out_its_weights(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype
) -> None:
    """Groups in fp32 have no kernel, so that keys and values are repeated for it."""
    asked: list[tuple[int, bool]] = []

    def attention(
        q: Tensor, k: Tensor, v: Tensor, _mask: Mask, *, enable_gqa: bool, **_: object
    ) -> Tensor:
        assert k.shape == v.shape
        asked.append((k.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        q = torch.empty(1, 8, 5, 16, dtype=kind, device="cuda")
        k = torch.empty(1, 2, 5, 16, dtype=kind, device="cuda")
        attend(q, k, k, None)
    assert asked == [(8, False) if kind == torch.float32 else (2, True)]
