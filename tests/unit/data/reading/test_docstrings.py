import pytest

from pipelines.core.errors import UserError
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.sources import list_inputs
from pipelines.data.reading.text_readers import plan_reads, read_batch
from pipelines.recipe.recipe_files import load_recipe

CODE = '''"""A module's own docstring, which answers no question."""

def add(a, b):
    """Return the sum
    of two numbers.

    With more detail.
    """

def _private():
    """Not what a user would ask for."""

def short():
    """Too short."""

class Box:
    """Holds one thing and nothing else."""

    async def open(self):
        """Return the thing that it holds."""
'''


def test_each_documented_name_is_a_question(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").write_text(CODE)
    (tmp_path / "wrong.py").write_text("def (:\n")
    overrides = ["data.source.format=docstrings", "data.instruction.kind=prompt_response"]
    data = load_recipe(
        "debug", [*overrides, "data.source.kind=files", f"data.source.path={tmp_path}"]
    ).data
    batches = plan_reads(data.source, list_inputs(data.source))
    found = [each for batch in batches for each in read_batch(batch, Fields.of(data))]
    assert [each.messages for each in found if not each.dropped] == [
        (("user", "What does shop.add do?"), ("assistant", "Return the sum of two numbers.")),
        (("user", "What does shop.Box do?"), ("assistant", "Holds one thing and nothing else.")),
        (("user", "What does shop.Box.open do?"), ("assistant", "Return the thing that it holds.")),
    ]
    (dropped,) = [each for each in found if each.dropped]
    assert (dropped.source, dropped.dropped) == ("wrong.py", "malformed")
    assert dropped.detail.startswith("not Python")


def test_docstrings_are_conversations():
    with pytest.raises(UserError, match=r"set data\.instruction\.kind to prompt_response"):
        load_recipe("debug", ["data.source.format=docstrings"])
