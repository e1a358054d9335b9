"""The audit trail of a registered model: who made which version the champion, when and why.

MLflow has no compare-and-set, but a param of a run is written only once: it is a row under the
primary key (run, name), the server refuses another value, and its API has no call that changes or
deletes a param. So the trail is a separate MLflow run, which the registered model names in a tag,
and an entry is a param such as `00007`. If several writers add the entry after the sixth at once,
one becomes the seventh and the others get an error. This needs no lock and works across machines.

An entry is written before the aliases move and says where they go; a second param, `00007.state`,
says that they have moved. If a promotion died in between, the next one finishes it.

The run also holds the comparisons that the gate made, in params of another name (`comparisons`).

Limits: a user who may delete runs can delete the trail (MLflow keeps it, and can restore it, until
its own `gc`), and a user who may write to MLflow's database can change anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.core.errors import UserError
from pipelines.tracking import rest

RUN_TAG = "penstock.audit_run"  # the registered model's tag
EXPERIMENT = "penstock-registry"
LONGEST_TEXT = 2000  # of an entry's reason; MLflow's limit for the entry is 6000

Action = Literal["promote", "rollback", "moved outside"]

_STATE = ".state"
_DONE, _VOID = "done", "void"


class Entry(BaseModel):
    """One move of the alias `champion`, from one version to another."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    action: Action
    before: int | None = Field(alias="from")
    after: int | None = Field(alias="to")
    previous: int | None  # the version of the alias `previous` afterwards
    who: str
    when: str  # ISO 8601, UTC
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as it is stored, with the keys `from` and `to`."""
        return self.model_dump(by_alias=True)


class TakenError(Exception):
    """Another writer's entry has this number."""


@dataclass(frozen=True)
class Trail:
    """The trail at the time when it was read.

    Attributes:
        run_id: The MLflow run that holds the trail; None before there is one.
        entries: Oldest first, without entries whose version was deleted before the alias moved.
        unfinished: Whether the last entry's aliases may not have moved yet.
    """

    run_id: str | None
    entries: Sequence[Entry]
    unfinished: bool
    _written: int  # number of entries, including void ones

    @property
    def last(self) -> Entry | None:
        """The newest entry."""
        return self.entries[-1] if self.entries else None

    def add(self, entry: Entry) -> "Trail":
        """Write an entry after the last one and return the new trail.

        Raises:
            TakenError: Another writer was first.
        """
        number = self._written + 1
        if not rest.log_param_once(
            str(self.run_id), _key(number), entry.model_dump_json(by_alias=True)
        ):
            raise TakenError
        return Trail(self.run_id, [*self.entries, entry], unfinished=True, _written=number)

    def finish(self, *, void: bool = False) -> "Trail":
        """Record that the last entry's aliases have moved or never will; a repeat has no effect."""
        state = _VOID if void else _DONE
        rest.log_param_once(str(self.run_id), _key(self._written) + _STATE, state)
        return read_run(str(self.run_id))


def create_run(model: str) -> str:
    """Create a run for a model's trail and return its id; `open_trail` and `register` link it."""
    tags = {"penstock.audit_of": model}
    return rest.create_run(rest.experiment_id(EXPERIMENT), f"audit trail of {model}", tags)


def open_trail(name: str, tags: Mapping[str, str]) -> Trail:
    """Return the trail of a registered model with these tags, for writing.

    A model that another tool registered gets a trail now. If two callers create one at once, the
    run that was named last is the trail, so the tag is read again.
    """
    if RUN_TAG in tags:
        return read_run(tags[RUN_TAG])
    rest.set_model_tag(name, RUN_TAG, create_run(name))
    model = rest.registered_model(name) or {}
    return read_trail({each["key"]: each["value"] for each in model.get("tags", [])})


def read_trail(tags: Mapping[str, str]) -> Trail:
    """Return the trail of a registered model with these tags, or an empty trail if it has none."""
    if RUN_TAG not in tags:
        return Trail(None, [], unfinished=False, _written=0)
    return read_run(tags[RUN_TAG])


def read_run(run_id: str) -> Trail:
    """Return the trail in an MLflow run.

    Raises:
        UserError: The run was deleted.
    """
    run = rest.run_if_any(run_id)
    if run is None:
        raise UserError(
            f"the audit trail, MLflow run {run_id}, is gone for good; delete the model's tag "
            f"{RUN_TAG} in MLflow, and the next promotion creates another trail"
        )
    if run["info"]["lifecycle_stage"] == "deleted":
        raise UserError(
            f"the audit trail, MLflow run {run_id}, was deleted; restore it there: "
            f"`mlflow runs restore --run-id {run_id}`"
        )
    params = {each["key"]: each["value"] for each in run["data"].get("params", [])}
    entries, number = [], 0
    state: str | None = _DONE
    while (text := params.get(_key(number + 1))) is not None:
        number += 1
        state = params.get(_key(number) + _STATE)
        if state != _VOID:
            entries.append(Entry.model_validate_json(text))
    return Trail(run_id, entries, unfinished=state is None, _written=number)


def _key(number: int) -> str:
    return f"{number:05}"
