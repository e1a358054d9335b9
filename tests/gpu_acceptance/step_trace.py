"""What a trace says: how much of the time the device works, and on what."""

from collections import Counter
from typing import Any

from pipelines.training.profiling import Event, _length, _union, exposed_share
from tests.gpu_acceptance.acceptance_parts import Outcome

_BUSY = 0.95
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST, _MOST_CHARACTERS = 20, 80  # of the kernels that are named


def overlap(events: list[dict[str, Any]], kinds: tuple[str, ...]) -> Outcome:
    """What a trace's events on the device say.

    Args:
        events: As Chrome's format has them.
        kinds: The categories that are work of the device.
    """
    found = [
        (each["cat"], Event(each["name"], each["ts"], each["ts"] + each["dur"], on_device=True))
        for each in events
        if each.get("ph") == "X" and each.get("cat") in kinds
    ]
    spans = [(event.start, event.end) for _, event in found]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    busy = _length(_union(spans)) / whole
    copies = [(event.start, event.end) for kind, event in found if kind == "gpu_memcpy"]
    work = [(event.start, event.end) for kind, event in found if kind != "gpu_memcpy"]
    alone = (_length(_union(spans)) - _length(_union(work))) / whole
    times: Counter[str] = Counter()
    for _, event in found:
        times[event.name[:_MOST_CHARACTERS]] += event.end - event.start
    detail = {
        "milliseconds": {name: round(time / 1e3, 2) for name, time in times.most_common(_MOST)},
        "busy": busy,
        "copies": _length(_union(copies)) / whole,
        "copies_alone": alone,
        "communication_alone": exposed_share(event for _, event in found),
        "events": len(found),
    }
    limits = f"idle {1 - busy:.1%}, copies alone {alone:.1%} of {whole / 1e3:.0f} ms"
    return Outcome(busy, "busy", busy / _BUSY, busy >= _BUSY, limits, detail)
