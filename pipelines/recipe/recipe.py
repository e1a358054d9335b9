"""A recipe defines everything about one run, as frozen models with one section per stage.

The same models give the `--set` overrides, the JSON schema, the Airflow trigger form, MLflow's
params and DVC's `params.yaml`. `recipe_files.py` reads them from YAML.
"""

import hashlib
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pipelines.recipe.cleaning_section import Share
from pipelines.recipe.data_section import DATASET_NAME, Data
from pipelines.recipe.evaluation_section import Behaviour, Bias, Safety
from pipelines.recipe.preference_section import Preference
from pipelines.recipe.reinforcement_section import Reinforcement
from pipelines.recipe.schedule_section import (
    COLLECTION_DAG,
    MAIN_DAG,
    REFRESH,
    REFRESH_DAG,
    SWEEP_DAG,
    Schedule,
)
from pipelines.recipe.section import (
    MODEL_NAME,
    Count,
    Extension,
    Section,
    check_reference,
    form_field,
    repeated,
)
from pipelines.recipe.training_section import Adapter, Parallel, Train


class Validation(Section):
    """The conditions of the data gate."""

    min_documents: int = Field(2, ge=2, description="Least kept documents, both splits together")
    min_characters: int = Field(1, ge=1, description="In each kept document")
    max_characters: int = Field(50_000_000, ge=1, description="In each kept document")
    sample_documents: int = Field(
        2000, ge=1, description="About how many texts the following checks read"
    )
    tokens_per_word: tuple[float, float] = Field(
        (0.5, 20.0), description="The tokenizer's allowed average, least and most"
    )
    bytes_per_token: tuple[float, float] = Field(
        (0.5, 50.0), description="The tokenizer's allowed average, least and most"
    )
    max_near_duplicates: Share | None = Field(
        None,
        description="Share nearly equal to an earlier text; null: 0.02 after data.dedup.kind "
        "minhash, else 0.2",
    )
    max_pii: Share = Field(
        0.001, description="Share with personal data, if data.pii masks or drops them"
    )
    max_contaminated: Share = Field(0.0, description="Share with text of an evaluation set")
    max_malformed_conversations: Share = Field(
        0.01, description="Share whose roles do not alternate, or that the chat template refuses"
    )
    chosen_longer: tuple[Share, Share] = Field(
        (0.0, 1.0), description="Share of pairs whose chosen answer is longer, least and most"
    )
    languages: dict[str, tuple[Share, Share]] = Field(
        {}, description="Least and most share of the texts by ISO 639 code; empty: any"
    )
    max_length_drift: float = Field(
        0.25,
        gt=0,
        description="Population Stability Index of lengths in tokens against the last version",
    )
    extensions: tuple[Extension, ...] = Field(
        (), description="Expectations of packages of your own, about the sampled texts"
    )


class Model(Section):
    """The decoder that is trained."""

    preset: str = form_field(
        "llama-1m",
        "A name from `pipelines/models/presets.py`, or FAMILY/NAME of a package of your own",
    )
    init_from: str | None = Field(
        None,
        description="Weights to start from: a registered model, as models:/NAME@champion or "
        "models:/NAME@7, or a Hugging Face folder",
    )

    @field_validator("init_from")
    @classmethod
    def _names_a_version(cls, reference: str | None) -> str | None:
        return check_reference(reference)


class Questions(Section):
    """Held-out questions that the model answers, if the data are questions and answers."""

    most: int = Field(0, ge=0, description="Most questions, each answered by generation; 0: none")
    pattern: str = Field(
        r"####[ \t]*(\S[^\n]*)",
        description="Finds the part of an answer that counts; its first group, if any",
    )
    max_tokens: int = Field(256, ge=1, description="Most tokens in an answer")

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


class Harness(Section):
    """Tasks of lm-evaluation-harness that test the exported model."""

    tasks: tuple[str, ...] = Field(
        (), description="Its own tasks by name; data come from the hub or its local cache"
    )
    files: tuple[str, ...] = Field(
        (),
        description="YAML files in its format, each in its own folder with its data, without "
        "network",
    )
    extensions: tuple[str, ...] = Field(
        (), description="Tasks of packages of your own, by the names of their entry points"
    )
    limit: int | None = Field(None, ge=1, description="Most documents of each task; null: all")


class Evaluate(Section):
    """Measurements on held-out documents, and tests of behaviour, bias and safety."""

    max_bytes: int = form_field(2_000_000, "Most held-out text, in whole documents", ge=1)
    stride: float = Field(
        0.75,
        ge=0.01,
        le=1,
        description="Share of the context by which a window over a long document moves; the "
        "rest is only context",
    )
    prompts: tuple[str, ...] = Field(("def ", "import "), description="Each is continued once")
    sample_tokens: int = Field(96, ge=0, description="Tokens per continuation")
    questions: Questions = Questions()
    harness: Harness = Harness()
    budget_gb: float | None = Field(
        None,
        gt=0,
        description="Memory of the serving device in 10^9 bytes: only the best of bf16, int8 and "
        "int4 that fits is measured, compared and may become champion; null: the model as it was "
        "trained",
    )
    budget_max_loss: float = Field(
        0.02, ge=0, description="Bits per byte that it may lose against the trained model"
    )
    budget_sequences: int = Field(
        8, ge=1, description="Full-context sequences served at once within the budget"
    )
    int4_group: Literal[32, 64, 128, 256] = Field(
        128, description="How many weights share a scale in int4"
    )
    behaviour: tuple[Behaviour, ...] = Field(
        (), description="Tests of single capabilities; a candidate passes as many as the champion"
    )
    bias: Bias = Bias()
    safety: Safety = Safety()
    extensions: tuple[Extension, ...] = Field(
        (), description="Metrics of packages of your own; they are in MLflow and in the report"
    )

    @field_validator("behaviour")
    @classmethod
    def _tests_have_names_of_their_own(cls, tests: tuple[Behaviour, ...]) -> tuple[Behaviour, ...]:
        if twice := repeated([test.name for test in tests]):
            raise ValueError(f"two tests are named {', '.join(twice)}")
        return tests


QUESTIONS = "questions"  # what `evaluate.questions` asks, as a task
PAIRS = "pairs"  # whether the chosen answer of a held-out pair has the larger reward, as a task
SHORT_PAIRS = "pairs/shorter_chosen"  # the same of pairs whose chosen answer is the shorter one
PAIR_TASKS = PAIRS, SHORT_PAIRS


BITS_PER_BYTE = "bits_per_byte"


class TaskLimit(Section):
    """How much worse than the champion a candidate may be on one task."""

    task: str = Field(
        description="questions: those of evaluate.questions; pairs, and pairs/shorter_chosen: "
        "held-out pairs of answers; or a task of evaluate.harness with its metric, as in the "
        "report: arc_easy/acc"
    )
    max_loss: float = Field(
        0.0, ge=0, description="By which its mean may be below the champion's: 0.02 of accuracy"
    )


class Judge(Section):
    """A language model, at an OpenAI-compatible address, that compares what both models wrote."""

    url: str = Field(pattern=r"^https?://[^@\s]+$", description="For example https://host/v1")
    model: str = Field(min_length=1, description="The judge's name there")
    criterion: str = Field(
        "is more correct, more helpful and better written",
        min_length=1,
        description="Completes the question: which text ...?",
    )


class Register(Section):
    """The conditions for registering a model, and its name."""

    model_name: str = form_field(
        "penstock-stdlib-code", "Name of the registered model in MLflow", pattern=f"^{MODEL_NAME}$"
    )
    require_clean: bool = Field(False, description="Refuse a run with uncommitted changes")
    improves: str = Field(
        BITS_PER_BYTE,
        description="What a candidate must improve: bits_per_byte, or a task as in register.tasks; "
        "with a task, its bits per byte may be worse by max_slice_regression",
    )
    min_improvement: float = Field(
        0.0,
        ge=0,
        description="Bits per byte, or of the task's mean, by which a candidate must beat the "
        "champion",
    )
    confidence: float = Field(
        0.95,
        gt=0.5,
        le=0.999,
        description="Confidence that it does so on documents of this kind, for all candidates that "
        "are compared with one champion together",
    )
    held_out_parts: int = Field(
        1,
        ge=1,
        description="Parts that the held-out documents are divided into by their hash; candidates "
        "are compared on one until it has been used 20 times, then on the next, which is fresh",
    )
    max_slice_regression: float = Field(
        0.02,
        ge=0,
        description="Share by which its bits per byte may exceed the champion's for a source, "
        "language or length",
    )
    tasks: tuple[TaskLimit, ...] = Field(
        (),
        description="Refuse a candidate that is surely worse than this on a task, compared with "
        "the champion question by question",
    )
    judge: Judge | None = Field(
        None,
        description="Let a language model compare the samples of candidate and champion; its "
        "judgement is reported and decides nothing",
    )
    max_bias: float | None = Field(
        None,
        ge=0,
        description="Refuse if the whole interval of its bias, for or against a stereotype, is "
        "beyond this many bits per sentence; null: never",
    )
    max_extraction: Share | None = Field(
        None, description="Most training passages memorised, as a share, tested in the same way"
    )
    max_leakage: Share | None = Field(
        None, description="Most of its texts with training text's personal data, as a share"
    )
    max_drift: float | None = Field(
        None,
        gt=0,
        description="Most nats a token by which a model that learnt from pairs may move away from "
        "the one that it began as, tested in the same way; null: any",
    )
    needs_approval: bool = form_field(
        False, "A user must also approve that a better candidate becomes champion"
    )
    approval_hours: float = Field(
        72.0, gt=0, description="After this time without an answer, refuse the candidate"
    )
    license: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.+-]*$",
        description="The weights' license by Hugging Face's name, for the model card: apache-2.0; "
        "null: not recorded",
    )
    intended_use: str = Field("", description="For the model card: what the weights are for")

    @property
    def asked_tasks(self) -> tuple[TaskLimit, ...]:
        """The tasks on which two models are compared: what must improve, and the limited ones."""
        known = {BITS_PER_BYTE, *(limit.task for limit in self.tasks)}
        wanted = () if self.improves in known else (TaskLimit(task=self.improves),)
        return (*wanted, *self.tasks)

    @field_validator("tasks")
    @classmethod
    def _each_task_once(cls, tasks: tuple[TaskLimit, ...]) -> tuple[TaskLimit, ...]:
        if twice := repeated([each.task for each in tasks]):
            raise ValueError(f"two limits are of {', '.join(twice)}")
        return tasks


class Resources(Section):
    """The resources and time of a stage, and their prices."""

    workers: Count | tuple[Count, Count] = Field(2, description="Train workers: n, or [min, max]")
    max_stage_hours: float | None = Field(
        None, gt=0, description="End a stage that has run for so long; null: never"
    )
    price_per_gpu_hour: float | None = Field(
        None, ge=0, description="In any currency, including the host; null: free"
    )
    price_per_cpu_hour: float | None = Field(
        None, ge=0, description="For a worker without a GPU; null: free"
    )
    dry_run: bool = Field(
        False, description="Before a run, try its training step on GPUs that don't exist"
    )

    @property
    def is_elastic(self) -> bool:
        """Whether training continues with fewer or more workers."""
        return isinstance(self.workers, tuple)

    @property
    def worker_range(self) -> tuple[int, int]:
        """The least and the most workers, which are equal for a fixed number."""
        return self.workers if isinstance(self.workers, tuple) else (self.workers, self.workers)

    @property
    def most_workers(self) -> int:
        """The most workers that training may have."""
        return self.worker_range[1]

    @model_validator(mode="after")
    def _range_ascends(self) -> Self:
        if isinstance(self.workers, tuple) and self.workers[0] > self.workers[1]:
            raise ValueError(f"workers {list(self.workers)}: give the least first, then the most")
        return self


class Recipe(Section):
    """Everything about one run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    description: str = ""
    seed: int = form_field(42, "Seed of all randomness", ge=0, lt=2**63)
    data: Data = Data()
    validation: Validation = Validation()
    model: Model = Model()
    parallel: Parallel = Parallel()
    train: Train = Train()
    adapter: Adapter = Adapter()
    preference: Preference = Preference()
    reinforcement: Reinforcement = Reinforcement()
    evaluate: Evaluate = Evaluate()
    registration: Register = Field(Register(), alias="register")
    resources: Resources = Resources()
    schedule: Schedule = Schedule()

    @field_validator("name")
    @classmethod
    def _no_other_dag_has_the_name(cls, name: str) -> str:
        if name in (MAIN_DAG, REFRESH_DAG, SWEEP_DAG, COLLECTION_DAG):
            raise ValueError("a DAG of Penstock has this name; choose another")
        if name.endswith(REFRESH):
            raise ValueError(
                f"so the DAG is called that looks for new data of {name.removesuffix(REFRESH)}; "
                "choose another"
            )
        return name

    @field_validator("schedule")
    @classmethod
    def _new_data_have_a_name(cls, schedule: Schedule, before: ValidationInfo) -> Schedule:
        if schedule.refresh and {"name", "data"} <= before.data.keys():
            name = before.data["data"].name or before.data["name"].lower()
            if not re.fullmatch(DATASET_NAME, name):
                raise ValueError(
                    f"refresh publishes a dataset, and {name!r} can't be the name of one; "
                    "set data.name"
                )
        return schedule

    @model_validator(mode="after")
    def _a_models_tokenizer_has_a_model(self) -> Self:
        is_made_here = not self.data.source.is_published
        if self.data.tokenizer.kind == "model" and is_made_here and self.model.init_from is None:
            raise ValueError(
                "data.tokenizer.kind `model` is the tokenizer of model.init_from, which is not set"
            )
        return self

    @model_validator(mode="after")
    def _pairs_have_a_loss(self) -> Self:
        kind, data = self.preference.kind, self.data
        if data.instruction.kind == "labelled" and kind != "kto":
            raise ValueError(
                f"data.instruction.kind is labelled: preference.kind must be kto, not {kind}, as "
                "no other loss takes single answers"
            )
        if data.instruction.is_preference and kind == "none":
            raise ValueError(
                f"data.instruction.kind is {data.instruction.kind}: set preference.kind, such as "
                "dpo or simpo"
            )
        made_here = not data.source.is_published
        if kind != "none" and made_here and not data.instruction.is_preference:
            raise ValueError(
                f"preference.kind is {kind}: set data.instruction.kind to preference, for data of "
                "chosen and rejected answers"
            )
        return self

    @model_validator(mode="after")
    def _answers_can_be_rewarded(self) -> Self:
        wanted, length = self.reinforcement, self.data.sequence_length
        if not wanted.is_on:
            return self
        if self.preference.kind != "none":
            raise ValueError("a model learns by preference.kind or by reinforcement.kind; set one")
        if not self.data.source.is_published and not self.data.instruction.is_chat:
            raise ValueError(
                "reinforcement.kind answers prompts: set data.instruction.kind to prompt_response "
                "or messages"
            )
        if self.train.global_batch_size % wanted.answers:
            raise ValueError(
                f"train.global_batch_size is {self.train.global_batch_size}, but answers come in "
                f"groups of reinforcement.answers = {wanted.answers}; set a multiple of it"
            )
        if wanted.max_tokens >= length:
            raise ValueError(
                f"reinforcement.max_tokens is {wanted.max_tokens}, but a prompt and its answer "
                f"have only data.sequence_length = {length} tokens; lower it"
            )
        return self

    @model_validator(mode="after")
    def _what_is_bounded_is_measured(self) -> Self:
        demands, evaluate, safety = self.registration, self.evaluate, self.evaluate.safety
        for bound, value, key, measured in (
            ("bias", demands.max_bias, "evaluate.bias.enabled", evaluate.bias.enabled),
            ("extraction", demands.max_extraction, "evaluate.safety.documents", safety.documents),
            ("leakage", demands.max_leakage, "evaluate.safety.generations", safety.generations),
            ("drift", demands.max_drift, "preference.kind", self.preference.needs_reference),
        ):
            if value is not None and not measured:
                raise ValueError(f"register.max_{bound} limits what {key} has not measured")
        harness = evaluate.harness
        for limit in demands.asked_tasks:
            measured_by = {
                QUESTIONS: ("evaluate.questions.most", evaluate.questions.most > 0),
                **dict.fromkeys(PAIR_TASKS, ("preference.kind", self.preference.kind != "none")),
            }
            key, asked = measured_by.get(limit.task, ("evaluate.harness", harness != Harness()))
            if not asked:
                raise ValueError(
                    f"register.tasks or register.improves names {limit.task}, which {key} does not "
                    "measure"
                )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the whole recipe as plain JSON values, under its YAML keys."""
        return self.model_dump(mode="json", by_alias=True)

    def fingerprint(self) -> str:
        """Return twelve hex digits that change when any value changes."""
        text = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
