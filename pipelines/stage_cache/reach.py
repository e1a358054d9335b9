"""Finds the code that a stage reaches, following names in syntax trees from its entry functions.

Names are followed, calls are not: code that has an object of a class got it from code that names
the class, so a class counts with all of its methods. Extra rules cover what names do not show:

- a module that another process runs (`python -m pipelines.x`) is named by a string;
- a statement that has an effect when its module is imported counts wherever the module is imported,
  and so does a class that registers itself with a package, such as Great Expectations;
- a function that a decorator passes to another function counts with that other function;
- a class that only holds values, such as a section of the recipe, counts with only the methods
  whose names are read somewhere: its values are among the stage's parameters.

The place of a definition does not count, so moving a function changes nothing.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from pipelines.core.product import CODE
from pipelines.stage_cache.syntax import Definition, Imported, Module, Sources


@dataclass(frozen=True)
class Reached:
    """The code of a stage."""

    definitions: dict[Definition, dict[str, str]]  # each with the meanings of its names
    packages: frozenset[str]  # top-level names of modules from outside the project

    def digests(self) -> dict[str, str]:
        """Return the fingerprint of each definition, by `module:name`."""
        found: dict[str, list[str]] = {}
        for definition, means in self.definitions.items():
            parts = [definition.digest, *(f"{name}={what}" for name, what in sorted(means.items()))]
            found.setdefault(str(definition), []).append("\n".join(parts))
        return {name: _sha256(sorted(texts)) for name, texts in found.items()}

    def fingerprint(self) -> str:
        """Return one fingerprint of all definitions, regardless of their files and order."""
        return _sha256(sorted(set(self.digests().values())))


def reach(sources: Sources, entries: Iterable[str], neutral: Iterable[str]) -> Reached:
    """Return the code that names reach from the entry functions.

    Args:
        sources: the project's code.
        entries: the stage's entry functions, each written `module:function`.
        neutral: modules and packages that are not followed, as they cannot change a result.

    Raises:
        LookupError: a module of the project, or a name in it, does not exist.
    """
    return _Walk(sources, tuple(neutral)).from_entries(entries)


class _Walk:
    def __init__(self, sources: Sources, neutral: tuple[str, ...]) -> None:
        self._sources = sources
        self._neutral = neutral
        self._found: dict[Definition, dict[str, str]] = {}
        self._packages: set[str] = set()
        self._imported_modules: set[str] = set()
        self._todo: list[Definition] = []
        self._methods: dict[str, list[Definition]] = {}  # not reached yet
        for module in sources.of_values():
            for name, methods in module.methods.items():
                self._methods.setdefault(name, []).extend(methods)

    def from_entries(self, entries: Iterable[str]) -> Reached:
        for entry in entries:
            name, _, function = entry.partition(":")
            module = self._sources.module(name)
            if module is None or function not in module.definitions:
                raise LookupError(f"there is no {entry}")
            self._add(module.definitions[function])
        while self._todo:
            self._follow(self._todo.pop())
        return Reached(self._found, frozenset(self._packages))

    def _add(self, definitions: Iterable[Definition]) -> None:
        for definition in definitions:
            if definition not in self._found:
                self._found[definition] = {}
                self._todo.append(definition)
                self._import(definition.module.name)

    def _import(self, name: str) -> None:
        """Add the statements that run when a module is imported, and those of its own imports."""
        if name in self._imported_modules or self._is_neutral(name):
            return
        self._imported_modules.add(name)
        module = self._sources.module(name)
        if module is None:
            return
        if package := name.rpartition(".")[0]:
            self._import(package)
        self._add(module.effects)
        for imported in module.imported_modules:
            self._import(imported)

    def _follow(self, definition: Definition) -> None:
        module = definition.module
        means = self._found[definition]
        for name in definition.names:
            first = definition.imports.get(name[0]) or module.imports.get(name[0])
            if first is not None:
                means[".".join(name)] = self._follow_import(first, name[1:])
            elif name[0] in module.definitions:
                means[name[0]] = self._take(module.definitions[name[0]])
        self._add(module.handed.get(definition.name, ()))
        for imported in definition.imported_modules:
            self._import(imported)
        for word in definition.words:
            self._add(self._methods.pop(word, ()))
            if "." in word and word.isascii() and (named := self._sources.module(word)):
                means[word] = self._take_module(named, run=True)

    def _follow_import(self, start: Imported, attributes: tuple[str, ...]) -> str:
        """Follow an imported name through modules to its definition; return its meaning."""
        at = start.module
        names = [*([start.name] if start.name else []), *attributes]
        while True:
            if at.partition(".")[0] not in CODE:
                self._packages.add(at.partition(".")[0])
                return ".".join([at, *names])
            if self._is_neutral(at):
                return "neutral"
            module = self._sources.module(at)
            if module is None:
                raise LookupError(f"there is no module {at}")
            if not names:
                return self._take_module(module)
            name = names[0]
            if self._sources.path(f"{at}.{name}"):
                at = f"{at}.{name}"
                names = names[1:]
                continue
            if name in module.definitions:
                return self._take(module.definitions[name])
            again = module.imports.get(name)
            if again is None:
                raise LookupError(f"{at} has no {name}")
            at, names = again.module, [*([again.name] if again.name else []), *names[1:]]

    def _take(self, definitions: list[Definition]) -> str:
        if self._is_neutral(definitions[0].module.name):
            return "neutral"
        self._add(definitions)
        return " ".join(definition.digest for definition in definitions)

    def _take_module(self, module: Module, *, run: bool = False) -> str:
        if self._is_neutral(module.name):
            return "neutral"
        self._add(module.all)
        if run:
            self._add(module.main)
        return "module"

    def _is_neutral(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self._neutral)


def _sha256(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
