"""What happened to a run first, what followed, what it cost and what to do, in ten lines at most.

The earliest fault leads; in a failed run, the earliest after the run last got on, or an earlier one
that is of the kind of the error that ended it.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby, pairwise, starmap
from textwrap import shorten
from typing import Any

from pipelines.core.formatting import amount, duration, significant
from pipelines.core.storage import MARKER
from pipelines.platform.run_evidence import Evidence, fault, kind_of
from pipelines.run.logbook import Entry, Kind
from pipelines.run.records import RUN_FILE, RegisterRecord, record_path
from pipelines.run.speed import bound_by, seconds_lost, slowdown
from pipelines.run.usage import elapsed, usage_of

_FOLLOWED, _LONGEST = 4, 300  # lines, and characters of a cause, at the most
_TOGETHER_S = 60.0  # parts of the platform that are lost in this time are lost together

# What happened, by the kind of an event, and what can be done against it.
_FAULTS: dict[Kind, tuple[str, str]] = {
    "preemption": ("A process was told to end (preemption)", "take nodes that are not taken back"),
    "worker lost": ("A train worker was lost", "see `penstock doctor` and that host's kernel log"),
    "node lost": ("A node was lost", "look at that node, its network and its raylet's log"),
    "driver lost": ("The job's driver was lost", "see the memory and kernel log of Ray's head"),
    "cluster lost": ("The Ray cluster was lost", "see `penstock logs ray`"),
    "failure": ("An error ended the stage", "mend what it names"),
    "task lost": ("An Airflow task's process was lost", "see `penstock logs scheduler`"),
    "service lost": ("A service was lost", "see `penstock status` and `penstock logs` of it"),
    "clock": ("The clock jumped", "look at that host's time synchronisation, such as chrony"),
    "storage": ("Storage could not be written", "free space there; `penstock gc` lists old runs"),
    "rollback": ("Steps in a row were bad", "lower train.lr or look at the data of these steps"),
    "alarm": ("The model seems to please its rewards only", "read its answers; change the rewards"),
    "out of memory": ("Memory ran out", "end other programs, or lower train.micro_batch_size"),
    "stall": ("Training stood still", "look at that rank's stacks, storage and network"),
    "time limit": ("The time limit was reached", "raise resources.max_stage_hours"),
    "resume": ("Training had to start again", "see the end of its first log"),
    "human decision": ("A user stepped in", "ask that user"),
}
_EFFECTS: tuple[Kind, ...] = ("resume", "workers changed", "layout change")
_TAKEN_OVER: tuple[Kind, ...] = ("task lost", "service lost", "clock")  # these alone end no stage
_LATER_S: dict[Kind, int] = {"human decision": 60}  # a job that a user ends may go on for a while
_GRADUAL: tuple[Kind, ...] = ("storage", "rollback", "out of memory", "stall")  # work may go on


def explain(found: Evidence) -> dict[str, Any]:
    """Return the findings as plain JSON values; `lines` are at most ten lines for a user."""
    lead, slow = _lead(found), slowdown(found.windows)
    first = f"{slow}." if slow else "Nothing that is recorded went wrong."
    if lead:
        first = _first(found, lead)
    elif found.state == "failed":
        first = f"Nothing recorded explains why {found.task or 'the run'} failed."
    followed = list(_followed(found, lead)) if lead else []
    cost, do = _cost(found), _advice(found, lead, slow)
    lines = [first, *(f"  {line}" for line in followed), _outcome(found), _cost_line(cost)]
    lines += [f"{slow}."] if slow and slow not in first else []
    told = dict[str, Any](run=found.run, state=found.state, kind=lead and lead.kind, first=first)
    told |= {"followed": followed, "cost": significant(cost), "slowdown": slow, "do": do}
    return told | {"lines": [*lines, *_time(found), f"What to do: {do}."]}


def _lead(found: Evidence) -> Entry | None:
    faults = [entry for entry in found.entries if entry.kind in _FAULTS]
    if found.state != "failed":
        return next(iter(faults), None)
    final = [e for e in faults if e.time.timestamp() + _LATER_S.get(e.kind, 0) > found.got_on]
    kinds = {kind_of(entry.cause) for entry in final} & {*_GRADUAL}
    same = [entry for entry in faults if entry.kind in kinds and entry not in final][-1:]
    causes = [*same, *(entry for entry in final if entry.kind not in _TAKEN_OVER)] or final
    lead = next(iter(causes), None)
    if not found.error or (lead and (lead.kind != "failure" or not lead.done)):
        return lead
    # All that is known is that a program failed: its log says why.
    moment = found.events[-1].time if found.events else found.got_on
    said = fault(found.task, moment, kind_of(found.error), found.error)
    return lead.model_copy(update={"kind": said.kind, "cause": said.cause}) if lead else said


def _first(found: Evidence, lead: Entry) -> str:
    near = [e for e in found.entries if abs((e.time - lead.time).total_seconds()) < _TOGETHER_S]
    lost = [entry.cause for entry in near if entry.kind == lead.kind == "service lost"]
    step = lead.step or _reached(found, lead)
    place = f"{lead.stage}, about step {step}" if step else lead.stage
    what = f"{_FAULTS[lead.kind][0]}: {shorten('; '.join(lost or [lead.cause]), _LONGEST)}"
    return f"{what} ({place}, {lead.time:%Y-%m-%d %H:%M:%S} UTC)."


def _reached(found: Evidence, entry: Entry) -> int:
    moment = 1000 * entry.time.timestamp()
    return max((each.step for each in found.windows if each.milliseconds <= moment), default=0)


def _followed(found: Evidence, lead: Entry) -> Iterator[str]:
    known = [entry for entry in found.entries if entry.kind in _FAULTS or entry.kind in _EFFECTS]
    before = Counter(e.kind for e in known if e.time < lead.time and e.kind in _FAULTS)
    counts = ", ".join(f"{kind} ({count})" for kind, count in before.items())
    lines = [f"Before, the run got over: {counts}."] if before else []
    lines += [f"Then: {lead.done}."] if lead.done else []
    after = (entry for entry in known if entry.time >= lead.time and entry.key != lead.key)
    for kind, group in groupby(after, key=lambda entry: entry.kind):
        first, *more = group
        what = [] if kind in _EFFECTS else [_FAULTS[kind][0], shorten(first.cause, _LONGEST)]
        text = ": ".join(filter(None, [*what, first.done]))
        lines.append(f"{first.time:%H:%M:%S} {text}{f' ({len(more) + 1} times)' if more else ''}.")
    left = len(lines) - _FOLLOWED
    yield from lines[: _FOLLOWED - (left > 0)]
    if left > 0:
        yield f"... {left} more in the logbook, at last: {lines[-1]}"


def _outcome(found: Evidence) -> str:
    got_on = f"{datetime.fromtimestamp(found.got_on, UTC):%Y-%m-%d %H:%M:%S} UTC"
    failed = f"The run failed in {found.task}" if found.task else "The run failed"
    texts = {"success": "The run succeeded", "failed": failed}
    text = texts.get(found.state, f"The run is not over; it last got on at {got_on}")
    if record_path(found.workspace, RegisterRecord.stage).is_file():
        verdict = RegisterRecord.read(found.workspace).verdict
        text += f"; its model: {verdict.decision}, {verdict.reason.partition(';')[0]}"
    text += "; Airflow told nothing, so this is from its folder" if found.by_folder else ""
    return f"{text}."


def _cost(found: Evidence) -> dict[str, float | None]:
    faults = (entry for entry in found.entries if entry.kind in _FAULTS and entry.kind != "clock")
    moments = [entry.time.timestamp() for entry in faults]
    used = [usage_of(found.workspace, stage) for stage in {each.stage for each in found.events}]
    lost = sum(entry.worker_hours_lost or 0.0 for entry in found.entries)
    gpu_hours = sum(each.gpu_hours for each in used)
    reached = {_reached(found, entry): entry for entry in found.entries if entry.kind == "resume"}
    again = sum(max(0, step - (entry.step or 0)) for step, entry in reached.items())
    cost = {"seconds_lost": seconds_lost(found.windows, moments), "steps_again": again}
    cost |= {"worker_hours_lost": lost, "gpu_hours_lost": lost if gpu_hours else 0.0}
    return cost | {"worker_hours": sum(e.worker_hours for e in used), "gpu_hours": gpu_hours}


def _cost_line(cost: dict[str, Any]) -> str:
    lost = [] if cost["seconds_lost"] is None else [f"{duration(cost['seconds_lost'])} of training"]
    lost += [f"{cost['steps_again']} steps done again"] if cost["steps_again"] else []
    hours, unit = cost["worker_hours_lost"], "GPU" if cost["gpu_hours"] else "worker"
    lost += [f"{amount(hours)} {unit}-hours"] if hours else []
    used = f"{amount(cost['worker_hours'])} worker-hours, {amount(cost['gpu_hours'])} GPU-hours"
    return f"Lost: {', '.join(lost) or 'nothing that is measured'}. Used: {used}."


def _time(found: Evidence) -> Iterator[str]:
    """Yield where the time went: stages, their tries, waiting, the cache, and what bound it."""
    tries = Counter(each.stage for each in found.events if each.event == "began")
    if not tries:
        return
    seconds = {stage: usage_of(found.workspace, stage).seconds for stage in tries}
    parts = [
        f"{stage} {duration(each)}" + (f" in {tries[stage]} tries" if tries[stage] > 1 else "")
        for stage, each in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    between = sum(starmap(elapsed, pairwise(found.events))) - sum(seconds.values())
    parts.append(f"queues and starts between them {duration(max(0.0, between))}")
    cached = [each.stage for each in found.events if each.event == "cached"]
    parts.append(f"from the stage cache: {', '.join(cached) or 'nothing'}")
    parts += [f"training bound by {bound_by(window)}" for window in found.windows[-1:]]
    yield f"Time: {'; '.join(parts)}."


def _advice(found: Evidence, lead: Entry | None, slow: str | None) -> str:
    do = _FAULTS[lead.kind][1] if lead else "look at that machine with `penstock doctor`"
    if found.state != "failed":
        explain = f"nothing; `penstock explain {found.run}` tells why stages ran"
        return f"nothing, unless it comes again: then {do}" if lead else do if slow else explain
    saved = (found.workspace / "checkpoints").glob(f"step-*/{MARKER}")
    step = max((int(path.parent.name.removeprefix("step-")) for path in saved), default=None)
    on = f", which goes on after step {step}" if step and found.task == "train" else ""
    has_begun = (found.workspace / RUN_FILE).is_file()
    then = f"clear {found.task}{on}" if has_begun and found.task else "start it again"
    return f"{do if lead else 'read the last lines'}; then {then}. Last lines: {found.log}"
