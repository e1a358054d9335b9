"""A recipe says everything about one run: frozen models, one section a stage.

The same models give the `--set` overrides, the JSON schema, the Airflow trigger form, MLflow's
params and DVC's `params.yaml`. `recipe_files.py` reads them from YAML.
"""

import hashlib
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.recipe.cleaning_section import Share
from pipelines.recipe.data_section import Data
from pipelines.recipe.evaluation_section import Behaviour, Bias, Safety
from pipelines.recipe.section import Count, Section, form_field
from pipelines.recipe.training_section import Adapter, Parallel, Train

MODEL_NAME = r"\.?[\w-][\w. -]*"  # in the registry; also a folder's name


class Validation(Section):
    """What the data gate demands."""

    min_documents: int = Field(2, ge=2, description="Kept documents, both splits together")
    min_characters: int = Field(1, ge=1, description="In each kept document")
    max_characters: int = Field(50_000_000, ge=1, description="In each kept document")
    sample_documents: int = Field(
        2000, ge=1, description="About so many texts are looked at for all that follows"
    )
    tokens_per_word: tuple[float, float] = Field(
        (0.5, 20.0), description="Least and most of the tokenizer, on average"
    )
    bytes_per_token: tuple[float, float] = Field(
        (0.5, 50.0), description="Least and most of the tokenizer, on average"
    )
    max_near_duplicates: Share | None = Field(
        None,
        description="Share nearly the same as an earlier text; null: 0.02 behind data.dedup.kind "
        "minhash, else 0.2",
    )
    max_pii: Share = Field(
        0.001, description="Share with personal data, where data.pii masks or drops them"
    )
    max_contaminated: Share = Field(0.0, description="Share with text of an evaluation set")
    max_malformed_conversations: Share = Field(
        0.01, description="Share whose roles take no turns, or that the chat template refuses"
    )
    languages: dict[str, tuple[Share, Share]] = Field(
        {}, description="By ISO 639 code, least and most share of the texts; empty: any"
    )
    max_length_drift: float = Field(
        0.25,
        gt=0,
        description="Population Stability Index of lengths in tokens against the version before",
    )


class Model(Section):
    """Which decoder is trained."""

    preset: str = form_field("llama-1m", "A name from `pipelines/models/presets.py`")
    init_from: str | None = Field(
        None, description="A Hugging Face folder whose weights training starts from"
    )


class Questions(Section):
    """Held-out questions that the model answers, where the data are questions and answers."""

    most: int = Field(0, ge=0, description="0: none; each takes a whole answer's generation")
    pattern: str = Field(
        r"####[ \t]*(\S[^\n]*)",
        description="Finds what counts of an answer; its first group, if any",
    )
    max_tokens: int = Field(256, ge=1, description="Of an answer")

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        return pattern


class Harness(Section):
    """Tasks of lm-evaluation-harness that the exported model is put to."""

    tasks: tuple[str, ...] = Field(
        (), description="Its own, by name; their data sets come from the hub, or its local cache"
    )
    files: tuple[str, ...] = Field(
        (),
        description="YAML files in its format, each in a folder of its own with its data; no "
        "network is used",
    )
    limit: int | None = Field(None, ge=1, description="Documents of each task; null: all")


class Evaluate(Section):
    """What is measured on held-out documents."""

    max_bytes: int = form_field(2_000_000, "Held-out text at most; whole documents", ge=1)
    stride: float = Field(
        0.75,
        ge=0.01,
        le=1,
        description="Share of the context by which a window over a long document moves on; the "
        "rest is context only",
    )
    prompts: tuple[str, ...] = Field(("def ", "import "), description="Each is continued once")
    sample_tokens: int = Field(96, ge=0, description="Tokens a continuation")
    questions: Questions = Questions()
    harness: Harness = Harness()
    budget_gb: float | None = Field(
        None,
        gt=0,
        description="Memory of the device that serves, in 10^9 bytes: the best of bf16, int8 and "
        "int4 that fits it is measured and compared, and no other may be champion; null: the model "
        "as it was trained",
    )
    budget_max_loss: float = Field(
        0.02, ge=0, description="Bits per byte that it may need more than the model as trained"
    )
    budget_sequences: int = Field(
        8, ge=1, description="Answered at once within the budget, the whole context each"
    )
    int4_group: Literal[32, 64, 128, 256] = Field(
        128, description="Weights that share a scale in int4"
    )
    behaviour: tuple[Behaviour, ...] = Field(
        (), description="Tests of single capabilities; a candidate passes as many as the champion"
    )
    bias: Bias = Bias()
    safety: Safety = Safety()

    @field_validator("behaviour")
    @classmethod
    def _tests_have_names_of_their_own(cls, tests: tuple[Behaviour, ...]) -> tuple[Behaviour, ...]:
        names = [test.name for test in tests]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tests are named {', '.join(twice)}")
        return tests


class Register(Section):
    """Whether and where a model is registered."""

    model_name: str = form_field(
        "penstock-stdlib-code", "Registered model in MLflow", pattern=f"^{MODEL_NAME}$"
    )
    require_clean: bool = Field(False, description="Refuse a run of uncommitted changes")
    min_improvement: float = Field(
        0.0, ge=0, description="Bits per byte by which a candidate must beat the champion"
    )
    confidence: float = Field(
        0.95, gt=0.5, le=0.999, description="With which it must do so, on documents of this kind"
    )
    max_slice_regression: float = Field(
        0.02,
        ge=0,
        description="Share by which its bits per byte may exceed the champion's on a source, "
        "language or length",
    )
    max_bias: float | None = Field(
        None,
        ge=0,
        description="Bits a sentence by which it may find a stereotype likelier, or its opposite, "
        "with the whole interval beyond; null: any",
    )
    max_extraction: Share | None = Field(
        None, description="Share of training passages that it may have by heart, the same way"
    )
    max_leakage: Share | None = Field(
        None, description="Share of its texts that may hold personal data of the training text"
    )
    needs_approval: bool = form_field(
        False, "A user, too, decides whether a better candidate becomes champion"
    )
    approval_hours: float = Field(
        72.0, gt=0, description="Without an answer for so long the candidate is refused"
    )
    license: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.+-]*$",
        description="Of the weights, for the model card, as Hugging Face names it: apache-2.0; "
        "null: not recorded",
    )
    intended_use: str = Field("", description="For the model card: what the weights are for")


class Resources(Section):
    """What a stage asks of Ray."""

    workers: Count | tuple[Count, Count] = Field(2, description="Train workers: n, or [min, max]")
    max_stage_hours: float | None = Field(
        None, gt=0, description="A stage that has worked for so long is ended; null: never"
    )
    price_per_gpu_hour: float | None = Field(
        None, ge=0, description="In any currency, host included; null: GPUs cost nothing"
    )
    price_per_cpu_hour: float | None = Field(
        None, ge=0, description="Of a worker without a GPU; null: it costs nothing"
    )

    @property
    def is_elastic(self) -> bool:
        """Whether train goes on with fewer or more workers."""
        return isinstance(self.workers, tuple)

    @property
    def worker_range(self) -> tuple[int, int]:
        """The least and the most; of a fixed number, twice that."""
        return self.workers if isinstance(self.workers, tuple) else (self.workers, self.workers)

    @property
    def most_workers(self) -> int:
        """That train may have."""
        return self.worker_range[1]

    @model_validator(mode="after")
    def _range_ascends(self) -> Self:
        if isinstance(self.workers, tuple) and self.workers[0] > self.workers[1]:
            raise ValueError(f"workers {list(self.workers)}: the first is the least, then the most")
        return self


class Recipe(Section):
    """Everything about one run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    seed: int = form_field(42, "Of everything random", ge=0, lt=2**63)
    data: Data = Data()
    validation: Validation = Validation()
    model: Model = Model()
    parallel: Parallel = Parallel()
    train: Train = Train()
    adapter: Adapter = Adapter()
    evaluate: Evaluate = Evaluate()
    registration: Register = Field(Register(), alias="register")
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _what_is_bounded_is_measured(self) -> Self:
        demands, evaluate = self.registration, self.evaluate
        for bound, value, key, measured in (
            ("max_bias", demands.max_bias, "bias.enabled", evaluate.bias.enabled),
            (
                "max_extraction",
                demands.max_extraction,
                "safety.documents",
                evaluate.safety.documents,
            ),
            ("max_leakage", demands.max_leakage, "safety.generations", evaluate.safety.generations),
        ):
            if value is not None and not measured:
                raise ValueError(f"register.{bound} bounds what evaluate.{key} has not measured")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The whole recipe as plain JSON values, under its YAML keys."""
        return self.model_dump(mode="json", by_alias=True)

    def fingerprint(self) -> str:
        """Twelve hex digits that change when any value changes."""
        text = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
