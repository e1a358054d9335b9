"""What a team's own packages add to Penstock, found by their entry points.

An installed package adds an extension by an entry point in one of the `KINDS`, and a recipe names
it. Only installed code runs: a recipe can't bring code. docs/extensions.md has an example of each.
"""

import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipelines.core.errors import UserError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OURS = "penstock"


@dataclass(frozen=True)
class Shard:
    """A part of a source that can be read by itself.

    Attributes:
        name: Unique in the source, and the same on every machine; the documents' names begin so.
        identity: Any text that changes when the content does, such as a hash or a commit.
        bytes: The size of its text, roughly: it decides how the shards are shared out.
    """

    name: str
    identity: str
    bytes: int


class Source(Protocol):
    """Where documents come from. It is made with the recipe's settings as its arguments."""

    def shards(self) -> Iterable[Shard]:
        """Return the shards, always in the same order; called when a run is prepared."""

    def read(self, shard: str) -> Iterable[Mapping[str, Any]]:
        """Return a shard's records, as the lines of a JSONL file would have them, on any worker."""


class Filter(Protocol):
    """Decides about whole documents. It is made with the recipe's settings as its arguments."""

    def reject(self, text: str) -> str | None:
        """Return the name of the rule that drops a text, such as `too_loud`; None keeps it."""


class TokenizerTrainer(Protocol):
    """Makes a tokenizer for a corpus."""

    def __call__(self, texts: Iterable[str], vocab_size: int, **settings: Any) -> "Tokenizer":
        """Return a tokenizer with at most `vocab_size` ids, `<|endoftext|>` among them.

        The same texts in the same order must give the same tokenizer.
        """


class Metric(Protocol):
    """Measures a model."""

    def __call__(self, model: Path, texts: Sequence[str], **settings: Any) -> Mapping[str, float]:
        """Return figures by name; the same model and held-out texts must give the same figures.

        Args:
            model: A folder in Hugging Face's format.
            texts: The held-out documents.
            settings: From the recipe.
        """


class Export(Protocol):
    """Writes a model in another format."""

    def __call__(self, source: Path, folder: Path) -> None:
        """Write the model in a folder of Hugging Face's format to a new, empty folder."""


class RewardFunction(Protocol):
    """Says what an answer is worth."""

    def __call__(self, prompt: str, answer: str, wanted: str, **settings: Any) -> float:
        """Return a number, mostly from 0 to 1; the same texts must give the same number.

        Args:
            prompt: What the model was asked, with the chat template's marks.
            answer: What it answered.
            wanted: The answer in the data.
            settings: From the recipe.
        """


class Kind(NamedTuple):
    """What the extensions of a kind are.

    Attributes:
        what: In words, for the error about one that is something else.
        fits: Whether an imported object is that.
    """

    what: str
    fits: Callable[[Any], bool]


def _is_class(*methods: str) -> Callable[[Any], bool]:
    return lambda made: (
        isinstance(made, type) and all(callable(getattr(made, name, None)) for name in methods)
    )


def _takes(arguments: int, made: Any) -> bool:
    """Return whether an object can be called with so many arguments, or does not say."""
    try:
        inspect.signature(made).bind_partial(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # a function of another language
        return True
    return True


def _comes_from(made: type, base: str) -> bool:
    """Return whether a class is, or inherits from, one by its full name; nothing is imported."""
    return base in (f"{each.__module__}.{each.__qualname__}" for each in made.__mro__)


_EXPECTATION = "great_expectations.expectations.expectation.Expectation"
_FAMILY = "pipelines.models.families.Family"
_HARDWARE = "pipelines.planning.hardware.Hardware"
# What an entry point of the group `penstock.KIND` is.
KINDS = {
    "sources": Kind("a class with the methods shards and read", _is_class("shards", "read")),
    "filters": Kind("a class with the method reject", _is_class("reject")),
    "tokenizers": Kind("a function of texts and a vocabulary's size", partial(_takes, 2)),
    "expectations": Kind(
        "a subclass of Great Expectations' Expectation",
        lambda made: isinstance(made, type) and _comes_from(made, _EXPECTATION),
    ),
    "metrics": Kind("a function of a model's folder and texts", partial(_takes, 2)),
    "rewards": Kind("a function of prompt, answer and wanted answer", partial(_takes, 3)),
    "tasks": Kind(
        "the Path of an existing task file of lm-evaluation-harness",
        lambda made: isinstance(made, Path) and made.is_file(),
    ),
    "families": Kind(f"a {_FAMILY}", lambda made: _comes_from(type(made), _FAMILY)),
    "accelerators": Kind(f"a {_HARDWARE}", lambda made: _comes_from(type(made), _HARDWARE)),
    "exports": Kind("a function of a model's folder and an empty one", partial(_takes, 2)),
}


def names(kind: str) -> list[str]:
    """Return the names of the installed extensions of a kind; nothing is imported."""
    return sorted(_installed(kind))


def load(kind: str, name: str) -> Any:
    """Import an extension.

    Raises:
        UserError: No installed package has it, it can't be imported, or it is not what its kind is.
    """
    entry = _entry(kind, name)
    try:
        made = entry.load()
    except Exception as error:  # whatever the package's own code raises
        raise UserError(
            f"the extension {name} of {_package(entry)} can't be imported from {entry.value}: "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error
    if not KINDS[kind].fits(made):
        raise UserError(
            f"the entry point {name} = {entry.value} of {_package(entry)} in the group "
            f"penstock.{kind} is {_described(made)}; it must be {KINDS[kind].what}: fix the package"
        )
    return made


def call(kind: str, name: str, made: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    """Call what `load` returned with a recipe's settings.

    Raises:
        UserError: It refuses these settings with a TypeError or a ValueError.
    """
    try:
        return made(*given, **settings)
    except (TypeError, ValueError) as error:
        told = " ".join(str(error).split())
        raise UserError(f"the extension {name} of penstock.{kind} refuses: {told}") from error


def fingerprint(kind: str, name: str) -> str:
    """Return what changes when an extension's results may: its code and the packages it requires.

    All files of its top-level package count, data included, and the installed version of each
    package that its own requires.

    Raises:
        UserError: No installed package has it.
    """
    entry = _entry(kind, name)
    digest = hashlib.sha256(entry.value.encode())
    for path, label in _files(entry):
        digest.update(f"\n{label}\0".encode() + path.read_bytes())
    versions = _versions(entry.dist) if entry.dist else {}
    digest.update("\n".join(f"{each}=={versions[each]}" for each in sorted(versions)).encode())
    return digest.hexdigest()


@cache
def _installed(kind: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"penstock.{kind}")}


def _entry(kind: str, name: str) -> EntryPoint:
    found = _installed(kind)
    if name not in found:
        known = f"installed are {', '.join(sorted(found))}" if found else "none is installed"
        raise UserError(
            f"no installed package has an extension {name!r} in the group penstock.{kind}; "
            f"{known}; install its package wherever Airflow and Ray run"
        )
    return found[name]


def _described(made: Any) -> str:
    if isinstance(made, type):
        return f"the class {made.__name__}"
    if inspect.isfunction(made):
        return f"the function {made.__name__}{inspect.signature(made)}"
    return f"the path {made}" if isinstance(made, Path) else f"of the type {type(made).__name__}"


def package(kind: str, name: str) -> str:
    """Return the name and version of the package that has an extension.

    Raises:
        UserError: No installed package has it.
    """
    return _package(_entry(kind, name))


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"


def _files(entry: EntryPoint) -> Iterator[tuple[Path, str]]:
    """Yield each file of the entry's top-level package, with its name relative to it."""
    top = entry.module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise UserError(f"the extension {entry.name} of {_package(entry)}: no module {top}")
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, path.relative_to(folder).as_posix()
    if not spec.submodule_search_locations and spec.origin:
        yield Path(spec.origin), top


def _versions(package: Distribution) -> dict[str, str]:
    """Return the versions of a package and of all that it requires, Penstock's own left out."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    todo = [package]
    while todo:
        each = todo.pop()
        found[canonicalize_name(each.name)] = each.version
        for requirement in map(Requirement, each.requires or ()):
            name = canonicalize_name(requirement.name)
            marker = requirement.marker
            if name in found or (marker and not marker.evaluate({"extra": ""})):
                continue
            found[name] = "none"
            try:
                needed = Distribution.from_name(name)
            except PackageNotFoundError:
                continue
            found[name] = needed.version
            if name != _OURS:  # its functions that a stage runs are in the stage's key already
                todo.append(needed)
    return found
