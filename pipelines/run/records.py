"""The records that stages pass on: small, frozen, JSON-serialisable and safe for XCom.

A record holds no times and no run ids, so that the same work gives the same bytes and the stage
cache of the next stage still hits.

A document's split depends only on its content, so new data moves no old document.
"""

from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from pipelines.core.checked_json import read_model
from pipelines.core.checked_yaml import read_yaml
from pipelines.core.product import PRODUCT_FILES
from pipelines.core.storage import sync_folder, write_json
from pipelines.recipe.data_section import mixture_label
from pipelines.run.verdict import (
    BehaviourScore,
    Estimate,
    ExactMatch,
    HarnessScore,
    PairScore,
    Probes,
    RightSize,
    ServedCheck,
    SliceScore,
    Verdict,
)

OUTPUTS = "outputs"
DATASETS = "datasets"  # in the outputs of preprocess: each version of a mixture, complete
JOBS = "jobs"  # in a workspace: the Ray jobs of each task, and the processes that wait for them
MACHINE = "diagnostics/machine.json"  # in a workspace: the machine that training ran on
REFERENCES = ".references"  # beside the workspaces: what models said before runs changed them
RUN_FILE = "run.json"  # in a workspace: the run that it belongs to
DATA_DOCS = "data_docs/index.html"  # in the outputs of validate and the run's artifacts
TASK_SCORES = "task_scores.parquet"  # in the outputs of evaluate and the run's artifacts
PAIRS_FILE = "pairs.parquet"  # in the outputs of evaluate, if the data are pairs
KEPT_FILE = "kept.json"  # in a workspace: results that a user keeps although their keys changed
PATCH_FILE = "uncommitted.diff"  # in a workspace whose code is not committed


@cache
def stage_names() -> tuple[str, ...]:
    """Return the names of the stages in the order of their execution."""
    return tuple(read_yaml(PRODUCT_FILES / "dvc.yaml")["stages"])


class Record(BaseModel):
    """A stage's result, written last as `outputs/<stage>/record.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: ClassVar[str]

    def write(self, workspace: Path) -> Self:
        """Write the record; its presence means that the stage is complete and on the disk."""
        folder = output_folder(workspace, self.stage)
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder)
        write_json(record_path(workspace, self.stage), self.model_dump(mode="json"))
        return self

    @classmethod
    def read(cls, workspace: Path) -> Self:
        """Read the record of this stage; raise UserError if it is missing or damaged."""
        return read_model(record_path(workspace, cls.stage), cls)


def output_folder(workspace: Path, stage: str) -> Path:
    """Return the only folder that a stage writes to."""
    return workspace / OUTPUTS / stage


def record_path(workspace: Path, stage: str) -> Path:
    """Return the path of a stage's record."""
    return output_folder(workspace, stage) / "record.json"


class Shard(BaseModel):
    """One token file and its index; `path` is the token file's, relative to the stage's output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    md5: str
    index_md5: str
    mask_md5: str | None = None  # of the loss mask beside it, if there is one
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
    directory_hash: str  # DVC's hash of the version's whole tree
    weight: int  # the number of this dataset's samples in each `sum(weights)` samples
    shards: int  # in the training split, which holds the parts' shards one part after the other
    data: dict[str, Any]  # the data section of the recipe that made the version

    @property
    def label(self) -> str:
        """The version as `name@N`."""
        return f"{self.name}@{self.version}"

    @property
    def folder(self) -> str:
        """The folder of the version's files, relative to the stage's output."""
        return f"{DATASETS}/{self.label}"


class DatasetRef(BaseModel):
    """The data of a run by content, and a version of the datasets repository also by name.

    The splits of a mixture are those of all its parts together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    version: int | None = None
    git_revision: str | None = None  # of the datasets repository
    directory_hash: str | None = None  # DVC's hash of the version's whole tree
    remote: str | None = None  # DVC's storage of objects by content hash; shards stream from it
    vocab_size: int
    # With best-fit packing, a document of the index is one sample, padded to this length plus one.
    packed_length: int | None = None
    # A sample's pieces are then a chosen and a rejected conversation, by turns, and the padding.
    pairs: bool = False
    labelled: bool = False  # each of the pairs then lacks one of its answers
    train: Split
    validation: Split
    mixture: tuple[MixturePart, ...] = ()  # the versions by label, if the data is a mixture

    @property
    def contents(self) -> str:
        """What a document is, in words."""
        pairs = "labelled answers" if self.labelled else "pairs of answers"
        return pairs if self.pairs else "no pairs of answers"

    @property
    def label(self) -> str | None:
        """`name@N` for a version, `a@1=3, b@2=7` for a mixture, None for data without a name."""
        if self.mixture:
            return mixture_label({part.label: part.weight for part in self.mixture})
        return f"{self.name}@{self.version}" if self.name else None

    @property
    def folders(self) -> dict[str, int]:
        """The weight of each dataset by its folder, relative to the stage's output.

        Without a mixture, the output itself is the only folder.
        """
        return {part.folder: part.weight for part in self.mixture} or {"": 1}

    def shares(self, total: int) -> dict[str, int]:
        """Divide a quantity among the `folders` by weight."""
        whole = sum(self.folders.values())
        return {folder: total * weight // whole for folder, weight in self.folders.items()}


class PreprocessRecord(Record):
    """Token shards, and statistics of how they were made."""

    stage: ClassVar[str] = "preprocess"
    dataset: DatasetRef
    stats: dict[str, Any]


class ExpectationResult(BaseModel):
    """The observed value of one expectation, which is met."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    expectation: str
    columns: tuple[str, ...]
    observed: str


class ValidateRecord(Record):
    """The record of data that passed the data gate."""

    stage: ClassVar[str] = "validate"
    expectations: int
    data_docs: str  # the gate's page, relative to the stage's output
    results: tuple[ExpectationResult, ...] = ()
    quarantined: int = 0  # tolerated bad documents, named in `quarantine.jsonl`


class TrainRecord(Record):
    """A trained model as a Hugging Face folder."""

    stage: ClassVar[str] = "train"
    model: str  # folder, relative to the stage's output
    model_hash: str
    adapter: str | None = None  # merged into the model: a folder in peft's format beside it
    parameters: int
    steps: int
    tokens: int
    # The layout over processes, and the precision, under the recipe's keys.
    layout: dict[str, bool | int | str] = {}
    alarms: tuple[str, ...] = ()  # of a model that seems to please its rewards only, a line each
    metrics: dict[str, float]


class EvaluateRecord(Record):
    """The model's scores on held-out documents; with a memory budget, those of the fitting form."""

    stage: ClassVar[str] = "evaluate"
    bits_per_byte: float
    perplexity: float  # per token
    documents: int
    bytes: int
    data_hash: str  # of the evaluated documents
    baselines: dict[str, float]  # bits per byte
    samples: tuple[str, ...]
    datasets: dict[str, float] = {}  # for a mixture: bits per byte on each version's documents
    stride: float = 0.75  # the part of its context by which a window moved
    interval: Estimate | None = None  # of bits_per_byte
    slices: tuple[SliceScore, ...] = ()
    behaviours: tuple[BehaviourScore, ...] = ()
    exact_match: ExactMatch | None = None  # if questions were asked
    pairs: PairScore | None = None  # if the data are pairs of answers
    harness: tuple[HarnessScore, ...] = ()
    probes: Probes = Probes()
    right_size: RightSize | None = None  # if there is a memory budget
    served: tuple[ServedCheck, ...] = ()  # whether the written model is the trained one
    metrics: dict[str, float] = {}  # of a team's own packages, as `metric/figure`


class ModelRef(BaseModel):
    """One version of a model in the registry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: int
    aliases: tuple[str, ...] = ()


class RegisterRecord(Record):
    """The verdict, the current champion, and the candidate that a user must decide about."""

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
    """Return a number in [0, 1) from a document's hash; different parts give independent ones."""
    return int(doc_id[part * 12 : part * 12 + 12], 16) / 16**12


def split_of(doc_id: str, validation_fraction: float) -> str:
    """Return the split of a document according to its hash."""
    return VALIDATION if uniform(doc_id) < validation_fraction else TRAIN
