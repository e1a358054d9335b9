"""YAML as plain values; what is none, or too much of it, is refused in one line."""

from pathlib import Path
from typing import Any

import yaml

from pipelines.core.errors import UserError, one_line
from pipelines.core.storage import read_text

# The same safe loader in C, ten times as fast: a DAG file reads every recipe of a project.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_BRACKETS = 5000  # libyaml's time grows with the square of their depth
_MOST_VALUES = 100_000  # each counted where an alias repeats it: a few lines could be billions


def read_yaml(path: Path) -> Any:
    """Read a YAML file; raise UserError as `read_text` and `parse_yaml` do."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Return the values of a YAML text; if it is none, raise UserError that begins with `where`."""
    if text.count("[") + text.count("{") > _MOST_BRACKETS:
        raise UserError(f"{where}: more than {_MOST_BRACKETS:,} brackets")
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if _is_endless(node):
            raise UserError(f"{where}: more than {_MOST_VALUES:,} values, aliases (*) included")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{where}: {one_line(error)}") from error
    except (ValueError, AttributeError, LookupError, OverflowError) as error:
        # A date that does not exist, a number of thousands of digits, `!!bool maybe`.
        raise UserError(f"{where}: a value is none of its type: {one_line(error)}") from error
    finally:
        loader.dispose()


def _is_endless(node: yaml.Node | None) -> bool:
    waiting, count = [node], 0
    while waiting and count <= _MOST_VALUES:
        each = waiting.pop()
        count += 1
        if isinstance(each, yaml.MappingNode):
            waiting += (part for pair in each.value for part in pair)
        elif isinstance(each, yaml.SequenceNode):
            waiting += each.value
    return bool(waiting)
