"""The README.md of a registered model, which describes its use, its figures and its limits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.formatting import UNKNOWN, amount, duration
from pipelines.export.model_card_measured import cell, measured, table, verdict_text
from pipelines.export.model_card_metadata import data_name, metadata
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import dump_yaml
from pipelines.recipe.section import registered_label
from pipelines.run.records import EvaluateRecord, PreprocessRecord, TrainRecord
from pipelines.run.verdict import Verdict

TEMPLATE = Path(__file__).with_name("model_card.md")
_TEXT = "It continues text like its training data and nothing else: it follows no instructions."
_CHAT = "It answers prompts like those of its training data, by the tokenizer's chat template."
_PII = {
    "off": "not looked for",
    "report": "counted, but not changed",
    "mask": "masked",
    "drop": "documents that contain it are dropped",
}
_DEDUP = {"exact": "exact ones are dropped", "minhash": "exact and near ones are dropped"}


def model_card(
    recipe: Recipe,
    preprocess: PreprocessRecord,
    train: TrainRecord,
    evaluate: EvaluateRecord,
    facts: Mapping[str, Any],
    verdict: Verdict,
    family: str,
) -> str:
    """Return a model card in Hugging Face's format.

    Args:
        recipe: The run's recipe.
        preprocess: The record of the preprocess stage, which made the data.
        train: The record of the train stage.
        evaluate: The record of the evaluate stage, with the figures.
        facts: The lineage, as in `lineage.json`.
        verdict: The gate's verdict.
        family: The architecture's family, such as `llama`.
    """
    size = evaluate.right_size
    values = {
        **_model(recipe, train),
        **measured(evaluate),
        "verdict": verdict_text(verdict),
        **_data(recipe, preprocess),
        "training": _training(recipe, train, facts),
        "cost": _cost(facts.get("cost") or {}),
        "model_hash": (size.model_hash if size else None) or train.model_hash,
        **_lineage(recipe, facts.get("run") or {}),
    }
    text = TEMPLATE.read_text(encoding="utf-8").format(**values)
    return metadata(recipe, preprocess.dataset, evaluate, family) + text


def _model(recipe: Recipe, train: TrainRecord) -> dict[str, object]:
    return {
        "name": recipe.registration.model_name,
        "description": recipe.description or "A language model.",
        "parameters": train.parameters,
        "recipe": recipe.name,
        "start": _start(recipe),
        "use": _use(recipe),
        "steps": train.steps,
        "tokens": train.tokens,
        "context": recipe.data.sequence_length,
        "license": _license(recipe),
    }


def _data(recipe: Recipe, preprocess: PreprocessRecord) -> dict[str, object]:
    dataset = preprocess.dataset
    content = f" DVC's hash of it is `{dataset.directory_hash}`." if dataset.directory_hash else ""
    return {
        "splits": _splits(preprocess),
        "source": data_name(recipe, dataset),
        "dataset_hash": content,
        "rejects": _rejects(preprocess.stats),
        "dedup": _DEDUP[recipe.data.dedup.kind],
        "pii": _PII[recipe.data.pii.action],
        "vocabulary": dataset.vocab_size,
        "tokenizer": recipe.data.tokenizer.kind,
    }


def _lineage(recipe: Recipe, run: Mapping[str, Any]) -> dict[str, object]:
    return {
        "commit": run.get("git_commit", "unknown"),
        "dirty": " with uncommitted changes" if run.get("dirty") else "",
        "fingerprint": recipe.fingerprint(),
        "yaml": dump_yaml(recipe),
    }


def _start(recipe: Recipe) -> str:
    """Return a sentence on the weights that training started from, and on the adapter."""
    if recipe.model.init_from is None:
        return ""
    start = registered_label(recipe.model.init_from) or Path(recipe.model.init_from).name
    text = f" Training started from `{start}`"
    if recipe.adapter.kind == "none":
        return f"{text}."
    method = {"lora": "LoRA", "qlora": "QLoRA"}[recipe.adapter.kind]
    return (
        f"{text}, whose weights\n{method} did not change; the adapter is merged here, and is also "
        "in `adapter/`, in peft's\nformat."
    )


def _use(recipe: Recipe) -> str:
    what = _CHAT if recipe.data.instruction.is_chat else _TEXT
    return " ".join(filter(None, (recipe.registration.intended_use, what)))


def _splits(preprocess: PreprocessRecord) -> str:
    dataset = preprocess.dataset
    rows = [
        (name, f"{split.documents:,}", f"{split.bytes:,}", f"{split.tokens:,}")
        for name, split in (("train", dataset.train), ("validation", dataset.validation))
    ]
    return table(("split", "documents", "bytes of text", "tokens"), rows)


def _rejects(stats: Mapping[str, Any]) -> str:
    """Return text such as `Of 95 documents, 89 were kept. Dropped: 4 duplicate, 2 empty.`."""
    counted = stats.get("documents")
    if not counted:
        return ""
    dropped: Mapping[str, int] = counted["dropped"]
    reasons = (f"{count:,} {reason.replace('_', ' ')}" for reason, count in dropped.items())
    kept = f"Of {counted['in']:,} documents, {counted['kept']:,} were kept."
    return f"{kept} Dropped: {cell(', '.join(reasons))}." if dropped else kept


def _training(recipe: Recipe, train: TrainRecord, facts: Mapping[str, Any]) -> str:
    machine, environment = facts.get("trained_on") or {}, facts.get("environment") or {}
    layout = ", ".join(f"{key} {value}" for key, value in train.layout.items())
    names = (machine.get("gpu") or {}).get("names")
    cpu = machine.get("cpu") or {}
    processors = f"{cpu['cores']} cores, {cpu['architecture']}" if cpu else UNKNOWN
    versions = machine.get("versions") or {}
    rows = [
        ("layout over processes", layout or UNKNOWN),
        ("machine of rank 0", f"{len(names)} x {names[0]}" if names else processors),
        ("precision", str(train.layout.get("train.precision", recipe.train.precision))),
        ("optimizer", f"{recipe.train.optimizer}, peak learning rate {recipe.train.lr:g}"),
        ("global batch", f"{recipe.train.global_batch_size:,} samples"),
        ("sequence length", f"{recipe.data.sequence_length:,} tokens"),
        ("torch", str(versions.get("torch", UNKNOWN))),
        ("package lock", str(environment.get("lock", UNKNOWN))),
    ]
    return table(("training", ""), rows)


def _cost(costs: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        (
            stage,
            duration(used["seconds"]),
            amount(used["worker_hours"]),
            amount(used["gpu_hours"]),
            amount(used["money"]) if used["money"] else UNKNOWN,
        )
        for stage, used in costs.items()
        if used["seconds"]
    ]
    if not rows:
        return "The cost is unknown: all stages came from the stage cache."
    columns = ("stage", "time", "worker-hours", "GPU-hours", "cost")
    return f"Stages that are not listed came from the stage cache.\n\n{table(columns, rows)}"


def _license(recipe: Recipe) -> str:
    follows = "a licence must agree with the licences of the training data, which were not checked."
    if recipe.registration.license:
        return f"The licence of the weights is `{recipe.registration.license}`; {follows}"
    return f"No licence of the weights is recorded; {follows}"
