from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines.loading.dataloader import IGNORED
from pipelines.models import loss
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer

VOCABULARY, WIDTH, POSITIONS = 50, 8, 37


def example(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    x = torch.randn(POSITIONS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,))
    targets[3:9] = IGNORED
    targets[20:] = IGNORED  # whole chunks
    return head, x, targets


def plain(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    logits = head(x)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def chunked(rows: int) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    def compute(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss, "CHUNK", rows * VOCABULARY)
            return loss.next_token_loss(head, loss.CrossEntropy(), x, targets, VOCABULARY)

    return compute


def gradients(loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> list[Tensor]:
    head, x, targets = example()
    nats = loss_of(head, x, targets)
    (nats * 0.3).backward()
    return [nats.detach(), *(each.grad for each in (x, head.weight, head.bias))]


@pytest.mark.parametrize("tokens", [1, 7, VOCABULARY])  # of a slice of the weight's gradient
@pytest.mark.parametrize("rows", [1, 5, 36, 37, 1000])
def test_chunks_change_nothing_but_the_order_of_sums(
    rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "SLICE", tokens * WIDTH)
    for found, expected in zip(gradients(chunked(rows)), gradients(plain), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_without_gradients_there_is_the_loss_alone() -> None:
    head, x, targets = example()
    with torch.no_grad():
        nats = chunked(5)(head, x, targets)
    torch.testing.assert_close(nats, plain(head, x, targets).detach())


def test_a_frozen_head_passes_the_gradient_on() -> None:
    head, x, targets = example()
    head.requires_grad_(False)
    chunked(5)(head, x, targets).backward()
    (expected,) = torch.autograd.grad(plain(head, x, targets), x)
    torch.testing.assert_close(x.grad, expected)
    assert head.weight.grad is None


def test_a_chunk_is_all_of_the_logits_that_there_is() -> None:
    head, x, targets = example()
    rows = []
    head.register_forward_hook(lambda _head, _inputs, logits: rows.append(len(logits)))
    chunked(5)(head, x, targets)
    assert max(rows) == 5
    assert sum(rows) == POSITIONS


def test_no_chunk_makes_a_tensor_of_the_weights_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "SLICE", 7 * WIDTH)
    head, x, targets = example()
    of_its_size = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
            found = operation(*arguments, **(named or {}))
            if isinstance(found, Tensor) and sorted(found.shape) == [WIDTH, VOCABULARY]:
                storage = found.untyped_storage().data_ptr()
                if storage != head.weight.untyped_storage().data_ptr():
                    of_its_size.append(operation)
            return found

    with Watch():
        chunked(5)(head, x, targets)
    assert len(of_its_size) == 1, of_its_size  # the sum


def test_half_precision_sums_in_single() -> None:
    """A loss of thousands of positions is more than bf16 or fp16 can add up."""
    head, x, targets = example(torch.bfloat16)
    x, targets = x.detach().repeat(100, 1).requires_grad_(), targets.repeat(100)
    nats = chunked(37)(head, x, targets)
    assert nats.dtype == torch.float32
    nats.backward()
    expected = example(torch.float64)[0]
    expected.load_state_dict(head.state_dict())
    plain(expected, x.detach().double(), targets).backward()
    assert head.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        head.weight.grad.double(),
        expected.weight.grad,
        rtol=0.02,
        atol=expected.weight.grad.abs().max().item() * 0.01,
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_learns_the_same_in_chunks(
    tied: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecoderConfig(2, 32, 4, 2, 48, VOCABULARY, 16, tie_embeddings=tied)
    tokens = torch.randint(0, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(0))
    results = []
    for chunk in (1 << 27, 7 * VOCABULARY):
        monkeypatch.setattr(loss, "CHUNK", chunk)
        model = Transformer(config)
        model.init_weights(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            nats = model(tokens[:, :-1], targets_BS=tokens[:, 1:])
        nats.backward()
        results.append([nats.detach(), *(each.grad for each in model.parameters())])
    tolerance = 0.05 if autocast else 1e-5
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance * one.abs().max().item(), rtol=0)


def test_chunks_and_slices_are_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a product of odd size, or of a slice that begins there, takes a slow kernel."""
    monkeypatch.setattr(loss, "CHUNK", 131 * 1000)
    monkeypatch.setattr(loss, "SLICE", 333 * WIDTH)
    head = nn.Linear(WIDTH, 1000, bias=False)
    x, targets = torch.randn(300, WIDTH, requires_grad=True), torch.randint(0, 1000, (300,))
    shapes = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                shapes.append((*args[0].shape, args[1].shape[1]))
            return func(*args, **(kwargs or {}))

    with Products():
        loss.next_token_loss(head, loss.CrossEntropy(), x, targets, 1000)
    assert {(rows, columns) for rows, _, columns in shapes if columns == 1000} == {
        (128, 1000),
        (44, 1000),
    }
    assert {rows for rows, inner, _ in shapes if inner == 128} == {320, 40}
