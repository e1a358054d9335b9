"""Hugging Face's Trainer on its own model of the same shape, from the same shard.

Eager as it comes, or compiled; with `lora`, peft's adapters on frozen bf16 weights.
"""

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pipelines.models.config import DecoderConfig
from pipelines.models.config_json import write_config
from tests.benchmarks.contender import Round, serve


class Samples(Dataset[dict[str, Tensor]]):
    """Consecutive samples of a memory map."""

    def __init__(self, path: Path, length: int) -> None:
        self._ids = np.memmap(path, dtype=np.uint16, mode="r")
        self._length = length

    def __len__(self) -> int:
        return len(self._ids) // self._length

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        start = number * self._length
        ids = torch.from_numpy(self._ids[start : start + self._length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class Warm(TrainerCallback):
    """Seconds of the steps after the first `log_every`, in which everything is compiled."""

    seconds = 0.0
    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the device where the warm steps begin and where they end."""
        if state.global_step not in (args.logging_steps, state.max_steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.seconds
        self.steps = state.global_step - self.steps


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    on_gpu = options["device"] == "cuda"
    if not on_gpu:
        torch.set_num_threads(options["threads"])
    train = options["train"]
    shape = DecoderConfig(**options["shape"])
    samples = Samples(folder / "train-00000.bin", shape.context_length)
    arguments = _arguments(folder / "huggingface", options)

    def run_round() -> tuple[float, dict[str, Any]]:
        torch.manual_seed(0)
        model = _model(shape, options)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        warm = Warm()
        trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[warm])
        result = trainer.train()
        of_step = train["global_batch_size"] * shape.context_length
        tokens = train["steps"] * of_step
        figures = {
            "loss": result.training_loss,
            "warm_rate": warm.steps * of_step / warm.seconds,
            "parameters": sum(each.numel() for each in model.parameters()),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        }
        del model, trainer
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()  # for the contenders whose turn is next
        return tokens, figures

    return run_round


def _model(shape: DecoderConfig, options: dict[str, Any]) -> nn.Module:
    values = write_config(shape, "float32")
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = AutoConfig.for_model(**{**values, **dropout, "use_cache": False})
    dtype = torch.bfloat16 if "lora" in options else torch.float32
    with torch.device(options["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if "lora" in options:
        from peft import LoraConfig, get_peft_model

        rank, alpha = options["lora"]["rank"], options["lora"]["alpha"]
        chosen = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, chosen)
    return model


def _arguments(folder: Path, options: dict[str, Any]) -> TrainingArguments:
    """The same optimisation; on a GPU with what its guide to speed says."""
    train, on_gpu = options["train"], options["device"] == "cuda"
    again = train.get("activation_checkpoint", "none") != "none"
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=train["steps"],
        per_device_train_batch_size=train["micro_batch_size"],
        gradient_accumulation_steps=train["global_batch_size"] // train["micro_batch_size"],
        learning_rate=train["lr"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": train["min_lr_ratio"]},
        warmup_steps=train["warmup_steps"],
        weight_decay=train["weight_decay"],
        adam_beta1=train["beta1"],
        adam_beta2=train["beta2"],
        max_grad_norm=train["grad_clip"],
        optim="adamw_torch_fused",
        logging_steps=train["log_every"],
        bf16=train.get("precision", "fp32") == "bf16",
        gradient_checkpointing=again,
        gradient_checkpointing_kwargs={"use_reentrant": False} if again else None,
        torch_compile=options["compile"],
        use_cpu=not on_gpu,
        dataloader_num_workers=2 if on_gpu else 0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


if __name__ == "__main__":
    serve(prepare)
