import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from pipelines.core.storage import folder_hash
from pipelines.data.passes import RESULT, Passes, block_bytes, map_in_process, work_folder
from pipelines.run.progress import ProgressReader, ProgressWriter

T = TypeVar("T")
R = TypeVar("R")


def square(item: int, folder: Path) -> Counter[str]:
    (folder / "data").write_text("x" * item)
    return Counter(square=item * item)


def run(work: Path, task=square, items: Sequence[int] = range(5), map_ordered=map_in_process):
    work.mkdir(exist_ok=True)
    progress = partial(ProgressWriter, work, "test", interval=0)
    passes = Passes(work, map_ordered, progress)
    return passes.run("squares", task, items, Counter[str], "units", float)


def test_results_come_in_order_with_the_folders_of_their_data(tmp_path: Path) -> None:
    for number, (folder, result) in enumerate(run(tmp_path)):
        assert folder == tmp_path / "squares" / f"{number:05d}"
        assert (folder / "data").read_text() == "x" * number
        assert result == Counter(square=number * number)
    last = list(ProgressReader(tmp_path).read())[-1]
    assert (last.done, last.total, last.unit) == (10, 10, "units")


def test_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    first = run(tmp_path)
    before = [next(first), next(first)]
    called: list[int] = []

    def counted(item: int, folder: Path) -> Counter[str]:
        called.append(item)
        return square(item, folder)

    assert list(run(tmp_path, counted))[:2] == before
    assert called == [2, 3, 4]
    told = [(line.done, line.total) for line in ProgressReader(tmp_path).read()]
    assert (1, 10) in told  # the second run begins with what the first had done


def test_a_task_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken(item: int, folder: Path) -> Counter[str]:
        (folder / "data").write_text("half")
        if item == 1:
            raise ValueError("no")
        return Counter()

    with pytest.raises(ValueError, match="no"):
        list(run(tmp_path, broken))
    assert [path.name for path in (tmp_path / "squares").iterdir()] == ["00000"]


def test_two_tries_of_a_task_do_no_harm(tmp_path: Path) -> None:
    def twice(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        for item in items:
            function(item)  # its worker was taken for dead
            yield function(item)

    assert list(run(tmp_path / "a", map_ordered=twice)) != []
    list(run(tmp_path / "b"))
    assert folder_hash(tmp_path / "a/squares") == folder_hash(tmp_path / "b/squares")


KILLED = """
import os, signal, sys
from pathlib import Path
from pipelines.run.progress import ProgressWriter
from pipelines.data.passes import map_in_process
from pipelines.data.passes import Passes

def task(item, folder):
    (folder / "data").write_text("half")
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item

work = Path(sys.argv[1])
passes = Passes(work, map_in_process, lambda: ProgressWriter(work, "test"))
list(passes.run("squares", task, range(5), int, "units"))
"""


def test_a_killed_task_leaves_no_folder_of_its_name(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    whole = {path.parent.name for path in tmp_path.glob("squares/*/" + RESULT)}
    assert whole == {"00000", "00001", "00002"}
    assert not (tmp_path / "squares/00003").exists()


def test_a_pass_over_nothing(tmp_path: Path) -> None:
    assert list(run(tmp_path, items=[])) == []


def test_a_works_folder_stays_for_the_same_key_and_goes_at_its_end(tmp_path: Path) -> None:
    work = tmp_path / "work"

    def killed(key: str | None) -> bool:
        """Whether the next try of a work that was killed finds what it had done."""
        with pytest.raises(KeyboardInterrupt), work_folder(work, key) as folder:
            found = (folder / "data").exists()
            (folder / "data").touch()
            raise KeyboardInterrupt
        return found

    assert [killed(key) for key in ("a", "a", "b", "b", None, None)] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]
    with work_folder(work, "a"):
        pass
    assert not work.exists()


def test_what_a_killed_removal_left_is_nobodys_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"

    def killed(folder: Path) -> None:
        (folder / "squares/00000/data").unlink()
        raise KeyboardInterrupt

    for key in ("a", "another"):  # at the work's end, and where another key wipes it
        with pytest.raises(KeyboardInterrupt), work_folder(work, "a") as folder:
            list(run(folder))
            raise KeyboardInterrupt
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", killed)
            with pytest.raises(KeyboardInterrupt), work_folder(work, key):
                pass
        with work_folder(work, "a") as folder:
            assert all((made / "data").exists() for made, _ in run(folder))
    assert not work.exists()


def test_blocks_are_small_of_small_corpora_and_never_large() -> None:
    assert block_bytes(0) == block_bytes(60 << 20) == 1 << 20
    assert block_bytes(640 << 20) == 10 << 20
    assert block_bytes(1 << 50) == 64 << 20
