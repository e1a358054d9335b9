"""Checks at once: none takes the others with it, and none holds them up."""

import threading
import time

import pytest

from pipelines.core.errors import UserError
from pipelines.doctor.examination import run_checks
from pipelines.doctor.findings import (
    Check,
    FaultError,
    Finding,
    NoAnswerError,
    NotHereError,
    State,
    exit_code,
    ok,
    warning,
    worst,
)
from pipelines.doctor.tools import limit_s, once, output_of


def check(look) -> Check:
    return Check("name", "why", look)


def raising(error: Exception) -> Check:
    def look():
        raise error

    return check(look)


def test_what_is_seen_is_told_in_order_with_its_reason():
    first = check(lambda: [ok("one"), warning("two", "fix it")])
    found = run_checks([first, raising(NotHereError("no such thing"))])
    assert found == [
        Finding("name", State.OK, "one", "why", ""),
        Finding("name", State.WARNING, "two", "why", "fix it"),
        Finding("name", State.NOT_HERE, "no such thing", "why", ""),
    ]


@pytest.mark.parametrize(
    ("error", "saw", "fix"),
    [
        (FaultError("it hangs", "restart it"), "it hangs", "restart it"),
        (UserError("X is wrong: say Y"), "X is wrong: say Y", "fix it"),
        (ZeroDivisionError("by zero"), "the check itself failed: ZeroDivisionError", "report"),
    ],
)
def test_a_check_that_fails_is_a_problem_and_the_next_one_runs(error, saw, fix):
    bad, good = run_checks([raising(error), check(lambda: [ok("fine")])])
    assert (bad.state, good.state) == (State.PROBLEM, State.OK)
    assert bad.saw.startswith(saw)
    assert fix in bad.fix


@pytest.fixture
def quiet(monkeypatch):
    """A machine with nothing else to do."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))


def test_a_check_that_hangs_is_told_and_holds_nobody_up(monkeypatch, quiet):
    monkeypatch.setenv("PENSTOCK_DOCTOR_SECONDS", "0.3")
    free = threading.Event()
    began = time.monotonic()
    hung, good = run_checks([check(lambda: [ok(str(free.wait()))]), check(lambda: [ok("x")])])
    free.set()
    assert time.monotonic() - began < 5
    assert (hung.state, good.state) == (State.PROBLEM, State.OK)
    assert "no answer in" in hung.saw


@pytest.mark.parametrize(
    ("load", "state", "saw"),
    [(0.0, State.PROBLEM, "slow thing"), (10_000.0, State.WARNING, "the machine is busy")],
)
def test_on_a_busy_machine_what_is_late_may_only_be_slow(monkeypatch, load, state, saw):
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    (found,) = run_checks([raising(NoAnswerError("slow thing", "fix it"))])
    assert found.state == state
    assert saw in found.saw
    assert "fix it" in found.fix


def test_a_machine_with_a_driver_takes_longer(monkeypatch, tmp_path):
    monkeypatch.delenv("PENSTOCK_DOCTOR_SECONDS", raising=False)
    monkeypatch.setattr("pipelines.doctor.tools._DRIVER", tmp_path / "no-driver")
    assert limit_s() <= 10
    monkeypatch.setattr("pipelines.doctor.tools._DRIVER", tmp_path)
    assert limit_s() == 60


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("PENSTOCK_DOCTOR_SECONDS", text)
    with pytest.raises(UserError, match="not a number of seconds above 0"):
        limit_s()


def test_checks_wait_at_the_same_time():
    both = threading.Barrier(2)  # breaks where one runs after the other
    found = run_checks([check(lambda: [ok(str(both.wait(5)))]) for _ in range(2)])
    assert [finding.state for finding in found] == [State.OK] * 2


@pytest.mark.parametrize(
    ("states", "whole", "code"),
    [
        ([], State.NOT_HERE, 0),
        ([State.NOT_HERE], State.NOT_HERE, 0),
        ([State.OK, State.NOT_HERE], State.OK, 0),
        ([State.OK, State.WARNING], State.WARNING, 1),
        ([State.PROBLEM, State.WARNING, State.OK], State.PROBLEM, 2),
    ],
)
def test_the_exit_code_is_of_the_worst(states, whole, code):
    findings = [Finding("name", state, "", "", "") for state in states]
    assert (worst(findings), exit_code(findings)) == (whole, code)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A command of ours, first on PATH."""

    def make(script: str) -> None:
        path = tmp_path / "some-tool"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_a_tool_speaks_english(tool):
    tool('echo "$1 $LC_ALL"')
    assert output_of("some-tool", "word") == "word C\n"


def test_a_tool_that_fails_says_why_in_its_own_words(tool):
    tool("echo 'no such device' >&2; exit 3")
    with pytest.raises(FaultError, match="`some-tool -q`: no such device"):
        output_of("some-tool", "-q")


@pytest.mark.parametrize("script", ["exec sleep 60", "sleep 60", "trap '' TERM INT; sleep 60"])
def test_a_tool_that_hangs_is_ended_with_its_children(tool, monkeypatch, script):
    tool(script)
    monkeypatch.setenv("PENSTOCK_DOCTOR_SECONDS", "0.2")
    began = time.monotonic()
    with pytest.raises(FaultError, match="gave no answer"):
        output_of("some-tool")
    assert time.monotonic() - began < 10


def test_a_tool_that_is_missing_is_not_here():
    with pytest.raises(NotHereError, match="no-such-tool is not installed"):
        output_of("no-such-tool")


def test_once_keeps_answers_and_failures():
    calls = []

    @once
    def answer() -> int:
        calls.append(1)
        return 7

    @once
    def failure() -> int:
        calls.append(2)
        raise FaultError("no", "yes")

    for _ in range(2):
        assert answer() == 7
        with pytest.raises(FaultError):
            failure()
    assert calls == [1, 2]
