"""Whatever a reader is given, it works or says in one line which file is wrong."""

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.unit.fuzz.fuzzed_readers import READERS
from tests.unit.fuzz.mutations import INPUTS, Edit, contents, spoil

SECONDS = 10
ROOM = 2 << 30  # bytes of memory that reading may take beside what the process has
ONCE_FAILED = json.loads((Path(__file__).parent / "once_failed.json").read_text())
# The same inputs on each run.
fuzzing = settings(
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # to shrink an input takes longer than to find it
    suppress_health_check=list(HealthCheck),
)


class HangError(BaseException):
    """It takes too long; no reader catches it."""


@contextmanager
def bounded() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("fuzz")
        patch.setenv("PENSTOCK_HOME", str(folder / "home"))
        yield folder


def read(home: Path, name: str, number: int = 0, edits: tuple[Edit, ...] = ()) -> str:
    """Spoil a file of sound ones, read the folder, and return what the reader says, if anything."""
    reader, source, folder, out = READERS[name], home / name, home / "in", home / "out"
    if not source.exists():
        source.mkdir()
        reader.make(source)
    for each in (folder, out):
        shutil.rmtree(each, ignore_errors=True)
    shutil.copytree(source, folder)
    out.mkdir()
    paths = sorted(path for path in source.glob(reader.spoiled) if path.is_file())
    if edits:
        others = [path.read_bytes() for path in paths]
        spoil(folder / paths[number % len(paths)].relative_to(source), list(edits), others)
    before, environment = contents(folder), dict(os.environ)
    try:
        with bounded():
            reader.read(folder, out)
    except reader.errors as error:
        said = str(error)
        assert len(said.splitlines()) == 1 and len(said) < 3000, said
        assert re.search(f"{folder}|{out}|{reader.told or folder}", said), said
        return said
    finally:
        os.environ.clear()
        os.environ.update(environment)
        assert contents(folder) == before
    return ""


@pytest.mark.parametrize("name", READERS)
def test_sound_files_are_read(home: Path, name: str) -> None:
    assert read(home, name) == ""


@pytest.mark.parametrize(("name", "number", "edits"), ONCE_FAILED)
def test_what_once_failed_is_told(home: Path, name: str, number: int, edits: list) -> None:
    read(home, name, number, tuple(Edit(*each) for each in edits))


@pytest.mark.parametrize("name", READERS)
def test_some_spoiled_files_are_read_or_refused(home: Path, name: str) -> None:
    fuzz(home, name, 20)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", READERS)
def test_many_spoiled_files_are_read_or_refused(home: Path, name: str) -> None:
    fuzz(home, name, 400)


def fuzz(home: Path, name: str, count: int) -> None:
    @settings(fuzzing, max_examples=count)
    @given(INPUTS)
    def each(spoiled: tuple[int, list[Edit]]) -> None:
        read(home, name, spoiled[0], tuple(spoiled[1]))

    each()
