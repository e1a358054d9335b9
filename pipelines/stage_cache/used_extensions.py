"""Which extensions of a team's own packages a recipe uses, as a part of each stage's key."""

from pathlib import Path

from pipelines.core.extensions import fingerprint, load, names
from pipelines.core.storage import read_json
from pipelines.recipe.recipe import Model, Recipe
from pipelines.recipe.section import Extension

Used = tuple[str, str]  # the kind and the name


def used_extensions(recipe: Recipe) -> dict[str, list[Used]]:
    """Return the extensions that each stage uses.

    Args:
        recipe: The recipe, with the folders of the registered models that it starts from.
    """
    data, evaluate = recipe.data, recipe.evaluate
    families = _families(recipe.model)
    return {
        "preprocess": [
            *_named("sources", data.source.extension),
            *_named("filters", *data.filters.extensions),
            *_named("tokenizers", data.tokenizer.extension),
        ],
        "validate": _named("expectations", *recipe.validation.extensions),
        # No recipe names an accelerator: the one that is found decides what `auto` becomes.
        "train": [
            *families,
            *(("accelerators", name) for name in names("accelerators")),
            *_named("rewards", *recipe.reinforcement.of_packages),
        ],
        "evaluate": [
            *families,
            *_named("metrics", *evaluate.extensions),
            *(("tasks", name) for name in evaluate.harness.extensions),
        ],
    }


def load_extensions(recipe: Recipe) -> None:
    """Import each extension that a stage uses.

    Raises:
        UserError: One is not installed, can't be imported, or is not what its kind is.
    """
    for used in used_extensions(recipe).values():
        for kind, name in used:
            load(kind, name)


def extension_fingerprints(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return the fingerprint of each extension that a stage uses.

    Raises:
        UserError: One is not installed.
    """
    return {
        stage: {f"{kind}/{name}": fingerprint(kind, name) for kind, name in used}
        for stage, used in used_extensions(recipe).items()
    }


def _named(kind: str, *extensions: Extension | None) -> list[Used]:
    return [(kind, each.name) for each in extensions if each is not None]


def _families(model: Model) -> list[Used]:
    """Return the family of a package's own preset, or of the folder that training starts from."""
    family, slash, _ = model.preset.partition("/")
    is_own = bool(slash)
    if model.init_from is not None:
        config = Path(model.init_from) / "config.json"
        family = read_json(config).get("model_type", "") if config.is_file() else ""
        is_own = family in names("families")
    return [("families", family)] if is_own else []
