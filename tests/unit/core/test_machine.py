"""What the kernel tells of this machine."""

from pathlib import Path

from pipelines.core.machine import oom_kills


def test_a_container_counts_its_own_and_else_the_machine_counts(tmp_path: Path) -> None:
    container, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    assert oom_kills(container, machine) == 0  # a system that does not count
    machine.write_text("nr_free_pages 7\noom_kill 5\noom_kill_other 9\n")
    assert oom_kills(container, machine) == 5
    container.write_text("max 9\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(container, machine) == 2
    assert oom_kills() >= 0
