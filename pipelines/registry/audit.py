"""The audit trail of a registered model: who made which version champion, when and why.

MLflow has no compare-and-set, but a param of a run is written once and for all: it is a row under
the primary key (run, name), the server refuses another value, and its API has no call that changes
or deletes one. So the trail is an MLflow run of its own, which the registered model names in a tag,
and an entry is a param, `00007`. Of several who add the entry behind the sixth at once one is the
seventh; the others are told. No lock is needed for that, so it holds across machines.

An entry is written before the aliases move and says where to; a second param, `00007.state`, says
that they have. A promotion that died in between is finished by whoever comes next.

Limits: whoever may delete runs can delete the trail (MLflow keeps it, and can restore it, until its
own `gc`), and whoever may write to MLflow's database can do anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.core.errors import UserError
from pipelines.tracking import rest

RUN_TAG = "penstock.audit_run"  # of the registered model
EXPERIMENT = "penstock-registry"
LONGEST_TEXT = 2000  # of an entry's reason; MLflow's limit is 6000 for all of it

Action = Literal["promote", "rollback", "moved outside"]

_STATE = ".state"
_DONE, _VOID = "done", "void"


class Entry(BaseModel):
    """One move of the alias `champion`, from one version to another."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    action: Action
    before: int | None = Field(alias="from")
    after: int | None = Field(alias="to")
    previous: int | None  # what the alias of this name says afterwards
    who: str
    when: str  # ISO 8601, UTC
    why: str

    def to_dict(self) -> dict[str, Any]:
        """As it is stored: `from` and `to` under these names."""
        return self.model_dump(by_alias=True)


class TakenError(Exception):
    """Another writer's entry has the number."""


@dataclass(frozen=True)
class Trail:
    """The trail as it was when it was read.

    Attributes:
        run_id: The MLflow run that it lies in; None before there is one.
        entries: Oldest first; without those whose version was deleted before the alias moved.
        unfinished: Whether the last entry's aliases may not have moved yet.
    """

    run_id: str | None
    entries: Sequence[Entry]
    unfinished: bool
    _written: int  # entries, void ones included

    @property
    def last(self) -> Entry | None:
        """The newest entry."""
        return self.entries[-1] if self.entries else None

    def add(self, entry: Entry) -> "Trail":
        """Write an entry behind the last one; the trail that is then.

        Raises:
            TakenError: another writer was first.
        """
        number = self._written + 1
        if not rest.log_param_once(
            str(self.run_id), _key(number), entry.model_dump_json(by_alias=True)
        ):
            raise TakenError
        return Trail(self.run_id, [*self.entries, entry], unfinished=True, _written=number)

    def finish(self, *, void: bool = False) -> "Trail":
        """Say that the last entry's aliases have moved, or never will; once is enough."""
        state = _VOID if void else _DONE
        rest.log_param_once(str(self.run_id), _key(self._written) + _STATE, state)
        return read_run(str(self.run_id))


def create_run(model: str) -> str:
    """A run for the trail of a model; `open_trail` and `register` hang it on."""
    tags = {"penstock.audit_of": model}
    return rest.create_run(rest.experiment_id(EXPERIMENT), f"audit trail of {model}", tags)


def open_trail(name: str, tags: Mapping[str, str]) -> Trail:
    """The trail of a registered model with these tags, to be written to.

    A model that another tool registered gets one now. Where two do so at once, the run named last
    is the trail, so that is asked for again.
    """
    if RUN_TAG in tags:
        return read_run(tags[RUN_TAG])
    rest.set_model_tag(name, RUN_TAG, create_run(name))
    model = rest.registered_model(name) or {}
    return read_trail({each["key"]: each["value"] for each in model.get("tags", [])})


def read_trail(tags: Mapping[str, str]) -> Trail:
    """The trail of a registered model with these tags; an empty one where it has none."""
    if RUN_TAG not in tags:
        return Trail(None, [], unfinished=False, _written=0)
    return read_run(tags[RUN_TAG])


def read_run(run_id: str) -> Trail:
    """The trail in an MLflow run.

    Raises:
        UserError: the run was deleted.
    """
    run = rest.run_if_any(run_id)
    if run is None:
        raise UserError(
            f"the audit trail, MLflow run {run_id}, is gone for good; delete the model's tag "
            f"{RUN_TAG} in MLflow, and the next promotion begins another"
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
