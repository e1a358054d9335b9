"""A recipe's sections on training: optimisation, layout over processes and adapter."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.recipe.section import (
    Count,
    Section,
    check_reference,
    form_field,
    refuse_secret,
)

Auto = Literal["auto"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
AttentionKernel = Literal["auto", "flex", "varlen"]
Fp8Scaling = Literal["tensorwise", "rowwise", "mx"]
_BY_RULE = ("tp", "pp", "sharding")


def _checked_place(url: str, key: str) -> str:
    """Return a place of checkpoints as it is; raise ValueError if it is none."""
    refuse_secret(url, key)
    if "://" in url and not url.startswith("s3://"):
        raise ValueError(f"{key.rpartition('.')[2]} must be a folder or an s3:// URL")
    return url


class CheckpointCopies(Section):
    """A further place for checkpoints, and which of them are copied there."""

    place: str = Field(
        description="s3://bucket/prefix, or a folder that all machines share; each run has its own "
        "folder in it"
    )
    every: int = Field(1, ge=1, description="Least number of steps between two of them")
    keep: int = Field(1, ge=1, description="How many of the newest copies to keep")

    @field_validator("place")
    @classmethod
    def _is_a_place(cls, url: str) -> str:
        return _checked_place(url, "train.more_checkpoints.place")


class Parallel(Section):
    """The model's layout over processes; the product of the five numbers is the world size.

    `parallel: auto` leaves the layout to the rule in `planning/layout_rule.py`. A single `auto` of
    `dp_replicate` or `dp_shard` is the world size divided by the other numbers.
    """

    dp_replicate: Count | Auto = Field("auto", description="Replicas of the model")
    dp_shard: Count | Auto = Field(
        "auto", description="Processes that share one sharded replica; 1 without sharding"
    )
    tp: Count | Auto = Field(1, description="Tensor parallel processes")
    pp: Count | Auto = Field(1, description="Pipeline parallel processes")
    cp: Count = Field(1, description="Context parallel: processes that share each sequence")
    ep: Count = Field(
        1,
        description="Expert parallel: processes, of those that sharding divides over, that divide "
        "the experts of each layer",
    )
    sharding: Literal["none", "optimizer", "gradients", "full", "auto"] = Field(
        "none", description="ZeRO stage 0, 1, 2, 3"
    )
    sequence_parallel: bool = Field(
        True, description="Under tensor parallelism, each norm works on a part of the sequence"
    )
    async_tp: bool = Field(
        False,
        description="Exchange of tensor parallelism overlaps with matrix products, on NVIDIA GPUs "
        "of one host",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b", description="Order in which pipeline stages run micro-batches"
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Precision in which gradients are added up over data-parallel processes; bf16 "
        "halves what they exchange",
    )
    cpu_offload: bool = Field(
        False, description="Keep sharded weights, gradients and moments in the host's memory"
    )
    paged_moments: bool = Field(
        False,
        description="Keep AdamW's moments in the host's memory, and bring a few at a time to the "
        "device for the update",
    )

    @model_validator(mode="before")
    @classmethod
    def _all_by_rule(cls, values: Any) -> Any:
        return dict.fromkeys(_BY_RULE, "auto") if values == "auto" else values

    @property
    def by_rule(self) -> bool:
        """Whether the rule chooses some of the layout."""
        return any(getattr(self, key) == "auto" for key in _BY_RULE)


class Train(Section):
    """One optimisation run."""

    steps: int = form_field(400, "Optimizer steps", ge=1)
    max_seconds: float | None = form_field(None, "Stop after so many seconds of steps", gt=0)
    micro_batch_size: Count | Literal["auto"] = form_field(
        8, "Samples per forward pass on one process; auto: by memory"
    )
    global_batch_size: int = form_field(16, "Samples per optimizer step, over all processes", ge=1)
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw",
        description="adamw_8bit: a byte for each moment of the blocks' matrices, not four; muon: "
        "for the blocks' matrices, at AdamW's rate; AdamW for the rest",
    )
    lr: float = form_field(3e-3, "Peak learning rate", gt=0)
    lr_schedule: Literal["cosine", "wsd"] = Field(
        "cosine",
        description="After the warm-up, half a cosine over the steps; or wsd: the peak for half of "
        "the steps, then a straight line down, which begins when half of max_seconds is over",
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Last learning rate ÷ peak")
    warmup_steps: int = Field(20, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's; also Muon's momentum")
    beta2: float = Field(0.95, ge=0, lt=1)
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm")
    balance_loss: float = Field(
        0.01,
        ge=0,
        description="For a mixture of experts: the weight of the loss that is least where all "
        "experts are chosen equally often; `loss` does not contain it",
    )
    balance_rate: float = Field(
        0.001, ge=0, description="For routers of sigmoids: by how much a step moves experts' biases"
    )
    z_loss: float = Field(
        0.001,
        ge=0,
        description="For a mixture of experts: the weight of the loss that keeps its routers' "
        "logits small; `loss` does not contain it",
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = form_field(
        "auto",
        "Precision of matrix products; weights stay in fp32; auto: bf16 on a GPU that "
        "has it, else fp32",
    )
    fp8_scaling: Fp8Scaling = Field(
        "tensorwise",
        description="Numbers that share a scale in fp8: those of a tensor, or of a row, which is "
        "more exact and slower; mx: 32 of a row (mxfp8), from Blackwell on",
    )
    activation_checkpoint: Literal["none", "selective", "full"] = Field(
        "none", description="Parts of a block that are recomputed in the backward pass"
    )
    compile: bool | Auto = Field(
        "auto", description="torch.compile each block; auto: on a GPU that has bf16"
    )
    attention: AttentionKernel = Field(
        "auto",
        description="What attends within packed documents and sliding windows on a GPU: "
        "FlexAttention, or FlashAttention by varlen_attn, for bf16 and fp16; auto: flex unless a "
        "check on the GPU finds that varlen gives the same",
    )
    deterministic: bool = Field(
        False,
        description="A step gives the same bits every time, on a GPU too; some of it is slower",
    )
    checkpoint_every: int = Field(100, ge=1, description="Steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="How many of the newest checkpoints to keep")
    keep_best: bool = Field(
        False, description="Also keep the checkpoint of the least mean loss since the previous one"
    )
    checkpoints: str | None = Field(
        None,
        description="s3://bucket/prefix or a folder, in which each run has its own folder; "
        "null: its workspace",
    )
    more_checkpoints: tuple[CheckpointCopies, ...] = Field(
        (), description="Further places, such as S3, to which checkpoints in a folder are copied"
    )
    copy_every: int = Field(
        0,
        ge=0,
        description="Steps between copies of the state in the machines' memory, from which a run "
        "goes on after a process or a replica's machine is lost; 0: none",
    )
    log_every: int = Field(10, ge=1, description="Steps between points in MLflow")
    spike_sigma: float | None = Field(
        10.0,
        gt=0,
        description="Skip a step whose loss or gradient norm is this many standard deviations "
        "above the last ones'; null: skip only a step that is not a number",
    )
    max_bad_steps: int = Field(
        5,
        ge=1,
        description="Skipped steps in a row after which it goes back to the last checkpoint",
    )
    max_rollbacks: int = Field(3, ge=0, description="How often a run may go back")
    stall_seconds: float = Field(
        600.0, gt=0, description="Seconds without progress until the stalled process is named"
    )
    profile_steps: tuple[int, int] | None = Field(
        None, description="[from, to): steps whose trace is saved for Perfetto"
    )

    @property
    def fixed_micro_batch_size(self) -> int:
        """The micro-batch size; raises ValueError if the rule has not chosen it yet."""
        if self.micro_batch_size == "auto":
            raise ValueError("micro_batch_size: auto is resolved by planning before training")
        return self.micro_batch_size

    @property
    def fixed_precision(self) -> Precision:
        """The precision; raises ValueError if it is still `auto`."""
        if self.precision == "auto":
            raise ValueError("precision: auto is resolved by planning before training")
        return self.precision

    @property
    def fixed_compile(self) -> bool:
        """Whether blocks are compiled; raises ValueError if it is still `auto`."""
        if self.compile == "auto":
            raise ValueError("compile: auto is resolved by planning before training")
        return self.compile

    @field_validator("checkpoints")
    @classmethod
    def _is_a_place(cls, url: str | None) -> str | None:
        return url if url is None else _checked_place(url, "train.checkpoints")

    @model_validator(mode="after")
    def _copies_come_from_a_folder(self) -> Self:
        named = [self.checkpoints, *(more.place for more in self.more_checkpoints)]
        places = [
            place.rstrip("/") if "://" in place else str(Path(place)) for place in named if place
        ]
        if twice := next((place for place in places if places.count(place) > 1), None):
            raise ValueError(f"more_checkpoints: {twice} is named twice; each place needs its own")
        if self.more_checkpoints and self.checkpoints and "://" in self.checkpoints:
            raise ValueError(
                f"more_checkpoints: they are copied from a folder, but checkpoints is "
                f"{self.checkpoints}; name a folder there, and the bucket in more_checkpoints"
            )
        return self

    @field_validator("profile_steps")
    @classmethod
    def _some_steps(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and not 0 <= steps[0] < steps[1]:
            raise ValueError("profile_steps must be [from, to) with 0 <= from < to")
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
        "none", description="none: train all weights; qlora: store the frozen weights in NF4"
    )
    rank: int = Field(16, ge=1, description="Rank of the two matrices beside a frozen one")
    alpha: float = Field(32.0, gt=0, description="Their product is scaled by alpha ÷ rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the adapters' inputs")
    targets: tuple[str, ...] = Field(
        (), description="Layers by the end of their names, as q_proj; empty: all linear layers"
    )
    init_from: str | None = Field(
        None,
        description="Adapters to start from, with their own rank, alpha and targets: those of a "
        "registered model, as models:/NAME@champion, or a folder in peft's format",
    )

    @field_validator("init_from")
    @classmethod
    def _names_a_version(cls, reference: str | None) -> str | None:
        return check_reference(reference)
