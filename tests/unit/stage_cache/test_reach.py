"""What a stage's fingerprint follows, and what changes nothing, on small projects."""

from pathlib import Path

import pytest

from pipelines.stage_cache.reach import reach
from pipelines.stage_cache.syntax import Sources

STAGE = """
from pipelines.steps import clean

def run(text):
    return clean(text)
"""
STEPS = """
LIMIT = 3

def clean(text):
    return text[:LIMIT]

def unused(text):
    return text
"""


@pytest.fixture
def project(tmp_path):
    write(tmp_path, "__init__", "")
    write(tmp_path, "stage", STAGE)
    write(tmp_path, "steps", STEPS)
    return tmp_path


def write(project: Path, name: str, text: str) -> None:
    file = project / "pipelines" / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def fingerprint(project: Path, *neutral: str) -> str:
    return reach(Sources(project), ["pipelines.stage:run"], neutral).fingerprint()


def reached(project: Path, *neutral: str) -> set[str]:
    return set(reach(Sources(project), ["pipelines.stage:run"], neutral).digests())


def test_names_lead_to_functions_and_constants_but_not_to_their_neighbours(project):
    assert reached(project) == {
        "pipelines.stage:run",
        "pipelines.steps:clean",
        "pipelines.steps:LIMIT",
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LIMIT = 3", "LIMIT = 3  # characters"),
        ("    return text[:LIMIT]", '    """Cut it."""\n    return text[:LIMIT]'),
        ("text[:LIMIT]", "text[ : LIMIT ]"),
        ("def clean(text):", "def clean(text: str) -> str:"),
        ("def unused(text):", "def unused(text, more):"),
        ("LIMIT = 3", "import logging\nLIMIT = 3"),
    ],
)
def test_what_means_the_same_has_the_same_fingerprint(project, before, after):
    was = fingerprint(project)
    assert before in STEPS
    write(project, "steps", STEPS.replace(before, after))
    assert fingerprint(project) == was


@pytest.mark.parametrize(
    "stage",
    [STAGE, "def run(text):\n    from pipelines.steps import clean\n    return clean(text)\n"],
    ids=["above", "inside"],
)
def test_another_place_is_no_change(project, stage):
    write(project, "stage", stage)
    was = fingerprint(project)
    write(project, "moved.__init__", "")
    write(project, "moved.here", STEPS)
    write(project, "stage", stage.replace("pipelines.steps", "pipelines.moved.here"))
    (project / "pipelines/steps.py").unlink()
    assert fingerprint(project) == was


@pytest.mark.parametrize(
    ("before", "after"),
    [("LIMIT = 3", "LIMIT = 4"), ("text[:LIMIT]", "text[LIMIT:]"), ("text):", "text, more=1):")],
)
def test_what_means_something_else_has_another_fingerprint(project, before, after):
    was = fingerprint(project)
    write(project, "steps", STEPS.replace(before, after))
    assert fingerprint(project) != was


def test_the_same_words_that_stand_for_something_else_are_a_change(project):
    write(project, "others", "def clean(text):\n    return text.upper()\n")
    was = fingerprint(project)
    write(project, "stage", STAGE.replace("pipelines.steps", "pipelines.others"))
    assert fingerprint(project) != was


def test_a_package_in_the_place_of_another_is_a_change(project):
    write(project, "steps", "from json import loads as clean")
    was = fingerprint(project)
    write(project, "steps", "from orjson import loads as clean")
    assert fingerprint(project) != was


def test_a_class_counts_with_its_methods_and_its_bases(project):
    write(
        project,
        "steps",
        "class Base:\n    def __call__(self): return helper()\n"
        "def helper(): return 1\n"
        "class clean(Base): pass\n",
    )
    assert {"pipelines.steps:Base", "pipelines.steps:helper"} <= reached(project)


def test_imports_inside_of_functions_attributes_and_names_passed_on_are_followed(project):
    write(project, "deep", "def work(text): return text\n")
    write(project, "between", "from pipelines.deep import work\n")
    write(
        project,
        "steps",
        "def clean(text):\n    import pipelines.between\n    return pipelines.between.work(text)\n",
    )
    assert "pipelines.deep:work" in reached(project)


def test_what_an_import_does_counts(project):
    write(project, "steps", STEPS + "import pipelines.switches\n")
    write(project, "switches", "import sys\nsys.setrecursionlimit(100)\n")
    was = fingerprint(project)
    write(project, "switches", "import sys\nsys.setrecursionlimit(200)\n")
    assert fingerprint(project) != was


def test_a_module_that_another_process_runs_counts_whole(project):
    write(project, "steps", "def clean(text):\n    return ['python', '-m', 'pipelines.child']\n")
    write(project, "child", "def work(): return 1\n\nif __name__ == '__main__':\n    work()\n")
    assert {"pipelines.child:work", "pipelines.child:__main__"} <= reached(project)


def test_a_function_that_a_decorator_hands_on_counts(project):
    write(
        project,
        "steps",
        "import torch\n@torch.library.custom_op('a::b')\ndef clean(text): return text\n"
        "@clean.register_fake\ndef _(text): return text\n",
    )
    assert "pipelines.steps:_" in reached(project)


def test_fields_of_a_recipe_are_values_and_its_methods_are_code(project):
    section = (
        "class Train:\n"
        "    steps: int = 3\n"
        "    @property\n    def tokens(self): return self.steps * {factor}\n"
        "    @property\n    def unread(self): return {unread}\n"
    )
    write(project, "recipe.recipe", section.format(factor=2, unread=1))
    write(project, "stage", "def run(recipe):\n    return recipe.train.tokens\n")
    was = fingerprint(project)
    new_key = section.replace("int = 3", "int = 4\n    warmup: int = 0")
    write(project, "recipe.recipe", new_key.format(factor=2, unread=2))
    assert fingerprint(project) == was
    write(project, "recipe.recipe", section.format(factor=3, unread=1))
    assert fingerprint(project) != was


def test_a_neutral_module_is_not_followed(project):
    assert reached(project, "pipelines.steps") == {"pipelines.stage:run"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("from pipelines.steps import gone\ndef run(): return gone()\n", "pipelines.steps has no"),
        ("from pipelines.gone import clean\ndef run(): return clean()\n", "no module pipelines"),
        ("def other(): pass\n", "there is no pipelines.stage:run"),
    ],
)
def test_what_does_not_exist_is_told(project, text, line):
    write(project, "stage", text)
    with pytest.raises(LookupError, match=line):
        reached(project)
