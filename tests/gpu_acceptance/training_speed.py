"""How fast the engine trains on one GPU, beside Hugging Face's Trainer and the planner.

A run is short: its first window of steps, in which it compiles, does not count.
"""

import gzip
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipelines.models.config import DecoderConfig
from pipelines.planning.hardware import Hardware
from pipelines.planning.hardware_table import named, of_driver
from pipelines.planning.plan import Machine, plan
from pipelines.recipe.recipe import Recipe
from pipelines.training.metrics import StepMetrics, most_bound_by
from pipelines.training.precision import _FP8_CAPABILITY
from tests.benchmarks import gpu_lora, gpu_train
from tests.benchmarks.contenders.our_trainer import build_trainer, free
from tests.benchmarks.gpu_train import case, shape_of
from tests.benchmarks.loader import write_split
from tests.gpu_acceptance.acceptance_parts import Outcome, Place
from tests.gpu_acceptance.step_trace import ON_DEVICE, overlap

GPT2 = gpu_train.BENCHMARK.cases["gpt2-124m"]
LLAMA = gpu_train.BENCHMARK.cases["llama-1b"]
LLAMA_8B = gpu_lora.BENCHMARK.cases["8b"]
# On 80 GB nothing of it need be computed again.
LLAMA_8B_KEPT = LLAMA_8B | {"train": LLAMA_8B["train"] | {"activation_checkpoint": "none"}}
# Four layers of Llama 3 8B's, whose head, which stays in bf16, is small.
WIDE = case(shape_of("llama3-8b", 4096, layers=4, vocab_size=32_000), 2, 4)
TINY = {
    "layers": 2,
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 128,
    "vocab_size": 512,
    "context_length": 64,
}
_TINY_TRAIN = {"precision": "fp32", "micro_batch_size": 2, "global_batch_size": 4}
_WINDOWS = 3  # of steps in a run; the first, in which it compiles, does not count
_SAME = 1e-2  # of products in bf16, whose sums are made in another order
_MFU, _LORA_RATE, _MEMORY, _SPEED, _OVER_HF, _FP8 = 0.5, 12_473, 0.55, 0.8, 1.15, 1.15


def sized(place: Place, case: dict[str, Any], steps: int, **train: Any) -> dict[str, Any]:
    """A benchmark's case with so many steps; tiny and not compiled if fake."""
    window = {"steps": steps, "log_every": steps // _WINDOWS, "compile": not place.fake}
    values = case["train"] | train | window
    if place.fake:
        return {"shape": TINY, "train": values | _TINY_TRAIN}
    return {"shape": case["shape"], "train": values}


@dataclass(frozen=True)
class Trained:
    """What a run reported.

    Attributes:
        points: What the trainer did.
        peak_bytes: At most held by the run, beside what the process held before it.
        seconds: What the time went to.
    """

    points: list[StepMetrics]
    peak_bytes: int
    seconds: dict[str, float]


def run(place: Place, work: dict[str, Any], adapter: dict[str, Any]) -> Trained:
    """Train.

    A run that is not its process's first may find memory held: torch 2.11 does not let go of the
    compiled blocks of a model that is gone.
    """
    device = torch.device(place.device)
    held, began = 0 if place.fake else torch.cuda.memory_allocated(), time.perf_counter()
    shape, train = DecoderConfig(**work["shape"]), work["train"]
    tokens = (train["steps"] + 1) * train["global_batch_size"] * (shape.context_length + 1)
    split = write_split(place.folder, tokens, min(shape.vocab_size, 30_000))
    sections = {"train": train, "adapter": adapter}
    built = build_trainer(place.folder, split, shape, sections, device)
    if not place.fake:
        torch.cuda.reset_peak_memory_stats()  # what filling the weights took is no step's memory
    ready = time.perf_counter()
    built.trainer.fit()
    points = built.points
    del built
    free(device)
    further = sum(point.step_seconds for point in points[1:]) * train["log_every"]
    seconds = {
        "until the model is ready": ready - began,
        "first window of steps, and end": time.perf_counter() - ready - further,
        "further windows": further,
    }
    return Trained(points, points[-1].memory_bytes - held, seconds)


def measured(place: Place, work: dict[str, Any], **adapter: Any) -> dict[str, Any]:
    """The medians of the warm windows, and what the planner predicts."""
    trained = run(place, work, adapter)
    points = trained.points[1:_WINDOWS]
    card = None if place.fake else of_driver(torch.cuda.get_device_name())
    hardware = card or named("h100")
    keys = ("tokens_per_second", "mfu", "mbu", "bound_share", "step_seconds")
    middle = {key: statistics.median(getattr(point, key) for point in points) for key in keys}
    return middle | {
        "peak_bytes": trained.peak_bytes,
        "seconds": trained.seconds,
        "bound_by": most_bound_by(points),
        "planned": planned(hardware, work, adapter),
        "loss": points[-1].loss,
    }


def planned(hardware: Hardware, work: dict[str, Any], adapter: dict[str, Any]) -> dict[str, float]:
    """What the planner predicts of a case on one device; nothing if it would not fit."""
    shape = DecoderConfig(**work["shape"])
    values = {"data": {"sequence_length": shape.context_length}, "adapter": adapter}
    recipe = Recipe.model_validate({"name": "planned", "train": work["train"], **values})
    if adapter:
        model = recipe.model.model_copy(update={"init_from": "models/base"})
        recipe = recipe.model_copy(update={"model": model})
    found = plan(recipe, shape, Machine(hardware, 1)).forecast
    return {"tokens_per_second": found.tokens_per_second, "mfu": found.mfu} if found else {}


def _limits(found: dict[str, Any]) -> str:
    planned = found["planned"].get("tokens_per_second", 0.0)
    share = f"{found['bound_by']} at {found['bound_share']:.0%}"
    return f"{share}; {found['tokens_per_second']:,.0f} tokens/s, planned {planned:,.0f}"


def gpt2(place: Place) -> Outcome:
    """GPT-2 124M beside what the planner says."""
    found = measured(place, sized(place, GPT2, 30))
    rate, planned = found["tokens_per_second"], found["planned"]["tokens_per_second"]
    return Outcome(rate, "tokens/s", rate / planned, rate >= planned, _limits(found), found)


def llama(place: Place) -> Outcome:
    """A Llama of 1B: its MFU, and beside it a trace of three steps after those that count."""
    work, window = sized(place, LLAMA, 15), 5
    last = work["train"]["steps"] + window
    work["train"] |= {"steps": last, "profile_steps": (last - 4, last - 1)}
    found = measured(place, work)
    (path,) = place.folder.rglob("rank-0.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found["trace"] = asdict(overlap(events, ("cpu_op",) if place.fake else ON_DEVICE))
    mfu = found["mfu"]
    return Outcome(mfu, "MFU", mfu / _MFU, mfu >= _MFU, _limits(found), found)


def trace(place: Place) -> Outcome:
    """How much of three traced steps of 1B Llama the device works."""
    return Outcome(**place.result_of("llama-1b")["detail"]["trace"])


def gpt2_beside_hf(place: Place) -> Outcome:
    """Hugging Face's Trainer on GPT-2 124M."""
    return _beside_hf(place, "gpt2", sized(place, GPT2, 12))


def llama_beside_hf(place: Place) -> Outcome:
    """Hugging Face's Trainer on a Llama of 1B."""
    return _beside_hf(place, "llama-1b", sized(place, LLAMA, 6))


def _beside_hf(place: Place, ours: str, work: dict[str, Any]) -> Outcome:
    """It is eager, as it comes: so its first step takes no longer than the others."""
    from tests.benchmarks.contenders import train_huggingface  # takes seconds

    rate = place.result_of(ours)["detail"]["tokens_per_second"]
    length, train = work["shape"]["context_length"], work["train"]
    tokens = (train["steps"] + 1) * train["global_batch_size"] * length
    write_split(place.folder, tokens, min(work["shape"]["vocab_size"], 30_000))
    options = {"device": place.device.partition(":")[0], "threads": 1}
    options |= work | {"compile": False}
    _, figures = train_huggingface.prepare(place.folder, options)()
    theirs = figures["warm_rate"]
    limits = f"ours {rate:,.0f} tokens/s; theirs takes {figures['peak_gib']:.1f} GiB"
    ratio = rate / theirs
    return Outcome(theirs, "tokens/s of HF", ratio, ratio >= _OVER_HF, limits, figures)


def lora(place: Place) -> Outcome:
    """LoRA on the shape of Llama 3 8B, as fast as its memory allows."""
    found = measured(place, sized(place, LLAMA_8B_KEPT, 6), **gpu_lora.LORA)
    rate = found["tokens_per_second"]
    ratio = rate / _LORA_RATE
    return Outcome(rate, "tokens/s", ratio, ratio >= 1, _limits(found), found)


def qlora(place: Place) -> Outcome:
    """QLoRA's memory and speed over LoRA's, both with all blocks computed again."""
    work = sized(place, LLAMA_8B, 6)
    found = measured(place, work, **gpu_lora.LORA | {"kind": "qlora"})
    beside = measured(place, work, **gpu_lora.LORA)
    memory = found["peak_bytes"] / beside["peak_bytes"]
    speed = found["tokens_per_second"] / beside["tokens_per_second"]
    reached = memory <= _MEMORY and speed >= _SPEED
    limits = f"{speed:.2f} of LoRA's speed; {_limits(found)}"
    detail = found | {"speed": speed, "lora": beside}
    return Outcome(memory, "of LoRA's memory", speed, reached, limits, detail)


def fp8(place: Place) -> Outcome:
    """fp8 over bf16, and mxfp8 where the GPU has it; a CPU has no fp8: the fake has bf16 over fp32.

    Raises:
        ValueError: products in mxfp8 differ from those that only round so.
    """
    kinds = {"bf16": {"precision": "bf16"}, "fp8": {"precision": "fp8"}}
    needed, line = _FP8_CAPABILITY["mx"], "mxfp8: left out, needs compute capability 10.0"
    has_mx = place.fake or torch.cuda.get_device_capability() >= needed
    if has_mx:
        _check_mx(place)
        kinds["mxfp8"] = kinds["fp8"] | {"fp8_scaling": "mx"}
    found = {}
    for kind, train in kinds.items():
        work = sized(place, WIDE, 12, **train)
        if place.fake and kind != "bf16":
            work["train"]["precision"] = "bf16"
        found[kind] = measured(place, work)
    rate, slower = (found[kind]["tokens_per_second"] for kind in ("fp8", "bf16"))
    ratio = rate / slower
    if has_mx:
        line = f"mxfp8: {found['mxfp8']['tokens_per_second'] / slower:.2f} x bf16"
    limits = f"{_limits(found['fp8'])}; {line}"
    return Outcome(rate, "tokens/s", ratio, ratio >= _FP8, limits, found)


def _check_mx(place: Place) -> None:
    """Check the GPU's products in mxfp8, and their gradients, against emulated ones."""
    from pipelines.parallel.mxfp8 import MXLinear  # takes seconds

    kind: dict[str, Any] = {"device": place.device, "dtype": torch.bfloat16}
    layer = torch.nn.Linear(256, 128, bias=False, **kind)
    x, given = torch.randn(4, 32, 256, **kind), torch.randn(4, 32, 128, **kind)
    both = []
    for emulated in (place.fake, True):
        made, inputs = MXLinear.of(layer, emulated=emulated), x.clone().requires_grad_()
        result = made(inputs)
        both.append([result, *torch.autograd.grad(result, (inputs, made.weight), given)])
    pairs = zip(*both, strict=True)
    furthest = max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)
    if not furthest <= _SAME:
        raise ValueError(f"mxfp8 differs from emulated products by {furthest:.1e}, over {_SAME}")
