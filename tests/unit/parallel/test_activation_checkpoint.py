import gc
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipelines.models.config import DecoderConfig
from pipelines.models.lora import LoRALinear, Size, add_adapters, chosen_sizes
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import checkpoint_activations, parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Adapter
from tests import varlen_on_cpu
from tests.settled import FP32

BLOCKS, ROWS, WIDTH, RANK = 3, 8, 16, 4
DECODER = DecoderConfig(
    layers=1, width=16, heads=2, kv_heads=1, hidden=32, vocab_size=64, context_length=ROWS
)
Mode = Literal["none", "selective", "full"]


class Mlp(nn.Module):
    """Two products with something cheap between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.silu(self.up(x)).sin()), 0.1)


def build(mode: Mode) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(BLOCKS)))
    checkpoint_activations(model, mode)
    return model


def run(mode: Mode) -> tuple[int, Tensor, list[Tensor]]:
    """Bytes that the forward pass left behind, its result, the gradients."""
    return measure(build(mode))


def measure(model: nn.Module) -> tuple[int, Tensor, list[Tensor]]:
    """Run a model forward and back once; see `run`."""
    torch.manual_seed(0)
    kept, out = forward(model, torch.randn(ROWS, WIDTH))
    out.square().sum().backward()
    grads = [each.grad for each in model.parameters() if each.requires_grad]
    return kept, out.detach(), grads


def forward(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, Tensor]:
    """Return the bytes that a forward pass left behind, and its result."""
    gc.collect()  # what other tests left would else be given back while this one counts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        out = model(x)
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sum(event.nbytes() for event in events if event.name() == "[memory]"), out


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_results_are_the_same_to_the_bit(mode: Mode) -> None:
    _, plain, plain_gradients = run("none")
    _, out, gradients = run(mode)
    assert torch.equal(out, plain)
    assert all(map(torch.equal, gradients, plain_gradients))


def test_what_is_kept() -> None:
    """Counted in bytes of the allocator."""
    kept = {mode: run(mode)[0] for mode in ("none", "selective", "full")}
    stream, hidden = ROWS * WIDTH * 4, ROWS * 4 * WIDTH * 4
    # A block's input is its neighbour's output; the last one's output is the result.
    random_state = kept["full"] - BLOCKS * stream
    assert random_state == BLOCKS * torch.get_rng_state().nbytes
    products = BLOCKS * (hidden + stream)
    assert kept["selective"] - kept["full"] == products
    # What SiLU, the sine and the second product read; the dropout's mask and the result.
    assert kept["none"] == BLOCKS * (3 * hidden + 2 * stream)


def test_an_adapters_large_product_is_not_kept_beside_that_of_the_frozen_weights() -> None:
    def adapted(mode: Mode) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        size = Size(RANK, 2.0)
        blocks = [nn.Sequential(LoRALinear(nn.Linear(WIDTH, WIDTH), size)) for _ in range(BLOCKS)]
        for block in blocks:
            nn.init.normal_(block[0].lora_b.weight)
        checkpoint_activations(blocks, mode)
        kept, _, gradients = measure(nn.Sequential(*blocks))
        return kept, gradients

    kept = {mode: adapted(mode)[0] for mode in ("selective", "full")}
    whole, thin = ROWS * WIDTH * 4, ROWS * RANK * 4
    assert kept["selective"] - kept["full"] == BLOCKS * (whole + thin)
    assert all(map(torch.equal, adapted("none")[1], adapted("selective")[1]))


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_attention_within_sequences_is_kept(mode: Mode, times: int) -> None:
    model = Transformer(DECODER)
    model.init_weights(0)
    model.most_documents = 2
    checkpoint_activations(model.layers.values(), mode)
    before = varlen_on_cpu.calls["forward"]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    model(torch.zeros(1, ROWS, dtype=torch.int64), documents).sum().backward()
    assert varlen_on_cpu.calls["forward"] - before == times


def test_the_rank_is_the_loaded_adapters_and_not_the_recipes() -> None:
    def kept(rank_of_recipe: int) -> int:
        torch.manual_seed(0)
        adapter = {"kind": "lora", "rank": rank_of_recipe}
        train = FP32 | {"activation_checkpoint": "selective"}
        recipe = Recipe.model_validate({"name": "t", "adapter": adapter, "train": train})
        model = Transformer(DECODER)
        add_adapters(model, chosen_sizes(model, Adapter(kind="lora", rank=RANK)), recipe.adapter)
        parallelize(model, build_mesh(Layout(), torch.device("cpu")), recipe)
        x = torch.randn(1, ROWS, DECODER.width, requires_grad=True)
        block = partial(model.layers["0"], rotary_2SR=model.rotary_2SR, mask=None)
        return forward(block, x)[0]

    assert kept(2 * RANK) == kept(RANK)


def test_names_stay() -> None:
    assert build("full").state_dict().keys() == build("none").state_dict().keys()
    assert [name for name, _ in build("full").named_modules()] == [
        name for name, _ in build("none").named_modules()
    ]


def test_a_mode_of_none_touches_nothing() -> None:
    assert all("forward" not in vars(block) for block in build("none"))
