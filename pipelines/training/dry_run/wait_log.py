"""Where the host waits for the device in a step, by file and line.

While the host waits it issues no work, so that the device may run dry.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
_PIPELINES = Path(__file__).parents[2]
_HERE = Path(__file__).parent

# The only waits in a step, by file and function, and the reason for each.
WAITS: dict[tuple[str, str], str] = {
    ("parallel/process_group.py", "is_wanted"): (
        "votes of the step before the last one: they arrived while the device worked on"
    ),
}
# Their results' sizes depend on numbers that are on the device.
_SIZED_BY_NUMBERS = (
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.equal.default,
)


class Wait(NamedTuple):
    """A place where the host waits.

    Attributes:
        kind: What waits.
        file: The file, relative to `pipelines`; that of the caller of torch.
        function: The function in it.
        line: The line.
    """

    kind: str
    file: str
    function: str
    line: int

    @property
    def reason(self) -> str | None:
        """Why this wait is right; None if it is not in `WAITS`."""
        return WAITS.get((self.file, self.function))


class WaitLog:
    """The waits of a step, each with how often it happens.

    Attributes:
        is_on: Whether waits are noted.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.found: Counter[Wait] = Counter()

    def note(self, kind: str) -> None:
        """Note that the host waits here."""
        if self.is_on:
            self.found[Wait(kind, *_place())] += 1

    def see(self, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note the waits of an operator that would wait on a device."""
        if operator is _aten._local_scalar_dense.default:
            if _is_cuda(arguments[0]):
                self.note("a number is read")
        elif operator is _aten._to_copy.default:
            target = named.get("device")
            if target is not None and not named.get("non_blocking"):
                self._note_copy(arguments[0].device.type, torch.device(target).type)
        elif operator is _aten.copy_.default:
            is_async = arguments[2] if len(arguments) > 2 else named.get("non_blocking")
            if not is_async:
                self._note_copy(arguments[1].device.type, arguments[0].device.type)
        elif (operator in _SIZED_BY_NUMBERS and _is_cuda(arguments[0])) or _masks(
            operator, arguments
        ):
            self.note("a size depends on numbers")

    def _note_copy(self, source: str, target: str) -> None:
        if {source, target} == {"cpu", "cuda"}:
            self.note(f"a copy from {source} to {target}")


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _masks(operator: Any, arguments: tuple[Any, ...]) -> bool:
    if operator not in (_aten.index.Tensor, _aten.index_put_.default):
        return False
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in arguments[1])


def _place() -> tuple[str, str, int]:
    """Return the innermost place in this project's code, or else in any."""
    return _first(_is_ours) or _first(lambda path: _HERE not in path.parents) or ("", "", 0)


def _is_ours(path: Path) -> bool:
    return _PIPELINES in path.parents and _HERE not in path.parents


def _first(accepts: Callable[[Path], bool]) -> tuple[str, str, int] | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if accepts(path):
            name = path.relative_to(_PIPELINES) if _PIPELINES in path.parents else path
            return str(name), frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back
    return None
