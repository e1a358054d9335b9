"""A stage that ran is recorded, on the real DVC, though the disk be full for a while."""

import time
from concurrent.futures import ThreadPoolExecutor

from pipelines.run.logbook import read_logbook
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.open_workspace import STAGE_CACHE
from pipelines.stages import recording
from pipelines.stages.recording import record
from tests.faults.small_disk import full, small_disk
from tests.unit.stage_cache.cached_project import make_project, open_run


def test_a_full_disk_is_waited_out_and_told_once(tmp_path, monkeypatch):
    project = make_project(tmp_path)
    monkeypatch.setattr(recording, "RETRY_S", 0.2)
    with small_disk(tmp_path / "home" / STAGE_CACHE, 8) as disk, ThreadPoolExecutor() as pool:
        workspace = open_run(project, "one")
        made = workspace / "outputs" / "first" / "data.bin"
        made.parent.mkdir(parents=True)
        made.write_bytes(bytes(1 << 20))
        with full(disk):
            recording_it = pool.submit(record, workspace, "first")
            deadline = time.monotonic() + 30
            while not read_logbook(workspace):
                assert time.monotonic() < deadline
                assert not recording_it.done(), recording_it.result()
                time.sleep(0.05)
            time.sleep(1)  # more than one try
        recording_it.result(60)
        (entry,) = read_logbook(workspace)
        assert (entry.kind, entry.stage) == ("storage", "first")
        assert "No space left" in entry.cause
        other = open_run(project, "two")
        assert dvc_cache.restore(other, "first")
        assert (other / "outputs/first/data.bin").read_bytes() == bytes(1 << 20)
