"""Recipes from YAML files, dotted overrides and the trigger form; every mistake is one line."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pipelines.core.checked_yaml import Loader, parse_yaml
from pipelines.core.errors import UserError
from pipelines.core.product import RECIPES, recipes_folder
from pipelines.core.settings import DEFAULT_RECIPE, PROJECT
from pipelines.recipe.data_section import Source
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import registered_label

SCHEMA = "recipe.schema.json"  # beside the recipes of a project
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
    """Return the names of the recipes that come with Penstock, the default first."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    return sorted(names, key=lambda name: name != DEFAULT_RECIPE)


def project_recipes() -> list[Path]:
    """Return the files of the project's own recipes, those with a wrong ending among them."""
    folder = recipes_folder(PROJECT)
    return sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])


def recipe_files() -> list[Path]:
    """Return the files of all recipes: the project's own, then those that come with Penstock."""
    own = [path for path in project_recipes() if path.parent != RECIPES]
    hidden = {path.name for path in own}
    shipped = (RECIPES / f"{name}.yaml" for name in shipped_recipes())
    return [*own, *(path for path in shipped if path.name not in hidden)]


def known_recipes() -> list[str]:
    """Return the names of all recipes: the project's own, then those that come with Penstock."""
    return [path.stem for path in recipe_files() if path.suffix == ".yaml"]


def load_own_recipe(path: Path) -> Recipe:
    """Read a recipe from its file in `recipes/`, whose name is the recipe's and its DAG's.

    Raises:
        UserError: As `load_recipe`, or the file has another name or ending.
    """
    where = f"recipes/{path.name}"
    if path.suffix != ".yaml":
        raise UserError(f"{where}: a recipe's file ends in .yaml; rename it to {path.stem}.yaml")
    try:
        recipe = load_recipe(path)
    except UserError as error:
        raise UserError(str(error).replace(str(path), where, 1)) from None
    if recipe.name != path.stem:
        line = _line(path.read_text(encoding="utf-8"), ["name"])
        raise UserError(
            f"{where}{line}: name = {recipe.name!r}, but the file is {path.name}; "
            "a recipe's file has its name"
        )
    return recipe


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or any YAML file by path, then apply `key=value` overrides.

    A name is that of a recipe of the project, or of one that comes with Penstock.

    Relative paths in a file start from the working directory, as in a shell.

    Raises:
        UserError: There is no such recipe, or it has invalid YAML, an unknown key or a wrong type.
    """
    path = _find(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text; a recipe is a YAML file") from error
    values = parse_yaml(text, f"{path}: not valid YAML")
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections; see `penstock recipes show`")
    for override in overrides:
        _set_dotted(values, *_split_override(override))
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        line = "" if overrides else _line(text, error.errors(include_url=False)[0]["loc"])
        raise UserError(f"{name_or_path}{line}: {_explain(error)}") from None


def parse_recipe(values: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check plain values; raise UserError with one line for the first mistake."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error)}") from None


def parse_overrides(text: str) -> dict[str, Any]:
    """Return the values of the form's `set` field: `key=value` pairs, split by lines or `;`."""
    pairs = (pair.strip() for pair in text.replace("\n", ";").split(";"))
    return dict(_split_override(pair) for pair in pairs if pair)


def override_values(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """Return a copy of `recipe` with dotted keys set to plain values, all at once."""
    values = recipe.to_dict()
    for key, value in overrides.items():
        _set_dotted(values, key, value)
    return parse_recipe(values, where=recipe.name)


def with_absolute_paths(recipe: Recipe, base: Path) -> Recipe:
    """Return a copy for any working directory: local paths are resolved against `base`."""
    values = recipe.to_dict()
    absolute: dict[str, Any] = {}
    for key in PATH_KEYS:
        value = get_dotted(values, key)
        if not value or (key == "data.source.path" and _is_a_name(recipe.data.source, base)):
            continue
        if isinstance(value, str):
            absolute[key] = value if registered_label(value) else _absolute(value, base)
        else:
            absolute[key] = [_absolute(path, base) for path in value]
    if more := values["train"]["more_checkpoints"]:
        placed = [each | {"place": _absolute(each["place"], base)} for each in more]
        absolute["train.more_checkpoints"] = placed
    return override_values(recipe, absolute)


def _is_a_name(source: Source, base: Path) -> bool:
    """Return whether it names a dataset version, or a dataset on the hub, and is not a path."""
    if source.kind == "huggingface":
        return not (base / Path(str(source.path)).expanduser()).is_dir()
    return source.kind == "dataset"


def _absolute(path: str, base: Path) -> str:
    is_url = "://" in path
    return path if is_url else str(base / Path(path).expanduser())


def schema_text() -> str:
    """Return the JSON schema of a recipe, with which an editor completes and checks YAML files."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(head | Recipe.model_json_schema(by_alias=True), indent=2) + "\n"


def dump_yaml(recipe: Recipe) -> str:
    """Return the full resolved recipe as YAML, in the models' order."""
    text: str = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)
    return text


def get_dotted(values: Mapping[str, Any], key: str) -> Any:
    """Return the value under `a.b.c` in nested mappings."""
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
    """Yield every leaf of a recipe, in the order of the models."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, prefix=f"{key}.")
        else:
            yield Leaf(key, field)


def _line(text: str, key: Sequence[str | int]) -> str:
    """Return `:line` of a key by its parts, of what the file has of it, or nothing."""
    node, line = yaml.compose(text, Loader), None
    for part in key:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        found = next((pair for pair in pairs if pair[0].value == part), None)
        if found is None:  # an item of a list, or a key that is missing
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return f":{line}" if line else ""


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path).expanduser()
    if path.suffix in {".yaml", ".yml"} or path.parent != Path():
        if not path.is_file():
            raise UserError(f"recipe file {path} does not exist; see `penstock recipes list`")
        return path
    for folder in (recipes_folder(PROJECT), RECIPES):
        if (found := folder / f"{name_or_path}.yaml").is_file():
            return found
    name = str(name_or_path)
    raise UserError(
        f"there is no recipe {name!r}{_nearest(name, known_recipes())}; "
        "`penstock recipes list` shows them, or give a path that ends in .yaml"
    )


def _split_override(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {override!r}: write key=value, such as train.lr=3e-4")
    return key.strip(), parse_yaml(value, f"--set {override!r}")


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
    """Return the key without pydantic's suffix: a union's branch or an item's index."""
    return next((leaf.key for leaf in leaves() if location.startswith(f"{leaf.key}.")), location)


def _section_keys() -> Iterator[str]:
    for leaf in leaves():
        parts = leaf.key.split(".")
        yield from (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
