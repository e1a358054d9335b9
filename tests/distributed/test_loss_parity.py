"""Under every layout a model learns what it learns in one process."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from pipelines.models.config import Yarn
from pipelines.models.families import flags
from pipelines.run.records import Split
from tests.distributed.pool import Pool
from tests.distributed.training import Case, losses, small

_HALVES, _PAIRS = {"micro_batch_size": 4}, {"micro_batch_size": 2}
_GPT2 = {**flags("gpt2"), "kv_heads": 4}
_WINDOW = {"sliding_window": 5}
# More experts than 8 processes can have equally many of.
_EXPERTS = flags("mixtral") | {"experts": 6, "experts_per_token": 2}
_GEMMA3 = {**flags("gemma3_text"), "kv_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 12}
# So that stages differ in their layers' kinds.
_GEMMA3 |= {**_WINDOW, "layers": 4, "full_attention_every": 3}
_GPT_OSS = {**flags("gpt_oss"), "kv_heads": 2, **_WINDOW, "experts": 6, "experts_per_token": 2}
_GPT_OSS |= {"rope_scaling": Yarn(4.0, 8, truncate=False)}
_DEEPSEEK = flags("deepseek_v3") | {"experts": 6, "experts_per_token": 2, "kv_heads": 4}
_DEEPSEEK |= {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
_DEEPSEEK |= {"v_head_dim": 9, "n_group": 3, "topk_group": 2}
_DEEPSEEK |= {"rope_scaling": Yarn(4.0, 8, mscale=1.0, mscale_all_dim=1.0)}
_DEEPSEEK |= {"first_k_dense_replace": 1, "dense_hidden": 48}
# At its usual rate the loss falls so steeply that roundings in fp32 grow beyond the tolerance.
_SLOW = {"lr": 3e-3}
_SLOWLY = _HALVES | _SLOW
FULL = {"sharding": "full"}
_TWICE = {"global_batch_size": 16, "micro_batch_size": 2}
# Of two processes by `make test`, the others by `make test-parity`.
CASES = [
    Case("ddp", 2, {}),
    Case("ddp-accumulation", 2, {}, {"global_batch_size": 16, "micro_batch_size": 2}),
    Case("zero-1", 2, {"sharding": "optimizer"}),
    Case("zero-2", 2, {"sharding": "gradients"}),
    Case("zero-3", 2, {"sharding": "full"}),
    Case("zero-3-untied", 2, {"sharding": "full"}, model={"tie_embeddings": False}),
    Case("zero-3-offload", 2, {"sharding": "full", "cpu_offload": True}),
    Case("zero-3-paged", 2, {"sharding": "full", "paged_moments": True}, slow=True),
    Case("zero-1-paged", 2, {"sharding": "optimizer", "paged_moments": True}, slow=True),
    Case("tp-paged", 2, {"tp": 2, "paged_moments": True}, _HALVES, slow=True),
    Case("ddp-4", 4, {}),
    Case("zero-1-4", 4, {"sharding": "optimizer"}),
    Case("zero-2-4", 4, {"sharding": "gradients"}),
    Case("zero-3-4", 4, {"sharding": "full"}),
    Case("hsdp", 4, {"sharding": "full", "dp_replicate": 2, "dp_shard": 2}),
    Case("hybrid-zero-1", 4, {"sharding": "optimizer", "dp_replicate": 2, "dp_shard": 2}),
    Case("hybrid-zero-2", 4, {"sharding": "gradients", "dp_replicate": 2, "dp_shard": 2}),
    Case("ddp-uneven", 4, {}, {"global_batch_size": 6}),
    Case("zero-3-uneven", 4, {"sharding": "full"}, {"global_batch_size": 6}),
    Case("zero-3-8", 8, {"sharding": "full"}),
    Case("tp", 2, {"tp": 2, "sequence_parallel": False}, _HALVES, slow=True),
    Case("tp-sp", 2, {"tp": 2}, _HALVES),
    Case("gpipe", 2, {"pp": 2, "schedule": "gpipe"}, slow=True),
    Case("1f1b", 2, {"pp": 2, "schedule": "1f1b"}, _PAIRS),
    Case("interleaved-1f1b", 2, {"pp": 2, "schedule": "interleaved_1f1b"}, slow=True),
    Case("zero-bubble", 2, {"pp": 2, "schedule": "zero_bubble"}, slow=True),
    Case(
        "zero-bubble-checkpointed",
        2,
        {"pp": 2, "schedule": "zero_bubble"},
        only_here={"activation_checkpoint": "full"},
        slow=True,
    ),
    Case("pp-untied", 2, {"pp": 2}, model={"tie_embeddings": False}, slow=True),
    Case("pp-4", 4, {"pp": 4}, _PAIRS),
    Case("tp-fsdp", 4, {"tp": 2, "sharding": "full"}, _HALVES),
    Case(
        "tp-fsdp-odd-vocabulary",
        4,
        {"tp": 2, "sharding": "full"},
        _HALVES,
        model={"vocab_size": 67},
    ),
    Case("tp-replicas", 4, {"tp": 2, "sequence_parallel": False}, _HALVES),
    Case("pp-fsdp", 4, {"pp": 2, "sharding": "full"}, _PAIRS),
    Case("pp-fsdp-gpipe", 4, {"pp": 2, "sharding": "gradients", "schedule": "gpipe"}, _PAIRS),
    Case("pp-fsdp-zero-bubble", 4, {"pp": 2, "sharding": "full", "schedule": "zero_bubble"}),
    Case("pp-replicas-uneven", 4, {"pp": 2}, {"global_batch_size": 6, "micro_batch_size": 2}),
    Case("pp-tp", 4, {"pp": 2, "tp": 2}, _PAIRS),
    Case("pp-tp-fsdp", 8, {"pp": 2, "tp": 2, "sharding": "full"}, _PAIRS),
    Case(
        "pp-tp-fsdp-interleaved",
        8,
        {"pp": 2, "tp": 2, "sharding": "gradients", "schedule": "interleaved_1f1b"},
        _PAIRS,
    ),
    Case("cp", 2, {"cp": 2}, _HALVES),
    Case("cp-gpt2", 2, {"cp": 2}, _HALVES, model=_GPT2, documents=True, slow=True),
    Case("cp-window", 2, {"cp": 2}, _HALVES, model=_WINDOW, documents=True, slow=True),
    Case("cp-gemma3", 2, {"cp": 2}, _SLOWLY, model=_GEMMA3, documents=True, slow=True),
    Case("pp-gemma3", 2, {"pp": 2}, _PAIRS, model=_GEMMA3, documents=True),
    Case(
        "cp-tp-fsdp-gemma3",
        8,
        {"cp": 2, "tp": 2, "sharding": "full"},
        _SLOWLY,
        model=_GEMMA3,
        documents=True,
    ),
    Case("cp-zero-1", 2, {"cp": 2, "sharding": "optimizer"}, _HALVES, slow=True),
    Case("cp-zero-3", 2, {"cp": 2, "sharding": "full"}, _HALVES, documents=True, slow=True),
    # Two key-value heads: each is in two of four processes.
    Case("cp-4", 4, {"cp": 4}, _HALVES, documents=True),
    Case("cp-ddp-uneven", 4, {"cp": 2}, {"global_batch_size": 5}),
    Case("cp-zero-2-4", 4, {"cp": 2, "sharding": "gradients"}, _PAIRS),
    Case("cp-hsdp-4", 4, {"cp": 2, "sharding": "full", "dp_replicate": 2}, _PAIRS),
    Case("cp-tp", 4, {"cp": 2, "tp": 2}, _HALVES, documents=True),
    Case("cp-tp-zero-3", 4, {"cp": 2, "tp": 2, "sharding": "full"}, _HALVES),
    Case("cp-pp", 4, {"cp": 2, "pp": 2}, _PAIRS, documents=True),
    Case("cp-hsdp", 8, {"cp": 2, "sharding": "full", "dp_replicate": 2, "dp_shard": 2}, _PAIRS),
    Case("cp-tp-fsdp", 8, {"cp": 2, "tp": 2, "sharding": "full"}, _HALVES),
    Case("experts-ddp", 2, {}, {"global_batch_size": 16, "micro_batch_size": 2}, model=_EXPERTS),
    Case("experts-zero-1", 2, {"sharding": "optimizer"}, model=_EXPERTS, slow=True),
    Case("experts-zero-2", 2, {"sharding": "gradients"}, model=_EXPERTS, slow=True),
    Case("experts-zero-3", 2, {"sharding": "full"}, model=_EXPERTS),
    Case("experts-tp", 2, {"tp": 2}, _HALVES, model=_EXPERTS),
    Case("experts-1f1b", 2, {"pp": 2}, _PAIRS, model=_EXPERTS, slow=True),
    Case("experts-cp", 2, {"cp": 2}, _HALVES, model=_EXPERTS, documents=True, slow=True),
    Case("ep", 2, FULL | {"ep": 2}, model=_EXPERTS),
    Case("ep-zero-2", 2, {"sharding": "gradients", "ep": 2}, _TWICE, model=_EXPERTS, slow=True),
    Case("ep-fsdp", 4, FULL | {"ep": 2}, model=_EXPERTS),
    Case("ep-hsdp", 4, FULL | {"ep": 2, "dp_replicate": 2}, model=_EXPERTS),
    Case("ep-cp", 4, FULL | {"cp": 2, "ep": 2}, model=_EXPERTS, documents=True),
    Case("ep-tp", 4, FULL | {"tp": 2, "ep": 2}, _HALVES, model=_EXPERTS),
    Case("ep-pp", 4, FULL | {"pp": 2, "ep": 2}, _PAIRS, model=_EXPERTS),
    Case("ep-tp-fsdp", 8, FULL | {"tp": 2, "ep": 2}, _PAIRS, model=_EXPERTS),
    Case("experts-hsdp", 4, {"sharding": "full", "dp_replicate": 2, "dp_shard": 2}, model=_EXPERTS),
    Case("experts-tp-fsdp", 4, {"tp": 2, "sharding": "full"}, _HALVES, model=_EXPERTS),
    Case("experts-zero-bubble", 2, {"pp": 2, "schedule": "zero_bubble"}, model=_EXPERTS, slow=True),
    Case("experts-zero-3-8", 8, {"sharding": "full"}, model=_EXPERTS),
    Case("experts-cp-pp-tp", 8, {"cp": 2, "pp": 2, "tp": 2}, _PAIRS, model=_EXPERTS),
    Case("gpt-oss-ddp", 2, {}, _TWICE | _SLOW, model=_GPT_OSS, slow=True),
    Case("gpt-oss-zero-3", 2, FULL, _SLOW, model=_GPT_OSS, documents=True),
    Case("gpt-oss-tp", 2, {"tp": 2}, _SLOWLY, model=_GPT_OSS),
    Case("gpt-oss-ep", 2, FULL | {"ep": 2}, _SLOW, model=_GPT_OSS),
    Case("gpt-oss-pp", 2, {"pp": 2}, _PAIRS | _SLOW, model=_GPT_OSS, slow=True),
    Case("gpt-oss-cp", 2, {"cp": 2}, _SLOWLY, model=_GPT_OSS, documents=True),
    Case(
        "gpt-oss-zero-bubble",
        2,
        {"pp": 2, "schedule": "zero_bubble"},
        _SLOW,
        model=_GPT_OSS,
        slow=True,
    ),
    Case("gpt-oss-tp-fsdp", 4, FULL | {"tp": 2}, _SLOWLY, model=_GPT_OSS),
    Case("gpt-oss-ep-fsdp", 4, FULL | {"ep": 2}, _SLOW, model=_GPT_OSS),
    Case("gpt-oss-ep-tp", 4, FULL | {"tp": 2, "ep": 2}, _SLOWLY, model=_GPT_OSS),
    Case("gpt-oss-cp-tp", 4, {"cp": 2, "tp": 2}, _SLOWLY, model=_GPT_OSS, documents=True),
    Case("gpt-oss-ep-tp-fsdp", 8, FULL | {"tp": 2, "ep": 2}, _PAIRS | _SLOW, model=_GPT_OSS),
    Case("deepseek-ddp", 2, {}, _TWICE | _SLOW, model=_DEEPSEEK, slow=True),
    Case("deepseek-zero-1", 2, {"sharding": "optimizer"}, _SLOW, model=_DEEPSEEK, slow=True),
    Case("deepseek-zero-3", 2, FULL, _SLOW, model=_DEEPSEEK),
    Case("deepseek-tp", 2, {"tp": 2}, _SLOWLY, model=_DEEPSEEK),
    Case("deepseek-tp-whole", 2, {"tp": 2, "sequence_parallel": False}, _SLOWLY, model=_DEEPSEEK),
    Case("deepseek-1f1b", 2, {"pp": 2}, _PAIRS | _SLOW, model=_DEEPSEEK, slow=True),
    Case("deepseek-cp", 2, {"cp": 2}, _SLOWLY, model=_DEEPSEEK, documents=True),
    Case("deepseek-ep", 2, FULL | {"ep": 2}, _SLOW, model=_DEEPSEEK),
    Case("deepseek-ep-tp", 4, FULL | {"tp": 2, "ep": 2}, _SLOWLY, model=_DEEPSEEK),
    Case("deepseek-ep-pp", 4, FULL | {"pp": 2, "ep": 2}, _PAIRS | _SLOW, model=_DEEPSEEK),
    Case("deepseek-cp-pp-tp", 8, {"cp": 2, "pp": 2, "tp": 2}, _PAIRS | _SLOW, model=_DEEPSEEK),
    Case("cp-pp-tp", 8, {"cp": 2, "pp": 2, "tp": 2}, _PAIRS),
]
CASES = sorted(map(small, CASES), key=lambda case: case.world)  # new processes once for each
PLAIN = {"fp64": (torch.float64, 1e-10), "fp32": (torch.float32, 1e-5)}
# One of each kind of layout and model: that in the precision of a run roundings stay small, too.
# What rounds to fp32 on its way is already seen in fp64.
IN_FP32 = (
    *("ddp-4", "zero-1-4", "zero-2-4", "hsdp", "tp-fsdp", "interleaved-1f1b", "pp-4"),
    *("pp-fsdp-zero-bubble", "cp-4", "cp-tp-fsdp-gemma3", "cp-pp-tp"),
    *("ep-tp", "gpt-oss-ep-tp", "deepseek-ep-pp"),
)


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """What needs more than two processes is part of the proof only."""
    return [pytest.mark.parity] if case.world > 2 or case.slow else []


def marked(cases: list[Case]) -> list[object]:
    """As parameters of a test."""
    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]


@pytest.fixture(scope="module")
def alone(data: tuple[Path, Split], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """What one process does in a case."""

    @cache
    def of(
        train: tuple, model: tuple, documents: bool, dtype: torch.dtype
    ) -> list[tuple[float, float]]:
        case = Case("alone", 1, {}, dict(train), model=dict(model), documents=documents)
        return losses(case, data, tmp_path_factory.mktemp("alone"), dtype)

    return lambda case, dtype: of(
        tuple(case.train.items()), tuple(case.model.items()), case.documents, dtype
    )


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param(case, precision, id=f"{case.name}-{precision}", marks=marks(case))
        for case in CASES
        for precision in (("fp64", "fp32") if case.name in IN_FP32 else ("fp64",))
    ],
)
def test_the_losses_are_those_of_one_process(
    case: Case,
    precision: str,
    data: tuple[Path, Split],
    alone: Callable,
    pool: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    dtype, tolerance = PLAIN[precision]
    expected = alone(case, dtype)
    for found in pool(case.world).run(losses, case, data, tmp_path, dtype):
        assert found == [pytest.approx(point, rel=tolerance) for point in expected]
    assert expected[-1][0] < expected[0][0] - 0.3  # there was something to learn
