from copy import deepcopy
from typing import get_args

import torch
from torch import nn

from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.parallelize import to_fp8
from pipelines.recipe.training_section import Fp8Scaling

CPU = torch.device("cpu")


def test_fp8_is_for_the_blocks_alone() -> None:
    shape = DecoderConfig(
        layers=1, width=32, heads=2, kv_heads=1, hidden=40, vocab_size=64, context_length=16
    )
    with torch.device("meta"):
        model = Transformer(shape)
        to_fp8(model, "tensorwise", CPU)
    kinds = {name: type(each).__name__ for name, each in model.named_modules()}
    assert kinds["layers.0.self_attn.q_proj"] == "Float8Linear"
    assert kinds["layers.0.mlp.up_proj"] == "Linear"  # 40 is no multiple of 16
    assert kinds["lm_head"] == "Linear"
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_row_of_large_numbers_costs_the_other_rows_no_digits_where_each_has_a_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64) * torch.logspace(-6, 0, 32).unsqueeze(1)
    exact = nn.Linear(64, 48, bias=False)
    worst = {}
    for scaling in get_args(Fp8Scaling):
        model = nn.Module()
        model.layers = nn.ModuleDict({"0": deepcopy(exact)})
        to_fp8(model, scaling, CPU)
        off = (model.layers["0"](x) - exact(x)).norm(dim=1) / exact(x).norm(dim=1)
        worst[scaling] = float(off.max().detach())
    assert worst["rowwise"] < 0.06
    assert worst["tensorwise"] > 0.5
