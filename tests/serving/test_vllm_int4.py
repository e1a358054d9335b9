"""vLLM computes the export `vllm-int4` as well as transformers does.

Compared as the export in 8 bits is. On an EPYC with AVX-512 vLLM was 0.87 to 0.98 times as far from
the exact numbers as transformers, family by family. Of its greedy answers no token was more than
0.10 nats less likely than the best one.
"""

from pathlib import Path

import pytest
import torch

from pipelines.export.compressed import export_compressed
from tests.serving.models import write_registered
from tests.serving.servers import environment, told_by_vllm
from tests.serving.test_vllm_quantised import (
    DAMAGED,
    LAYER,
    MOST,
    NEAR,
    QUANTISED,
    answers,
    by_transformers,
    by_vllm,
    distance,
    gap,
)

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(
        not torch.cpu.get_capabilities().get("avx512_f", False),
        reason="vLLM computes in 4 bits on processors with AVX-512 only",
    ),
]
GROUP = 32  # divides the rows of each small model


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    environment("vllm")  # before models are written in vain
    folder = tmp_path_factory.mktemp("exports")
    made = {}
    for shape in QUANTISED:
        made[shape] = folder / shape
        made[shape].mkdir()
        source = write_registered(shape, "chat", folder / "registered").folder
        export_compressed(source, made[shape], GROUP)
    return made


@pytest.fixture(scope="module")
def answered(exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answers(exports, f"{LAYER}.weight_scale", tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("shape", QUANTISED)
def test_vllm_is_as_near_as_transformers(
    shape: str, exports: dict[str, Path], answered: Path
) -> None:
    ours = by_transformers(exports[shape])
    found = distance(by_vllm(answered, shape), ours.exact) / distance(ours.served, ours.exact)
    assert found < MOST
    assert gap(ours, told_by_vllm(answered, shape)) < NEAR


def test_a_damaged_file_is_found(exports: dict[str, Path], answered: Path) -> None:
    ours = by_transformers(exports[DAMAGED])
    damaged = distance(by_vllm(answered, "damaged"), ours.exact)
    assert damaged > MOST * distance(ours.served, ours.exact)
