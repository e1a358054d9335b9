"""What a stage's fingerprint says of its code, against what runs."""

import inspect
import random
import shutil
import string
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from pipelines.core.settings import PROJECT
from pipelines.core.storage import folder_hash
from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.records import output_folder
from pipelines.stage_cache.fingerprint import neutral_modules, stage_codes
from pipelines.stage_cache.syntax import VALUES, Definition
from pipelines.stages.evaluate import evaluation
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.train import train_stage
from pipelines.stages.validate import data_gate
from tests.integration.test_dataset_stages import open_folder

STAGES: dict[str, Callable[[Recipe, Path], Any]] = {
    "preprocess": preprocessing.run,
    "validate": data_gate.run,
    "train": train_stage.run,
    "evaluate": evaluation.run,
}
# Much of what a recipe may ask for at once, so that much of the code runs.
OVERRIDES = [
    "data.source.kind=files",
    *(f"data.filters.{name}.enabled=true" for name in ("length", "symbol_ratio", "c4")),
    "data.filters.c4.min_sentences=0",
    "data.pii.action=mask",
    "data.dedup.kind=minhash",
    "data.tokenizer.kind=bpe",
    "data.tokenizer.vocab_size=300",
    "data.packing=best_fit",
    "train.steps=4",
    "train.log_every=2",
    "evaluate.sample_tokens=4",
    "evaluate.safety.generations=2",
    "evaluate.bias.enabled=true",
]
WORDS = [a + b + c for a in "bdgklm" for b in "aeiou" for c in string.ascii_lowercase]


class Call(NamedTuple):
    """A function of the project that ran."""

    module: str
    name: str
    line: int  # of its definition


class Done:
    """A run whose stages are all done, and the functions that each called."""

    def __init__(self, folder: Path) -> None:
        corpus = folder / "corpus"
        corpus.mkdir()
        words = random.Random(1)
        for number in range(40):
            lines = (" ".join(words.choices(WORDS, k=9)).capitalize() for _ in range(30))
            (corpus / f"{number:02}.txt").write_text(". Write to a@b.org.\n".join(lines) + ".\n")
        self.recipe = load_recipe("debug", [*OVERRIDES, f"data.source.path={corpus}"])
        self.workspace = open_folder(
            folder / "run", self.recipe, fingerprint_inputs(self.recipe.data)
        )
        self.ran = {name: self.run(name) for name in STAGES}
        self.outputs = {name: self.output(name) for name in STAGES}

    def run(self, stage: str) -> set[Call]:
        """Run a stage; the functions of the project that it called."""
        with recorded() as found:
            STAGES[stage](self.recipe, self.workspace)
        return found

    def output(self, stage: str) -> str:
        """The hash of what a stage wrote."""
        return folder_hash(output_folder(self.workspace, stage))


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Done:
    return Done(tmp_path_factory.mktemp("code"))


@contextmanager
def recorded() -> Iterator[set[Call]]:
    """The functions of the project that any thread calls in the block.

    Neither what an import does, which another rule follows, nor what neutral modules call.
    """
    neutral = tuple(neutral_modules())
    found: set[Call] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith(("pipelines.", "ray_jobs.")):
            return
        code = frame.f_code
        if code.co_filename.startswith("<"):  # of a dataclass, which has made it
            return
        call = Call(module, code.co_qualname, code.co_firstlineno)
        if call not in found and not any(left_out(each) for each in callers(frame)):
            found.add(call)

    def left_out(frame: FrameType) -> bool:
        module = frame.f_globals.get("__name__", "")
        imports = frame.f_code.co_name == "<module>" and module.startswith("pipelines.")
        return imports or module.startswith(neutral)

    sys.setprofile(look)
    threading.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@pytest.mark.parametrize("stage", STAGES)
def test_all_that_a_stage_runs_is_in_its_fingerprint(done, stage):
    reached: dict[str, list[range]] = {}
    for definition in stage_codes(PROJECT)[stage].reached.definitions:
        reached.setdefault(definition.module.name, []).append(lines(definition))
    missed = {
        f"{call.module}:{call.name}"
        for call in done.ran[stage]
        if not any(call.line in part for part in reached.get(call.module, ()))
        and not call.module.startswith(VALUES)  # what checks values as it reads them is in no key
    }
    assert missed == set()


def lines(definition: Definition) -> range:
    first = [node.lineno for node in getattr(definition.node, "decorator_list", [])]
    return range(min([*first, definition.node.lineno]), (definition.node.end_lineno or 0) + 1)


@pytest.mark.parametrize("stage", STAGES)
def test_neutral_modules_can_say_anything_and_outputs_stay(done, stage):
    shutil.rmtree(output_folder(done.workspace, stage))
    with wrong(list(neutral_modules())) as asked:
        STAGES[stage](done.recipe, done.workspace)
    assert asked
    assert done.output(stage) == done.outputs[stage]


def test_a_module_that_is_not_neutral_is_noticed(done):
    with wrong(["pipelines.data.normalize"]):
        preprocessing.run(done.recipe, done.workspace)
    assert done.output("preprocess") != done.outputs["preprocess"]
    preprocessing.run(done.recipe, done.workspace)


@contextmanager
def wrong(modules: list[str]) -> Iterator[set[str]]:
    """Every plain value that functions of these modules return is another one; which were asked."""
    asked: set[str] = set()
    ours = [import_module(name) for name in modules]
    with pytest.MonkeyPatch.context() as patch:
        for module in ours:
            for value in list(vars(module).values()):
                if inspect.isfunction(value) and value.__module__ == module.__name__:
                    replace_everywhere(patch, value, distorted(value, asked))
                elif inspect.isclass(value) and value.__module__ == module.__name__:
                    for each, method in list(vars(value).items()):
                        if isinstance(method, FunctionType) and not each.startswith("__"):
                            patch.setattr(value, each, distorted(method, asked))
        yield asked


def replace_everywhere(patch: pytest.MonkeyPatch, old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith(("pipelines", "ray_jobs")):
            for name, value in list(vars(module).items()):
                if value is old:
                    patch.setattr(module, name, new)


def distorted(function: FunctionType, asked: set[str]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):
        return function

    def call(*arguments: Any, **named: Any) -> Any:
        asked.add(f"{function.__module__}:{function.__qualname__}")
        return another(function(*arguments, **named))

    return call


def another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 + 1
        case str():
            return f"{value}~"
        case tuple() if type(value) is tuple:
            return tuple(map(another, value))
        case list():
            return [another(each) for each in value]
        case dict():
            return {key: another(each) for key, each in value.items()}
    return value
