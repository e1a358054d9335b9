"""A recipe's sections on training: the optimisation, the layout over processes, the adapter."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.recipe.section import Count, Section, form_field, refuse_secret

Auto = Literal["auto"]
_BY_RULE = ("tp", "pp", "sharding")


class Parallel(Section):
    """How the model lies over processes; the product of the five numbers is the world size.

    `parallel: auto`, as a whole, leaves every one to the rule in `planning/layout_rule.py`. Alone,
    an `auto` of `dp_replicate` or `dp_shard` is what the others leave of the world size.
    """

    dp_replicate: Count | Auto = Field("auto", description="Replicas of the model")
    dp_shard: Count | Auto = Field(
        "auto", description="Processes over which one replica is sharded; 1 without sharding"
    )
    tp: Count | Auto = Field(1, description="Tensor parallel")
    pp: Count | Auto = Field(1, description="Pipeline parallel")
    cp: Count = Field(1, description="Context parallel: processes that share each sequence")
    sharding: Literal["none", "optimizer", "gradients", "full", "auto"] = Field(
        "none", description="ZeRO stage 0, 1, 2, 3"
    )
    sequence_parallel: bool = Field(
        True, description="Under tensor parallel, norms work on a part of the sequence each"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b", description="In which order pipeline stages run micro-batches"
    )
    cpu_offload: bool = Field(
        False, description="Sharded weights, gradients and moments wait in the host's memory"
    )

    @model_validator(mode="before")
    @classmethod
    def _all_by_rule(cls, values: Any) -> Any:
        return dict.fromkeys(_BY_RULE, "auto") if values == "auto" else values

    @property
    def by_rule(self) -> bool:
        """Whether some of it is left to the rule."""
        return any(getattr(self, key) == "auto" for key in _BY_RULE)


class Train(Section):
    """One optimisation run."""

    steps: int = form_field(400, "Optimizer steps", ge=1)
    max_seconds: float | None = form_field(None, "Stop after so many seconds of steps", gt=0)
    micro_batch_size: Count | Literal["auto"] = form_field(
        8, "Samples a forward pass on one process; auto: by memory"
    )
    global_batch_size: int = form_field(16, "Samples an optimizer step, over all processes", ge=1)
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for the blocks' matrices, with AdamW's rate, and AdamW else"
    )
    lr: float = form_field(3e-3, "Peak learning rate", gt=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Last learning rate ÷ peak")
    warmup_steps: int = Field(20, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm")
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = form_field(
        "fp32", "Of matrix products; weights and moments stay in fp32"
    )
    activation_checkpoint: Literal["none", "selective", "full"] = Field(
        "none", description="What of a block is computed again in the backward pass"
    )
    compile: bool = Field(False, description="torch.compile each block")
    deterministic: bool = Field(
        False, description="The same bits from the same step on a GPU too; some of it is slower"
    )
    checkpoint_every: int = Field(100, ge=1, description="Steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints that are kept")
    keep_best: bool = Field(
        False, description="Keep the checkpoint of the least mean loss since the one before, too"
    )
    checkpoints: str | None = Field(
        None,
        description="s3://bucket/prefix or a folder, where each run has a folder of its own; "
        "null: its workspace",
    )
    log_every: int = Field(10, ge=1, description="Steps between points in MLflow")
    spike_sigma: float | None = Field(
        10.0,
        gt=0,
        description="A step is left out whose loss or gradient norm is so many standard deviations "
        "above the last ones'; null: only one that is no number",
    )
    max_bad_steps: int = Field(
        5, ge=1, description="So many left out in a row: back to the last checkpoint"
    )
    max_rollbacks: int = Field(3, ge=0, description="How often a run may go back")
    stall_seconds: float = Field(
        600.0, gt=0, description="Without a move of a process, until it is named"
    )
    profile_steps: tuple[int, int] | None = Field(
        None, description="[from, to): steps whose trace is kept, for Perfetto"
    )

    @property
    def fixed_micro_batch_size(self) -> int:
        """The number; raises ValueError where the rule has yet to choose it."""
        if self.micro_batch_size == "auto":
            raise ValueError("micro_batch_size: auto is resolved by planning before training")
        return self.micro_batch_size

    @field_validator("checkpoints")
    @classmethod
    def _no_secret(cls, url: str | None) -> str | None:
        if url is not None:
            refuse_secret(url, "train.checkpoints")
            if "://" in url and not url.startswith("s3://"):
                raise ValueError("checkpoints go to a folder or an s3:// URL only")
        return url

    @field_validator("profile_steps")
    @classmethod
    def _some_steps(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and not 0 <= steps[0] < steps[1]:
            raise ValueError("profile_steps are [from, to) with 0 <= from < to")
        return steps

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        micro = self.micro_batch_size
        if micro != "auto" and self.global_batch_size % micro:
            raise ValueError(
                f"global_batch_size({self.global_batch_size}) must be a multiple of "
                f"micro_batch_size({micro})"
            )
        return self


class Adapter(Section):
    """Parameter-efficient fine-tuning."""

    kind: Literal["none", "lora", "qlora"] = Field(
        "none", description="none: all weights are trained; qlora: the frozen ones lie in NF4"
    )
    rank: int = Field(16, ge=1, description="Of the two matrices beside a frozen one")
    alpha: float = Field(32.0, gt=0, description="Their product is scaled by alpha ÷ rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Of what the adapters see")
    targets: tuple[str, ...] = Field(
        (), description="Layers by the end of their names: q_proj; empty: every linear one"
    )
    init_from: str | None = Field(
        None,
        description="A folder in peft's format whose adapters training starts from; it has its own "
        "rank, alpha and targets",
    )
