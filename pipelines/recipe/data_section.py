"""The part of a recipe that says where text comes from and how it becomes token shards."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.recipe.cleaning_section import Decontamination, Dedup, Filters, Pii
from pipelines.recipe.section import (
    Extension,
    Section,
    check_extension,
    form_field,
    refuse_secret,
)

DATASET_NAME = r"[a-z0-9](\.?[a-z0-9_-])*"  # also the name of a folder and a part of a git tag
MAX_CYCLE = 10_000  # most samples after which a mixture's proportions must be exact


class Source(Section):
    """Where documents come from."""

    kind: Literal["stdlib", "files", "huggingface", "dataset", "mixture", "extension"] = form_field(
        "stdlib",
        "stdlib: the running Python's own library; dataset: a version that `penstock data` lists; "
        "mixture: several versions by weight; extension: of a package of your own",
    )
    extension: Extension | None = Field(None, description="kind extension: its name and settings")
    path: str | None = form_field(
        None,
        "files: a file, folder, glob or URL; huggingface: a folder or a name; dataset: name@N",
    )
    mixture: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="The weight of each dataset version, as in {web@3: 0.7, code@1: 0.3}"
    )
    format: Literal["auto", "text", "jsonl", "parquet", "docstrings"] = form_field(
        "auto",
        "auto: by file name; .gz and .zst are decompressed; docstrings: of Python files, a "
        "question about each documented name and its answer",
    )
    text_field: str = form_field(
        "text", "The field of a JSONL line or Parquet row that holds the text"
    )
    split: str = Field("train", description="Split of a Hugging Face dataset")
    revision: str | None = Field(None, description="A Hugging Face dataset's commit")
    max_documents: int | None = Field(
        None, ge=1, description="Only the first documents, in source order"
    )
    max_malformed_fraction: float = Field(
        0.01, ge=0, lt=1, description="Share of unreadable records that preprocess tolerates"
    )

    @model_validator(mode="after")
    def _others_need_a_path(self) -> Self:
        wanted = {
            "files": "a file, folder, glob or URL such as s3://bucket/prefix",
            "huggingface": "a dataset's folder or name",
            "dataset": "a version that `penstock data list` names: name@N",
        }
        if self.kind in wanted and not self.path:
            raise ValueError(f"kind `{self.kind}` needs data.source.path: {wanted[self.kind]}")
        return self

    @model_validator(mode="after")
    def _extension_has_a_name(self) -> Self:
        check_extension(self.kind, self.extension, "data.source")
        return self

    @field_validator("mixture")
    @classmethod
    def _in_one_order(cls, mixture: dict[str, float]) -> dict[str, float]:
        """Sort the mixture: samples depend on its order, which stores of JSON may change."""
        return dict(sorted(mixture.items()))

    @model_validator(mode="after")
    def _mixture_is_of_several(self) -> Self:
        if self.kind != "mixture" and self.mixture:
            raise ValueError(
                f"kind is `{self.kind}`, but data.source.mixture names {', '.join(self.mixture)}; "
                "set kind to mixture, or leave out data.source.mixture"
            )
        if self.kind == "mixture" and len(self.mixture) < 2:
            raise ValueError(
                "kind `mixture` needs data.source.mixture: two or more dataset versions and their "
                "weights, such as {web@3: 0.7, code@1: 0.3}"
            )
        if (cycle := sum(self.weights.values())) > MAX_CYCLE:
            raise ValueError(
                f"the weights in data.source.mixture are exact only after {cycle} samples, "
                f"more than {MAX_CYCLE}; give rounder weights, or whole numbers such as 1 and 2"
            )
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a mapping has no hash

    @property
    def weights(self) -> dict[str, int]:
        """The mixture's weights as the smallest whole numbers in the same proportions."""
        exact = {label: Fraction(repr(weight)) for label, weight in self.mixture.items()}
        denominator = math.lcm(*(weight.denominator for weight in exact.values()))
        whole = {label: int(weight * denominator) for label, weight in exact.items()}
        divisor = math.gcd(*whole.values())
        return {label: weight // divisor for label, weight in whole.items()}

    @property
    def is_published(self) -> bool:
        """Whether the source is dataset versions, which are fetched, not made."""
        return self.kind in ("dataset", "mixture")

    @property
    def published_label(self) -> str:
        """The name in tags of the dataset version or of the mixture."""
        return mixture_label(self.weights) if self.kind == "mixture" else str(self.path)

    @model_validator(mode="after")
    def _path_holds_no_secret(self) -> Self:
        refuse_secret(self.path or "", "data.source.path")
        return self


class Instruction(Section):
    """Conversations, rendered by a chat template, with the loss on the assistant's turns only."""

    kind: Literal["none", "messages", "prompt_response", "preference", "rated", "labelled"] = Field(
        "none",
        description="none: plain text; else the form of a record; preference: a better and a worse "
        "answer to the same beginning; rated: several answers, of which the best and the worst are "
        "taken; labelled: one answer, and whether it is good",
    )
    messages_field: str = Field("messages", description="A list of {role, content}")
    prompt_field: str = "prompt"
    response_field: str = Field("response", description="prompt_response, labelled: a text")
    chosen_field: str = Field(
        "chosen", description="preference: text, or a list of {role, content}, whole or an end"
    )
    rejected_field: str = Field("rejected", description="preference: the same, of the worse answer")
    answers_field: str = Field("answers", description="rated: a list of {content, rating}")
    label_field: str = Field("label", description="labelled: true for a good answer, else false")
    chat_template: str | None = Field(
        None, description="A Jinja file; null: the tokenizer's own, else ChatML"
    )

    @property
    def is_chat(self) -> bool:
        """Whether the data are conversations."""
        return self.kind != "none"

    @property
    def is_preference(self) -> bool:
        """Whether the data are pairs of conversations, of which the first is preferred.

        A labelled answer makes a pair whose other conversation ends with the prompt.
        """
        return self.kind in ("preference", "rated", "labelled")


class Tokenizer(Section):
    """How text becomes token ids."""

    kind: Literal["char", "byte", "bpe", "pretrained", "model", "extension"] = form_field(
        "bpe",
        "char, byte, bpe (trained on the corpus), pretrained (from path), extension (of a package "
        "of your own), or model: that of model.init_from, with its chat template",
    )
    extension: Extension | None = Field(None, description="kind extension: its name and settings")
    vocab_size: int = Field(1024, ge=257, description="Size of a trained BPE")
    path: str | None = Field(None, description="A tokenizer.json or a folder that holds one")

    @property
    def is_given(self) -> bool:
        """Whether the tokenizer exists already."""
        return self.kind in ("pretrained", "model")

    @model_validator(mode="after")
    def _pretrained_needs_a_path(self) -> Self:
        if self.kind == "pretrained" and not self.path:
            raise ValueError("kind `pretrained` needs data.tokenizer.path: a tokenizer.json")
        check_extension(self.kind, self.extension, "data.tokenizer")
        return self


class Data(Section):
    """Text in, token shards out, batches on the device."""

    name: str | None = form_field(
        None,
        "Name of the dataset whose versions data_refresh makes; null: the recipe's name",
        pattern=f"^{DATASET_NAME}$",
    )
    source: Source = Source()
    instruction: Instruction = Instruction()
    filters: Filters = Filters()
    pii: Pii = Pii()
    decontamination: Decontamination = Decontamination()
    dedup: Dedup = Dedup()
    validation_fraction: float = Field(
        0.05, gt=0, lt=1, description="Share of documents held out, chosen by a content hash"
    )
    tokenizer: Tokenizer = Tokenizer()
    sequence_length: int = form_field(256, "Tokens per sample", ge=8)
    packing: Literal["concat", "best_fit"] = Field(
        "concat",
        description="concat: documents end to end; best_fit: whole documents, then padding",
    )
    document_mask: bool = Field(
        False, description="A token attends only to its own document, not to the whole sample"
    )
    shard_tokens: int = Field(
        50_000_000, ge=1024, description="Most tokens in a .bin file, without padding"
    )

    @model_validator(mode="after")
    def _docstrings_are_answers(self) -> Self:
        kinds = "prompt_response", "preference"
        if self.source.format == "docstrings" and self.instruction.kind not in kinds:
            raise ValueError(
                "data.source.format `docstrings` gives questions and answers; set "
                "data.instruction.kind to prompt_response or preference"
            )
        return self

    @model_validator(mode="after")
    def _pairs_lie_whole_in_samples(self) -> Self:
        whole = self.packing == "best_fit" and self.document_mask
        if self.instruction.is_preference and not whole:
            raise ValueError(
                f"data.instruction.kind `{self.instruction.kind}` needs both answers of a pair "
                "whole in one sample; set data.packing to best_fit and data.document_mask to true"
            )
        return self

    reader: Literal["auto", "mmap", "pinned", "gds", "object_store"] = Field(
        "auto", description="How token shards reach the device; auto: the best that a probe finds"
    )


def mixture_label(weights: Mapping[str, int]) -> str:
    """Return the name of a mixture, such as `a@1=3, b@2=7`."""
    return ", ".join(f"{label}={weight}" for label, weight in weights.items())
