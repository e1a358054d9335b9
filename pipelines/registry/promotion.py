"""Promotion of a version to champion, and rollback.

The alias `champion` decides, and one request moves it, so a reader finds the old champion or the
new one. The steps are, in this order: an entry of the audit trail claims the move (only one of
several callers gets it), `previous` is set to the version that a rollback returns to, `champion`
moves, `challenger` is deleted if it names the new champion, and the trail records that the move is
done. If a crash interrupts this, the next promotion or rollback first completes it from the entry.

If a user moved the alias in MLflow, the move is accepted and recorded as `moved outside`.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.core.storage import one_at_a_time
from pipelines.registry import audit, registry
from pipelines.registry.audit import Action, Entry, Trail
from pipelines.registry.registry import CHALLENGER, CHAMPION, PREVIOUS, ModelVersion
from pipelines.tracking import lineage_events, rest

_log = logging.getLogger(__name__)


class ChampionMovedError(UserError):
    """Another promotion or rollback was first, so the decision was about another champion."""


def promote(version: ModelVersion, over: int | None, who: str, why: str) -> ModelVersion:
    """Make a version the champion; a second call for the champion changes nothing.

    Args:
        version: The version; its files are verified first.
        over: The champion that it was compared with; None if there was none.
        who: The user, for the audit trail.
        why: The reason in one paragraph, for the audit trail.

    Raises:
        ChampionMovedError: `over` is no longer the champion.
        UserError: The files are not the registered ones, or `why` is too long.
    """
    _check_reason(why)
    registry.verified_folder(version)
    with one_at_a_time(_lock(version.name)):
        state = _settle(version.name)
        if state.champion != version.version:
            state.check_champion(over)
            _move(state, "promote", version.version, who, why)
            lineage_events.announce(version.ref, "promote")
    return registry.find(version.name, str(version.version))


def rollback(name: str, over: int | None, who: str, why: str) -> ModelVersion:
    """Make the previous champion the champion again; no file is copied.

    Repeated rollbacks go further back, never to a version that was rolled back; `promote` does
    that. Deleted versions are skipped.

    Args:
        name: The registered model's name.
        over: The champion to replace.
        who: The user, for the audit trail.
        why: The reason in one paragraph, for the audit trail.

    Raises:
        ChampionMovedError: `over` is no longer the champion.
        UserError: There was no champion before, its files are not the registered ones, or `why` is
            too long.
    """
    _check_reason(why)
    with one_at_a_time(_lock(name)):
        state = _settle(name)
        if not state.completed_rollback:  # otherwise a crash had interrupted this very rollback
            state.check_champion(over)
            if not state.behind:
                raise UserError(f"{name} had no champion before version {state.champion}")
            target = state.behind[-1]
            registry.verified_folder(registry.find(name, str(target)))
            _move(state, "rollback", target, who, why)
    now = registry.find(name)
    lineage_events.announce(now.ref, "rollback")
    return now


def challenge(version: ModelVersion) -> ModelVersion:
    """Set the alias `challenger` to the version that a user is asked about."""
    rest.set_alias(version.name, CHALLENGER, version.version)
    return registry.find(version.name, str(version.version))


def withdraw(version: ModelVersion) -> ModelVersion:
    """Remove the alias `challenger` from a version that has it."""
    if CHALLENGER in version.aliases:
        rest.delete_alias(version.name, CHALLENGER)
    return registry.find(version.name, str(version.version))


@dataclass(frozen=True)
class _State:
    """The state of a registered model between two moves."""

    name: str
    trail: Trail
    versions: Collection[int]
    champion: int | None
    completed_rollback: bool = False

    @property
    def behind(self) -> list[int]:
        """The earlier champions that a rollback can return to, oldest first."""
        stack: list[int | None] = []
        for entry in self.trail.entries:
            if entry.action == "rollback":
                while stack and stack[-1] != entry.after:
                    stack.pop()
            else:
                stack.append(entry.after)
        found = [each for each in stack if each is not None and each in self.versions]
        while found and found[-1] == self.champion:
            found.pop()
        return [each for each, _ in groupby(found)]

    def check_champion(self, expected: int | None) -> None:
        """Raise ChampionMovedError if the champion is another version than expected."""
        if self.champion == expected:
            return
        last, was = self.trail.last, f"version {expected}" if expected else "none"
        how = f" ({last.action} by {last.who}, {last.when}: {last.why})" if last else ""
        raise ChampionMovedError(
            f"{self.name}: the champion is version {self.champion} now, not {was}{how}; "
            f"look at `penstock models show {self.name}`, and decide again"
        )


def _settle(name: str) -> _State:
    """Complete an interrupted move, record a move made in MLflow, and return the state."""
    registry.show(name)  # raises UserError if there is no such model
    trail = audit.open_trail(name, registry.tags_of(rest.registered_model(name) or {}))
    unfinished = trail.last if trail.unfinished else None
    if unfinished:
        _log.warning("%s: completing an interrupted %s", name, unfinished.action)
        trail = _apply(name, trail, unfinished)
    state = _read_state(name, trail)
    if state.champion != (trail.last.after if trail.last else None):
        why = "found so: the alias was moved in MLflow, or before there was a trail"
        state = _move(state, "moved outside", state.champion, "unknown", why)
    rolled_back = unfinished == trail.last and unfinished and unfinished.action == "rollback"
    return replace(state, completed_rollback=bool(rolled_back))


def _read_state(name: str, trail: Trail) -> _State:
    versions = registry.versions_of(name)
    numbers = {each.version for each in versions}
    champion = next((each.version for each in versions if CHAMPION in each.aliases), None)
    return _State(name, trail, numbers, champion)


def _move(state: _State, action: Action, after: int | None, who: str, why: str) -> _State:
    """Claim the move in the trail, make it, and return the new state."""
    before = state.trail.last.after if state.trail.last else None
    left = state.behind[:-1] if action == "rollback" else [*state.behind, before]
    kept = [each for each in left if each in state.versions and each != after]
    entry = Entry(
        action=action,
        before=before,
        after=after,
        previous=kept[-1] if kept else None,
        who=who,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        why=why,
    )
    try:
        trail = state.trail.add(entry)
    except audit.TakenError:
        now = _read_state(state.name, registry.audit_trail(state.name))
        now.check_champion(state.champion)
        raise ChampionMovedError(
            f"{state.name}: another promotion is running; try again when it has ended"
        ) from None
    return _read_state(state.name, _apply(state.name, trail, entry))


def _apply(name: str, trail: Trail, entry: Entry) -> Trail:
    """Set the aliases as the trail's last entry says, and return the finished trail."""
    model = rest.registered_model(name) or {}
    versions = {each.version for each in registry.versions_of(name)}
    if entry.after is not None and entry.after not in versions:
        return trail.finish(void=True)  # the version was deleted in the meantime
    if entry.previous is not None and entry.previous in versions:
        rest.set_alias(name, PREVIOUS, entry.previous)
    else:
        rest.delete_alias(name, PREVIOUS)
    if entry.after is not None:
        rest.set_alias(name, CHAMPION, entry.after)
        if registry.aliases_of(model).get(CHALLENGER) == entry.after:
            rest.delete_alias(name, CHALLENGER)
    now = trail.finish()
    # A caller that was delayed between claim and move must not undo the later moves of others.
    return now if now.last in (entry, None) else _apply(name, now, now.last)


def _check_reason(why: str) -> None:
    if len(why) > audit.LONGEST_TEXT:
        raise UserError(f"the reason has {len(why)} characters; {audit.LONGEST_TEXT} at most")


def _lock(name: str) -> Path:
    """Return the lock file that makes later callers with this home wait for a running move.

    Between different homes, only the trail decides.
    """
    return load_settings().home / "locks" / f"promote-{name}"
