"""Values that may be `auto` are read where that is meant; all else asks for the settled value."""

import ast

from pipelines.core.settings import PROJECT

RAW = {"train.precision", "train.compile"}
# Who may see `auto`: what settles it, what refuses explicit values, and what tells of old records.
MAY = {
    "pipelines/planning/precision_rule.py",
    "pipelines/training/recipe_check.py",
    "pipelines/parallel/division.py",
    "pipelines/export/model_card.py",
}


def test_only_these_read_what_may_be_auto() -> None:
    found = set()
    for room in ("pipelines", "ray_jobs", "dags"):
        for path in (PROJECT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(tuple(RAW)):
                    found.add(path.relative_to(PROJECT).as_posix())
    assert found == MAY
