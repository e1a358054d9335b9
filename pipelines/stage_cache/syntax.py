"""Splits the project's source files into definitions, and finds the names that each one reads.

Comments, docstrings, functions' annotations and formatting are ignored, so that two texts with the
same meaning are equal.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pipelines.core.product import CODE

# Modules whose classes only hold values: a recipe's values are parameters of the stages, and the
# settings say where services are. A stage's code has only those of their methods that it calls.
VALUES = (
    "pipelines.core.settings",
    "pipelines.recipe.cleaning_section",
    "pipelines.recipe.data_section",
    "pipelines.recipe.evaluation_section",
    "pipelines.recipe.preference_section",
    "pipelines.recipe.recipe",
    "pipelines.recipe.reinforcement_section",
    "pipelines.recipe.recipe_files",
    "pipelines.recipe.schedule_section",
    "pipelines.recipe.section",
    "pipelines.recipe.training_section",
)
# Packages that register a class when it is defined, and later find it by a string.
_REGISTERING = frozenset({"great_expectations"})
_VALIDATORS = frozenset({"field_validator", "model_validator"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Imported:
    """The meaning of an imported name: a module, or a name in that module."""

    module: str
    name: str | None = None


@dataclass(frozen=True, eq=False)
class Definition:
    """A statement that defines a name of a module, or has an effect when the module is imported."""

    module: "Module"
    name: str
    node: ast.stmt

    def __str__(self) -> str:
        return f"{self.module.name}:{self.name}"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the syntax tree alone, regardless of what its names mean.

        Imports inside it are ignored: they say where something is, and not what it is.
        """
        node: ast.AST = self.node
        if any(isinstance(each, _IMPORTS) for each in self._nodes):
            node = _WithoutImports().generic_visit(deepcopy(node))
        return hashlib.sha256(ast.dump(node).encode()).hexdigest()

    @cached_property
    def names(self) -> frozenset[tuple[str, ...]]:
        """The names that it reads, each with its attributes: `np.random.rand` has three parts."""
        return frozenset(_names(self.node))

    @cached_property
    def words(self) -> frozenset[str]:
        """The attribute names and the strings in it."""
        attributes = {node.attr for node in self._nodes if isinstance(node, ast.Attribute)}
        values = {node.value for node in self._nodes if isinstance(node, ast.Constant)}
        return frozenset(attributes | {value for value in values if isinstance(value, str)})

    @cached_property
    def imports(self) -> dict[str, Imported]:
        """The imports inside it, by local name."""
        return dict(_imports(self._nodes))

    @cached_property
    def imported_modules(self) -> frozenset[str]:
        """The modules that imports inside it may load: `from a import b` may load two."""
        return frozenset(_imported_modules(self._nodes))

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.node))

    @property
    def lines(self) -> list[str]:
        """Its source lines, with its decorators."""
        first = [node.lineno for node in getattr(self.node, "decorator_list", [])]
        whole = slice(min([*first, self.node.lineno]) - 1, self.node.end_lineno)
        return self.module.text.splitlines(keepends=True)[whole]


class _WithoutImports(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST | None:
        return None if isinstance(node, _IMPORTS) else self.generic_visit(node)


class Module:
    """A source file: what it imports, defines and does."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.imports: dict[str, Imported] = {}
        self.imported_modules: set[str] = set()
        self.definitions: dict[str, list[Definition]] = {}
        # Functions that a decorator passes to another function, as `@decode.register_fake` does.
        self.handed: dict[str, list[Definition]] = {}
        self.effects: list[Definition] = []
        self.main: list[Definition] = []  # what runs with `python -m`
        self.methods: dict[str, list[Definition]] = {}  # methods of classes that only hold values
        tree = ast.parse(text)
        _remove_words(tree)
        for node in tree.body:
            self._add(node)

    @property
    def all(self) -> list[Definition]:
        """Everything that it defines and does."""
        return [*(each for many in self.definitions.values() for each in many), *self.effects]

    def _add(self, node: ast.stmt) -> None:
        match node:
            case ast.Pass() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.Import() | ast.ImportFrom():
                self.imports.update(_imports([node]))
                self.imported_modules.update(_imported_modules([node]))
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                self.main.append(Definition(self, "__main__", node))
            case ast.ClassDef() if self.name in VALUES:
                self._add_values(node)
            case _:
                self._add_definition(node)

    def _add_definition(self, node: ast.stmt) -> None:
        names = set(_defined(node))
        if not names:
            self.effects.append(Definition(self, f"line {node.lineno}", node))
        for name in names:
            definition = Definition(self, name, node)
            self.definitions.setdefault(name, []).append(definition)
            if isinstance(node, ast.ClassDef) and self._registers_itself(node):
                self.effects.append(definition)
            for decorator in getattr(node, "decorator_list", []):
                for first, *_ in _names(decorator):
                    self.handed.setdefault(first, []).append(definition)

    def _registers_itself(self, node: ast.ClassDef) -> bool:
        bases = (self.imports.get(first) for base in node.bases for first, *_ in _names(base))
        return any(base and base.module.partition(".")[0] in _REGISTERING for base in bases)

    def _add_values(self, node: ast.ClassDef) -> None:
        """Add the methods one by one, without the fields and their validators."""
        for each in node.body:
            if isinstance(each, _FUNCTIONS) and not _is_validator(each):
                method = Definition(self, f"{node.name}.{each.name}", each)
                self.methods.setdefault(each.name, []).append(method)
        node.body = [ast.Pass()]
        self.definitions.setdefault(node.name, []).append(Definition(self, node.name, node))


class Sources:
    """The modules below a folder; each is read at its first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return the module with a dotted name, or None if the project has no such module."""
        if name not in self._modules:
            file = self.path(name)
            self._modules[name] = _module(name, file.read_text(encoding="utf-8")) if file else None
        return self._modules[name]

    def of_values(self) -> list[Module]:
        """Return the modules whose classes only hold values."""
        return [module for name in VALUES if (module := self.module(name))]

    def path(self, name: str) -> Path | None:
        """Return the file of a module, or None if the project has no such module."""
        if name.partition(".")[0] not in CODE:
            return None
        place = self._folder.joinpath(*name.split("."))
        files = (place.with_suffix(".py"), place / "__init__.py")
        return next((file for file in files if file.is_file()), None)


# A checkout and the workspaces that it is compared with have nearly all their texts in common.
_module = lru_cache(maxsize=1024)(Module)


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, Imported]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name if each.asname else each.name.partition(".")[0]
                yield each.asname or first, Imported(first)
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                yield each.asname or each.name, Imported(node.module or "", each.name)


def _imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement defines in its module."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _defined(child)


def _names(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield names that are read, each with the attributes that follow."""
    chain: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        chain.insert(0, inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *chain)
        return
    for child in ast.iter_child_nodes(inner if chain else node):
        yield from _names(child)


def _is_validator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    called = (each.func for each in function.decorator_list if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Name) and each.id in _VALIDATORS for each in called)


def _remove_words(tree: ast.AST) -> None:
    """Remove docstrings and annotations, except on class fields, where they have an effect."""
    for node in ast.walk(tree):
        if (
            isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module))
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, _FUNCTIONS):
            node.returns = None
        if not isinstance(node, ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list):
                    setattr(node, field, [_without_annotation(each) for each in body])


def _without_annotation(node: ast.stmt) -> ast.stmt:
    if not isinstance(node, ast.AnnAssign):
        return node
    if node.value is None:
        return ast.copy_location(ast.Pass(), node)
    return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)
