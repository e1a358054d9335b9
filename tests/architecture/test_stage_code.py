"""The keys of this project's stages: what changes them, and what doesn't."""

import ast
import random
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from pipelines.core.settings import PROJECT
from pipelines.stage_cache.fingerprint import LOCK, Lock, neutral_modules, stage_codes
from pipelines.stage_cache.reach import Reached, reach
from pipelines.stage_cache.syntax import VALUES, Definition, Module, Sources

DVC = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]
ENTRIES = {name: stage["meta"]["code"] for name, stage in DVC.items() if "meta" in stage}
MUTANTS = 200
# Files that no stage reads, or only as one of its parameters.
NOT_READ = {
    "commands/project_template/*",
    "export/model_card.md",  # by register, which runs each time
    "planning/prices.yaml",
    "recipes/*.yaml",
    "platform/supervisord.conf",
    "stage_cache/neutral.yaml",
}


@pytest.fixture(scope="module")
def codes():
    return stage_codes(PROJECT)


def test_every_neutral_module_would_be_reached_and_has_a_reason():
    sources = Sources(PROJECT)
    reached = {
        definition.module.name
        for entries in ENTRIES.values()
        for definition in reach(sources, entries, ()).definitions
    }
    neutral = neutral_modules()
    assert neutral.keys() <= reached
    assert all(reason.endswith(".") for reason in neutral.values())


def test_every_package_that_a_stage_imports_is_known_by_its_name_in_the_lock(codes):
    installed, lock = packages_distributions(), Lock((PROJECT / LOCK).read_text())
    for code in codes.values():
        for module in code.reached.packages - sys.stdlib_module_names:
            names = {name.lower().replace("_", "-") for name in installed.get(module, ())}
            if names:  # some, such as kvikio, are there on machines with a GPU only
                assert names & lock.closure(frozenset({module})).keys(), module


def test_packages_that_a_stage_does_not_import_are_not_in_its_key(codes):
    never = {"ruff", "mypy", "pytest", "apache-airflow", "apache-airflow-core", "import-linter"}
    for stage, code in codes.items():
        assert not never & code.packages.keys(), stage
    assert "torch" not in codes["preprocess"].packages
    assert "great-expectations" not in codes["train"].packages
    assert {"torch", "ray", "numpy", "sympy"} <= codes["train"].packages.keys()


def test_every_file_that_is_no_code_is_a_dep_of_a_stage_or_not_read():
    package = PROJECT / "pipelines"
    files = {
        path.relative_to(PROJECT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    deps = {dep for stage in DVC.values() for dep in stage["deps"]}
    deps |= {
        path.relative_to(PROJECT).as_posix() for dep in deps for path in (PROJECT / dep).rglob("*")
    }
    not_read = {
        path.relative_to(PROJECT).as_posix() for glob in NOT_READ for path in package.glob(glob)
    }
    assert files == (deps & files) | not_read


def test_a_new_key_of_a_recipe_changes_no_code(codes):
    sources = Sources(PROJECT)
    for name in (module.name for module in sources.of_values()):
        tree = ast.parse(path(name).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                node.body.append(ast.parse("another_key: int = 3").body[0])
        sources._modules[name] = Module(name, ast.unparse(tree))
    for stage, entries in ENTRIES.items():
        changed = reach(sources, entries, neutral_modules())
        assert changed.fingerprint() == codes[stage].reached.fingerprint()


def test_every_mutant_of_reached_code_has_another_key(codes):
    chance = random.Random(20261123)
    made = 0
    sources = Sources(PROJECT)
    while made < MUTANTS:
        stage = chance.choice(list(ENTRIES))
        definition = chance.choice(sorted(codes[stage].reached.definitions, key=str))
        if definition.module.name.startswith(VALUES):
            continue
        mutant = next(mutants(definition, chance), None)
        if mutant is None:
            continue
        made += 1
        changed = with_module(mutant, sources, stage).fingerprint()
        assert changed != codes[stage].reached.fingerprint(), f"{stage}: {definition}"


def with_module(module: Module, sources: Sources, stage: str) -> Reached:
    """Of a project with another module; all others are read once."""
    before = sources.module(module.name)
    sources._modules[module.name] = module
    try:
        return reach(sources, ENTRIES[stage], neutral_modules())
    finally:
        sources._modules[module.name] = before


def mutants(definition: Definition, chance: random.Random) -> Iterator[Module]:
    """The definition's module with one constant, operator or condition of it changed."""
    tree = ast.parse(definition.module.text)
    place = next(node for node in tree.body if node.lineno == definition.node.lineno)
    where = tree.body.index(place)
    count = len([node for node in ast.walk(definition.node) if change(deepcopy(node))])
    for number in chance.sample(range(count), count):
        changed = deepcopy(definition.node)  # without docstrings and annotations
        nodes = [node for node in ast.walk(changed) if change(deepcopy(node))]
        change(nodes[number])
        tree.body[where] = changed
        yield Module(definition.module.name, ast.unparse(ast.fix_missing_locations(tree)))


def change(node: ast.AST) -> bool:
    """Change what a node does; False where there is nothing to change."""
    match node:
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() | float()):
            node.value += 1
        case ast.Constant(value=str()):
            node.value += "x"
        case ast.BinOp(op=ast.Add()):
            node.op = ast.Sub()
        case ast.BinOp(op=ast.Mult()):
            node.op = ast.Div()
        case ast.Compare(ops=[ast.Lt()]):
            node.ops = [ast.GtE()]
        case ast.Compare(ops=[ast.Eq()]):
            node.ops = [ast.NotEq()]
        case ast.BoolOp(op=ast.And()):
            node.op = ast.Or()
        case _:
            return False
    return True


def path(module: str) -> Path:
    found = Sources(PROJECT).path(module)
    assert found
    return found
