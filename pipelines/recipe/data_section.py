"""The part of a recipe that says where text comes from and how it becomes token shards."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.recipe.cleaning_section import Decontamination, Dedup, Filters, Pii
from pipelines.recipe.section import Section, form_field, refuse_secret

DATASET_NAME = r"[a-z0-9](\.?[a-z0-9_-])*"  # also a folder's name and a part of a git tag's
MAX_CYCLE = 10_000  # samples in which a mixture's proportions must come out even


class Source(Section):
    """Where documents come from."""

    kind: Literal["stdlib", "files", "huggingface", "dataset", "mixture"] = form_field(
        "stdlib",
        "stdlib: the running Python's own library; dataset: a version that `penstock data` lists; "
        "mixture: several of them by weight",
    )
    path: str | None = form_field(
        None,
        "files: a file, folder, glob or URL; huggingface: a folder or a name; dataset: name@N",
    )
    mixture: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Of dataset versions: the weight of each, as in {web@3: 0.7, code@1: 0.3}"
    )
    format: Literal["auto", "text", "jsonl", "parquet"] = form_field(
        "auto", "auto: by file name; .gz and .zst are seen through"
    )
    text_field: str = form_field(
        "text", "The field of a JSONL line or Parquet row that holds the text"
    )
    split: str = Field("train", description="Of a Hugging Face dataset")
    revision: str | None = Field(None, description="Of a Hugging Face dataset: a commit")
    max_documents: int | None = Field(
        None, ge=1, description="Only the first documents, in source order"
    )
    max_malformed_fraction: float = Field(
        0.01, ge=0, lt=1, description="Unreadable records tolerated before preprocess stops"
    )

    @model_validator(mode="after")
    def _others_need_a_path(self) -> Self:
        wanted = {
            "files": "a file, folder, glob or URL such as s3://bucket/prefix",
            "huggingface": "a dataset's folder or name",
            "dataset": "a version as `penstock data list` names it: name@N",
        }
        if self.kind in wanted and not self.path:
            raise ValueError(f"kind `{self.kind}` needs data.source.path: {wanted[self.kind]}")
        return self

    @field_validator("mixture")
    @classmethod
    def _in_one_order(cls, mixture: dict[str, float]) -> dict[str, float]:
        """Stores of JSON may change the order of keys, and samples are drawn by it."""
        return dict(sorted(mixture.items()))

    @model_validator(mode="after")
    def _mixture_is_of_several(self) -> Self:
        if self.kind != "mixture" and self.mixture:
            raise ValueError(
                f"kind is `{self.kind}`, but data.source.mixture names {', '.join(self.mixture)}; "
                "set kind to mixture, or leave the other out"
            )
        if self.kind == "mixture" and len(self.mixture) < 2:
            raise ValueError(
                "kind `mixture` needs data.source.mixture: two dataset versions or more and their "
                "weights, such as {web@3: 0.7, code@1: 0.3}"
            )
        if (cycle := sum(self.weights.values())) > MAX_CYCLE:
            raise ValueError(
                f"the weights in data.source.mixture come out even only after {cycle} samples, "
                f"more than {MAX_CYCLE}; give rounder ones, or whole numbers such as 1 and 2"
            )
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a mapping has no hash of its own

    @property
    def weights(self) -> dict[str, int]:
        """The mixture's weights as the smallest whole numbers of the same proportions."""
        exact = {label: Fraction(repr(weight)) for label, weight in self.mixture.items()}
        denominator = math.lcm(*(weight.denominator for weight in exact.values()))
        whole = {label: int(weight * denominator) for label, weight in exact.items()}
        divisor = math.gcd(*whole.values())
        return {label: weight // divisor for label, weight in whole.items()}

    @property
    def is_published(self) -> bool:
        """Whether it names dataset versions, which are fetched and not made."""
        return self.kind in ("dataset", "mixture")

    @property
    def published_label(self) -> str:
        """What tags call the dataset version, or the mixture of them."""
        return mixture_label(self.weights) if self.kind == "mixture" else str(self.path)

    @model_validator(mode="after")
    def _path_holds_no_secret(self) -> Self:
        refuse_secret(self.path or "", "data.source.path")
        return self


class Instruction(Section):
    """Conversations: rendered by a chat template, with the loss on the assistant's turns only."""

    kind: Literal["none", "messages", "prompt_response"] = Field(
        "none", description="none: plain text; else what a record holds"
    )
    messages_field: str = Field("messages", description="A list of {role, content}")
    prompt_field: str = "prompt"
    response_field: str = "response"
    chat_template: str | None = Field(
        None, description="A Jinja file; without one the tokenizer's own, else ChatML"
    )

    @property
    def is_chat(self) -> bool:
        """Whether the data are conversations."""
        return self.kind != "none"


class Tokenizer(Section):
    """How text becomes token ids."""

    kind: Literal["char", "byte", "bpe", "pretrained"] = form_field(
        "bpe", "char, byte, bpe (trained on the corpus), or pretrained (from path)"
    )
    vocab_size: int = Field(1024, ge=257, description="Of a trained BPE")
    path: str | None = Field(None, description="A tokenizer.json or a folder that holds one")

    @model_validator(mode="after")
    def _pretrained_needs_a_path(self) -> Self:
        if self.kind == "pretrained" and not self.path:
            raise ValueError("kind `pretrained` needs data.tokenizer.path: a tokenizer.json")
        return self


class Data(Section):
    """Text in, token shards out, batches on the device."""

    name: str | None = form_field(
        None,
        "Of the dataset whose versions data_refresh makes; without one the recipe's name",
        pattern=f"^{DATASET_NAME}$",
    )
    source: Source = Source()
    instruction: Instruction = Instruction()
    filters: Filters = Filters()
    pii: Pii = Pii()
    decontamination: Decontamination = Decontamination()
    dedup: Dedup = Dedup()
    validation_fraction: float = Field(
        0.05, gt=0, lt=1, description="Documents held out, chosen by a hash of their content"
    )
    tokenizer: Tokenizer = Tokenizer()
    sequence_length: int = form_field(256, "Tokens a sample", ge=8)
    packing: Literal["concat", "best_fit"] = Field(
        "concat",
        description="concat: documents end to end; best_fit: whole ones together, the rest padded",
    )
    document_mask: bool = Field(
        False, description="A token attends to its own document only; else to the whole sample"
    )
    shard_tokens: int = Field(
        50_000_000, ge=1024, description="Tokens a .bin file at most, without padding"
    )
    reader: Literal["auto", "mmap", "pinned", "gds", "object_store"] = Field(
        "auto", description="How token shards reach the device; auto: what a probe finds best"
    )


def mixture_label(weights: Mapping[str, int]) -> str:
    """What a mixture is called: `a@1=3, b@2=7`."""
    return ", ".join(f"{label}={weight}" for label, weight in weights.items())
