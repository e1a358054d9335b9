"""vLLM computes the export in 8 bits as well as transformers does.

Both round to bfloat16, each in its own order, so of two tokens that are about equally likely they
may choose different ones. What is compared is the log-probability of given tokens: how far each
server is from the same stored numbers summed in fp32. On an EPYC of the first generation vLLM was
0.92 to 1.12 times as far as transformers, family by family, and at least 2.8 times as far where
every second scale of any one layer was doubled. Of its greedy answers no token was more than 0.17
nats less likely than the best one.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipelines.export.quantized import export_quantized
from tests.serving.models import CONTEXT, PROMPTS, SHAPES, TALK, TOKENS, write_registered
from tests.serving.servers import asked_of_vllm, environment, told_by_vllm

pytestmark = pytest.mark.serving
# transformers' GPT-2 has no linear layers, so it has no export in 8 bits.
QUANTISED = [shape for shape in SHAPES if shape != "gpt2"]
IN_PARTS = "llama3"  # its weights are in two files
DAMAGED = "llama2"  # vLLM also computes it with this layer damaged
LAYER = "model.layers.1.mlp.down_proj"
MOST = 1.5  # times transformers' own distance
NEAR = 0.3  # nats that a chosen token may be less likely than the best one
IDS = torch.randint(1, 320, (4, CONTEXT - 1), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    environment("vllm")  # before models are written in vain
    folder = tmp_path_factory.mktemp("exports")
    made = {}
    for shape in QUANTISED:
        source = write_registered(shape, "chat", folder / "registered").folder
        if shape == IN_PARTS:
            split(source)
        made[shape] = folder / shape
        made[shape].mkdir()
        export_quantized(source, made[shape], bits=8)
    return made


def split(folder: Path) -> None:
    """Divide the weights into two files."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    files = {}
    for number in range(2):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        names = sorted(tensors)[number::2]
        save_file({each: tensors[each] for each in names}, folder / name, {"format": "pt"})
        files |= dict.fromkeys(names, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def answered(exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answers(exports, f"{LAYER}._weight_scale", tmp_path_factory.mktemp("vllm"))


def answers(exports: dict[str, Path], scales: str, folder: Path) -> Path:
    """Ask vLLM each export, and one of which every second row of `scales` is doubled."""
    damaged = folder / "damaged"
    shutil.copytree(exports[DAMAGED], damaged)
    damage(damaged / "model.safetensors", scales)
    common = {"prompts": PROMPTS, "talk": TALK, "tokens": TOKENS, "scored": IDS.tolist()}
    common |= {"dtype": "auto", "adapter": None}
    folders = exports | {"damaged": damaged}
    jobs = [common | {"name": name, "folder": str(each)} for name, each in folders.items()]
    return asked_of_vllm(jobs, folder)


def damage(path: Path, scales: str) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors[scales][::2] *= 2
    save_file(tensors, path, metadata)


class Transformers:
    """What transformers computes from an export: as it serves it, and with fp32's sums."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self.served = self.scores()
        self.layers: dict[str, nn.Linear] = {}
        for name, module in self._model.named_modules():
            if type(module) is nn.Linear and type(module.weight).__name__ == "Int8Tensor":
                decoded = module.weight.dequantize().float()
                module.weight = nn.Parameter(decoded, requires_grad=False)
                self.layers[name] = module
        nn.Module.float(self._model)  # its own method refuses, not knowing that it is decoded
        self.exact = self.scores()

    def scores(self) -> Tensor:
        """Each token's log-probability given those before it."""
        likely = self.log_probabilities(IDS)[:, :-1]
        return likely.gather(-1, IDS[:, 1:, None]).squeeze(-1)

    @torch.no_grad()
    def log_probabilities(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._model(ids).logits
        return logits.float().log_softmax(-1)

    @contextmanager
    def damaged(self, layer: nn.Linear) -> Iterator[None]:
        with torch.no_grad():
            layer.weight[::2] *= 2
            yield
            layer.weight[::2] /= 2


@cache
def by_transformers(folder: Path) -> Transformers:
    return Transformers(folder)


def distance(scores: Tensor, others: Tensor) -> float:
    return (scores - others).square().mean().sqrt().item()


def by_vllm(answered: Path, name: str) -> Tensor:
    return torch.tensor(told_by_vllm(answered, f"{name}-scores"))


def gap(ours: Transformers, told: Any) -> float:
    """How many nats an answer's token is less likely than the best one, at most."""
    gaps = []
    for ids, answer in told:
        likely = ours.log_probabilities(torch.tensor([ids + answer]))[0, len(ids) - 1 : -1]
        chosen = likely.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
        gaps.append((likely.amax(-1) - chosen).max().item())
    return max(gaps)


@pytest.mark.parametrize("shape", QUANTISED)
def test_log_probabilities(shape: str, exports: dict[str, Path], answered: Path) -> None:
    ours = by_transformers(exports[shape])
    found = distance(by_vllm(answered, shape), ours.exact) / distance(ours.served, ours.exact)
    assert found < MOST


@pytest.mark.parametrize("shape", QUANTISED)
def test_a_damaged_layer_would_be_found(
    shape: str, exports: dict[str, Path], answered: Path
) -> None:
    ours = by_transformers(exports[shape])
    rounding = distance(ours.served, ours.exact)
    assert len(ours.layers) >= 8
    for name, layer in ours.layers.items():
        with ours.damaged(layer):
            found = distance(by_vllm(answered, shape), ours.scores()) / rounding
        assert found > MOST, name


def test_a_damaged_file_is_found(exports: dict[str, Path], answered: Path) -> None:
    ours = by_transformers(exports[DAMAGED])
    scores = by_vllm(answered, "damaged")
    rounding = distance(ours.served, ours.exact)
    assert distance(scores, ours.exact) > MOST * rounding
    assert gap(ours, told_by_vllm(answered, "damaged")) > NEAR
    with ours.damaged(ours.layers[LAYER]):  # vLLM computed just this damage, and nothing else
        assert distance(scores, ours.scores()) < MOST * rounding


@pytest.mark.parametrize("shape", QUANTISED)
def test_greedy_answers(shape: str, exports: dict[str, Path], answered: Path) -> None:
    ours = by_transformers(exports[shape])
    told = told_by_vllm(answered, shape)
    rendered = ours.tokenizer.apply_chat_template(TALK, add_generation_prompt=True)
    asked = [*ours.tokenizer(PROMPTS).input_ids, rendered.input_ids]
    assert [ids for ids, _ in told] == asked
    assert gap(ours, told) < NEAR
