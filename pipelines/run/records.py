"""What stages hand on: small, frozen, JSON-able and safe for XCom.

A record holds no times and no run ids, so that the same work gives the same bytes and the stage
cache of the next stage still hits.

Train or validation: decided by a document's content alone, so new data moves no old document.
"""

from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict

from pipelines.core.storage import read_json, write_json
from pipelines.recipe.data_section import mixture_label
from pipelines.run.verdict import (
    BehaviourScore,
    Estimate,
    ExactMatch,
    HarnessScore,
    Probes,
    RightSize,
    SliceScore,
    Verdict,
)

OUTPUTS = "outputs"
DATASETS = "datasets"  # among the outputs of preprocess: each version of a mixture, whole
JOBS = "jobs"  # in a workspace: the Ray jobs of each task, and who waits for them
MACHINE = "diagnostics/machine.json"  # in a workspace: what training ran on
RUN_FILE = "run.json"  # in a workspace: which run it belongs to
DATA_DOCS = "data_docs/index.html"  # among the outputs of validate, and the run's artifacts
KEPT_FILE = "kept.json"  # in a workspace: results that a user keeps although their keys changed
PATCH_FILE = "uncommitted.diff"  # in a workspace of uncommitted code


@cache
def stage_names(project: Path) -> tuple[str, ...]:
    """Return the names of a checkout's stages, in the order in which they run."""
    text = (project / "dvc.yaml").read_text(encoding="utf-8")
    return tuple(yaml.safe_load(text)["stages"])


class Record(BaseModel):
    """A stage's result, written last as `outputs/<stage>/record.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: ClassVar[str]

    def write(self, workspace: Path) -> Self:
        """Write the record; its presence says that the stage is whole."""
        write_json(record_path(workspace, self.stage), self.model_dump(mode="json"))
        return self

    @classmethod
    def read(cls, workspace: Path) -> Self:
        """Read the record of this stage from a workspace."""
        return cls.model_validate(read_json(record_path(workspace, cls.stage)))


def output_folder(workspace: Path, stage: str) -> Path:
    """The only folder that a stage writes."""
    return workspace / OUTPUTS / stage


def record_path(workspace: Path, stage: str) -> Path:
    """Where a stage's record lies."""
    return output_folder(workspace, stage) / "record.json"


class Shard(BaseModel):
    """One token file and its index, by the path of the former relative to the stage's output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    md5: str
    index_md5: str
    mask_md5: str | None = None  # of the loss mask beside it, where there is one
    bytes: int  # of the token file
    tokens: int


class Split(BaseModel):
    """The shards of one split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int
    bytes: int  # of UTF-8 text
    tokens: int
    shards: tuple[Shard, ...]


class MixturePart(BaseModel):
    """One dataset version among several that are trained on together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: int
    git_revision: str  # of the datasets repository
    directory_hash: str  # DVC's, of the version's whole tree
    weight: int  # of each `sum(weights)` samples so many are of this dataset
    shards: int  # of the training split; the parts' lie in it one part behind the other
    data: dict[str, Any]  # of the recipe that made the version

    @property
    def label(self) -> str:
        """`name@N`."""
        return f"{self.name}@{self.version}"

    @property
    def folder(self) -> str:
        """Where the version's files lie, relative to the stage's output."""
        return f"{DATASETS}/{self.label}"


class DatasetRef(BaseModel):
    """Which data, by content; a version of the datasets repository also by name.

    Of a mixture the splits are those of its parts together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    version: int | None = None
    git_revision: str | None = None  # of the datasets repository
    directory_hash: str | None = None  # DVC's, of the version's whole tree
    remote: str | None = None  # where DVC's objects lie by content hash; shards stream from there
    vocab_size: int
    # Of best-fit packing: then a document of the index is one sample, padded to this and one more.
    packed_length: int | None = None
    train: Split
    validation: Split
    mixture: tuple[MixturePart, ...] = ()  # the versions, by label, where it is of several

    @property
    def label(self) -> str | None:
        """`name@N` of a version, `a@1=3, b@2=7` of a mixture, None of data without a name."""
        if self.mixture:
            return mixture_label({part.label: part.weight for part in self.mixture})
        return f"{self.name}@{self.version}" if self.name else None

    @property
    def folders(self) -> dict[str, int]:
        """Where each dataset lies, relative to the stage's output, and its weight.

        There is one, the output itself, but of a mixture.
        """
        return {part.folder: part.weight for part in self.mixture} or {"": 1}

    def shares(self, total: int) -> dict[str, int]:
        """A quantity shared out among the `folders`, by weight."""
        whole = sum(self.folders.values())
        return {folder: total * weight // whole for folder, weight in self.folders.items()}


class PreprocessRecord(Record):
    """Token shards and how they came about."""

    stage: ClassVar[str] = "preprocess"
    dataset: DatasetRef
    stats: dict[str, Any]


class ExpectationResult(BaseModel):
    """What one expectation, which holds, observed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    expectation: str
    columns: tuple[str, ...]
    observed: str


class ValidateRecord(Record):
    """The data gate was passed."""

    stage: ClassVar[str] = "validate"
    expectations: int
    data_docs: str  # its page, relative to the stage's output
    results: tuple[ExpectationResult, ...] = ()
    quarantined: int = 0  # bad documents named in `quarantine.jsonl`, within what is tolerated


class TrainRecord(Record):
    """A trained model as a Hugging Face folder."""

    stage: ClassVar[str] = "train"
    model: str  # folder, relative to the stage's output
    model_hash: str
    adapter: str | None = None  # merged into the model: a folder in peft's format beside it
    parameters: int
    steps: int
    tokens: int
    layout: dict[str, int | str] = {}  # over processes, under the recipe's keys
    metrics: dict[str, float]


class EvaluateRecord(Record):
    """How good the model is on held-out documents: of a memory budget, the form that fits it."""

    stage: ClassVar[str] = "evaluate"
    bits_per_byte: float
    perplexity: float  # a token
    documents: int
    bytes: int
    data_hash: str  # of the evaluated documents
    baselines: dict[str, float]  # bits per byte
    samples: tuple[str, ...]
    datasets: dict[str, float] = {}  # of a mixture: bits per byte on each version's documents
    stride: float = 0.75  # by how much of its context a window moved on
    interval: Estimate | None = None  # of bits_per_byte
    slices: tuple[SliceScore, ...] = ()
    behaviours: tuple[BehaviourScore, ...] = ()
    exact_match: ExactMatch | None = None  # where questions were asked
    harness: tuple[HarnessScore, ...] = ()
    probes: Probes = Probes()
    right_size: RightSize | None = None  # where there is a memory budget


class ModelRef(BaseModel):
    """One version in the registry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: int
    aliases: tuple[str, ...] = ()


class RegisterRecord(Record):
    """The verdict, the version that is champion now, and the one that a user decides about."""

    stage: ClassVar[str] = "register"
    verdict: Verdict
    model: ModelRef | None
    candidate: ModelRef | None = None  # registered without the champion's alias

    @property
    def needs_approval(self) -> bool:
        """Whether the run waits for a user's answer."""
        return self.verdict.decision == "needs approval"


VALIDATION = "validation"
TRAIN = "train"
SPLITS = (TRAIN, VALIDATION)


def uniform(doc_id: str, part: int = 0) -> float:
    """A number in [0, 1) from a document's hash; different parts are independent."""
    return int(doc_id[part * 12 : part * 12 + 12], 16) / 16**12


def split_of(doc_id: str, validation_fraction: float) -> str:
    """The split of a document, by its hash."""
    return VALIDATION if uniform(doc_id) < validation_fraction else TRAIN
