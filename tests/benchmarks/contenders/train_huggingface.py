"""Hugging Face's Trainer on its own Llama, from the same shard: eager as it comes, or compiled."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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


def llama(shape: dict[str, Any]) -> LlamaConfig:
    """The same shape."""
    return LlamaConfig(
        num_hidden_layers=shape["layers"],
        hidden_size=shape["width"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["hidden"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["context_length"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.get("tie_embeddings", True),
        use_cache=False,
    )


def arguments(folder: Path, train: dict[str, Any], **further: Any) -> TrainingArguments:
    """The same optimisation."""
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
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **further,
    )


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(options["threads"])
    shape, train = options["shape"], options["train"]
    length = shape["context_length"]
    samples = Samples(folder / "train-00000.bin", length)
    # torch_compile= compiles the model that a Trainer is given; each round has a new one.
    given = arguments(folder / "huggingface", train, use_cpu=True, torch_compile=options["compile"])

    def run_round() -> tuple[float, dict[str, Any]]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama(shape))
        trainer = Trainer(model, given, train_dataset=samples)
        trainer.train()
        tokens = train["steps"] * train["global_batch_size"] * length
        loss = next(each["loss"] for each in reversed(trainer.state.log_history) if "loss" in each)
        parameters = sum(each.numel() for each in model.parameters())
        return tokens, {"loss": float(loss), "parameters": parameters}

    return run_round


if __name__ == "__main__":
    serve(prepare)
