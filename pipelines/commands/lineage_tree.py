"""A model's `lineage.json`, and the descent of models from models, as trees for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.tree import Tree

if TYPE_CHECKING:
    from pipelines.registry.registry import ModelVersion

_Facts = Mapping[str, Any]


def family_tree(versions: "Sequence[ModelVersion]") -> Tree:
    """Return all registered versions, each below the one that its training started from."""
    tree = Tree("[bold]registered models[/]")
    labels = {each.label for each in versions}
    children: dict[str | None, list[ModelVersion]] = {}
    for each in reversed(versions):
        children.setdefault(each.parent if each.parent in labels else None, []).append(each)
    _grow(tree, None, children)
    return tree


def _grow(
    branch: Tree, parent: str | None, children: "Mapping[str | None, Sequence[ModelVersion]]"
) -> None:
    for each in children.get(parent, ()):
        aliases = "".join(f" @{alias}" for alias in each.aliases)
        lost = f"  from {each.parent}, which was deleted" if each.parent and parent is None else ""
        _grow(branch.add(escape(each.label + aliases + lost)), each.label, children)


def lineage_tree(line: Sequence[str], facts: _Facts) -> Tree:
    """Return the descent, sources, code, run and cost of a model as a tree without null values.

    Args:
        line: The labels of the versions that the model came from, the oldest first, then its own.
        facts: The content of `lineage.json`.
    """
    tree = Tree(f"[bold]{escape(line[-1])}[/]")
    if len(line) > 1:
        branch = tree.add("[bold]line of descent[/]")
        for label in line:
            branch = branch.add(escape(label))
    for title, rows in _branches(facts):
        known = {name: value for name, value in rows.items() if value not in (None, "", [], {})}
        if known:
            branch = tree.add(f"[bold]{title}[/]")
            for name, value in known.items():
                branch.add(f"{escape(name)}  {escape(_text(value))}")
    return tree


def _branches(facts: _Facts) -> Iterator[tuple[str, _Facts]]:
    run, records = facts.get("run") or {}, facts.get("records") or {}
    evaluate, hashes = records.get("evaluate") or {}, facts.get("sha256") or {}
    recipe = (facts.get("recipe") or {}).get("name")
    yield "code", _code(run, hashes)
    yield "recipe", {"name": recipe, "fingerprint": run.get("recipe_fingerprint")}
    yield "data", _data(facts, records, hashes)
    yield "parent", _parent(facts)
    yield "environment", _environment(facts)
    yield "runs", _runs(facts, run)
    yield "training", _training(facts, records.get("train") or {})
    documents = evaluate.get("documents")
    found = {"bits per byte": evaluate.get("bits_per_byte"), "held-out documents": documents}
    yield "result", found
    yield "cost", _cost(facts.get("cost") or {})


def _parent(facts: _Facts) -> _Facts:
    parent = dict(facts.get("parent") or {})
    adapter = parent.pop("adapter", None) or {}
    return parent | {f"adapter {name}": value for name, value in adapter.items()}


def _environment(facts: _Facts) -> _Facts:
    environment = facts.get("environment") or {}
    return {
        "package lock": environment.get("lock"),
        "python": environment.get("python"),
        "device": environment.get("device"),
        "image": facts.get("image"),
        "machine": _machine(facts),
    }


def _runs(facts: _Facts, run: _Facts) -> _Facts:
    return {
        "DAG run": run.get("dag_run_id"),
        "MLflow run": run.get("mlflow_address") or run.get("mlflow_run_id"),
        "trained by MLflow run": facts.get("trained_by"),
        **{f"Ray job of {stage}": job for stage, job in (facts.get("ray_jobs") or {}).items()},
    }


def _training(facts: _Facts, train: _Facts) -> _Facts:
    checkpoints = facts.get("checkpoints") or {}
    return {
        "steps": train.get("steps"),
        "tokens": train.get("tokens"),
        "layout": train.get("layout"),
        "checkpoints": checkpoints.get("place"),
        "checkpoint steps": checkpoints.get("steps"),
        "model content": train.get("model_hash"),
    }


def _code(run: _Facts, hashes: _Facts) -> _Facts:
    dirty = "changes of tracked files, in uncommitted.diff" if run.get("dirty") else None
    product = run.get("product") or {}
    return {
        "git commit": run.get("git_commit"),
        "uncommitted": dirty,
        "diff sha256": hashes.get("uncommitted.diff"),
        "Penstock": product.get("version"),
        "Penstock's code sha256": product.get("code"),
    }


def _data(facts: _Facts, records: _Facts, hashes: _Facts) -> _Facts:
    dataset = (records.get("preprocess") or {}).get("dataset") or {}
    validate = records.get("validate") or {}
    shards = (
        [each for split in ("train", "validation") for each in dataset[split]["shards"]]
        if (dataset)
        else []
    )
    name = dataset.get("name")
    return {
        "version": f"{name}@{dataset['version']}" if name else None,
        "mixture": [f"{part['name']}@{part['version']}" for part in dataset.get("mixture", ())],
        "DVC hash": dataset.get("directory_hash"),
        "source sha256": hashes.get("source.json"),
        "shards": f"{len(shards)} files; --json names each with its MD5" if shards else None,
        "expectations": f"{validate['expectations']} hold" if validate else None,
        "Data Docs": facts.get("data_docs"),
    }


def _machine(facts: _Facts) -> str | None:
    machine = facts.get("trained_on") or {}
    names = (machine.get("gpu") or {}).get("names")
    if names:
        return f"{len(names)} x {names[0]}"
    cpu = machine.get("cpu")
    return f"{cpu['cores']} cores, {cpu['architecture']}" if cpu else None


def _cost(stages: _Facts) -> _Facts:
    return {
        stage: f"{used['seconds']:.0f} s, {used['worker_hours']:.4f} worker-hours, "
        f"{used['gpu_hours']:.4f} GPU-hours" + (f", {used['money']:.2f}" if used["money"] else "")
        for stage, used in stages.items()
        if used["seconds"]
    }


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)
