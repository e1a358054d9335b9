"""Recipes from YAML files, dotted overrides and the trigger form; every mistake is one line."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pipelines.core.errors import UserError, one_line
from pipelines.core.settings import DEFAULT_RECIPE
from pipelines.recipe.data_section import Source
from pipelines.recipe.recipe import Recipe

SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
RESOLVED = "resolved"  # the key of a whole recipe in a DAG run's `conf`
PATH_KEYS = (
    "data.source.path",
    "data.tokenizer.path",
    "data.instruction.chat_template",
    "data.decontamination.against",
    "model.init_from",
    "adapter.init_from",
    "train.checkpoints",
    "evaluate.bias.templates",
    "evaluate.harness.files",
)


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with Penstock, the default first."""
    names = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    return sorted(names, key=lambda name: name != DEFAULT_RECIPE)


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a shipped recipe by name or any YAML file by path, then apply `key=value` overrides.

    Relative paths in a file are taken from the working directory, as a shell would.

    Raises:
        UserError: no such recipe, broken YAML, an unknown key or an ill-typed value.
    """
    path = _find(name_or_path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text; a recipe is a YAML file") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections; see `penstock recipes show`")
    for override in overrides:
        _set_dotted(values, *_split_override(override))
    return parse_recipe(values, where=str(name_or_path))


def parse_recipe(values: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check plain values; raises UserError with one line for the first mistake."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error)}") from None


def parse_overrides(text: str) -> dict[str, Any]:
    """Values of the trigger form's `set` field: `key=value` pairs, one a line or between `;`."""
    pairs = (pair.strip() for pair in text.replace("\n", ";").split(";"))
    return dict(_split_override(pair) for pair in pairs if pair)


def override_values(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """A copy of `recipe` with dotted keys set to plain values, all at once."""
    values = recipe.to_dict()
    for key, value in overrides.items():
        _set_dotted(values, key, value)
    return parse_recipe(values, where=recipe.name)


def with_absolute_paths(recipe: Recipe, base: Path) -> Recipe:
    """A copy that works from any directory: local paths are resolved against `base`."""
    values = recipe.to_dict()
    absolute: dict[str, str | list[str]] = {}
    for key in PATH_KEYS:
        value = get_dotted(values, key)
        if not value or (key == "data.source.path" and _is_a_name(recipe.data.source, base)):
            continue
        if isinstance(value, str):
            absolute[key] = _absolute(value, base)
        else:
            absolute[key] = [_absolute(path, base) for path in value]
    return override_values(recipe, absolute)


def _is_a_name(source: Source, base: Path) -> bool:
    """Tell whether it names a dataset version, or a dataset on the hub, and so is no path."""
    if source.kind == "huggingface":
        return not (base / Path(str(source.path)).expanduser()).is_dir()
    return source.kind == "dataset"


def _absolute(path: str, base: Path) -> str:
    is_url = "://" in path
    return path if is_url else str(base / Path(path).expanduser())


def dump_yaml(recipe: Recipe) -> str:
    """The full resolved recipe as YAML, in the models' order."""
    text: str = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)
    return text


def get_dotted(values: Mapping[str, Any], key: str) -> Any:
    """The value under `a.b.c` in nested mappings."""
    for part in key.split("."):
        values = values[part]
    return values


@dataclass(frozen=True)
class Leaf:
    """One value of a recipe: its dotted key and how pydantic declares it."""

    key: str
    field: FieldInfo

    @property
    def in_trigger_form(self) -> bool:
        """Whether the Airflow trigger form shows it."""
        extra = self.field.json_schema_extra
        return isinstance(extra, dict) and bool(extra.get("trigger_form"))


def leaves(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[Leaf]:
    """Every leaf of a recipe, in the order of the models."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, prefix=f"{key}.")
        else:
            yield Leaf(key, field)


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path).expanduser()
    if path.suffix in {".yaml", ".yml"} or path.parent != Path():
        if not path.is_file():
            raise UserError(f"recipe file {path} does not exist; `penstock recipes list`")
        return path
    shipped = SHIPPED / f"{name_or_path}.yaml"
    if not shipped.is_file():
        name = str(name_or_path)
        raise UserError(
            f"no recipe is named {name!r}{_nearest(name, shipped_recipes())}; "
            "`penstock recipes list` shows them, or give a path that ends in .yaml"
        )
    return shipped


def _split_override(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {override!r}: write key=value, for example train.lr=3e-4")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: {one_line(error)}") from error


def _set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        child = values.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {key}: {parent} is a single value, not a section")
        values = child
    values[last] = value


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = _real_key(".".join(str(part) for part in first["loc"]))
    if first["type"] == "extra_forbidden":
        known = [leaf.key for leaf in leaves()] + list(_section_keys())
        return f"unknown key {key} = {first['input']!r}{_nearest(key, known)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    message = str(first["msg"]).removeprefix("Value error, ")
    if isinstance(first["input"], dict):
        return f"{key}: {message}" if key else message
    return f"{key} = {first['input']!r}: {message}"


def _real_key(location: str) -> str:
    """Without what pydantic appends to a leaf: a union's branch, an item's index."""
    return next((leaf.key for leaf in leaves() if location.startswith(f"{leaf.key}.")), location)


def _section_keys() -> Iterator[str]:
    for leaf in leaves():
        parts = leaf.key.split(".")
        yield from (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
