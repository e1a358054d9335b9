from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan

from pipelines.training.checkpoint.dcp_files import CheckpointWriter


def test_the_place_is_made_ready_by_one_process_once_all_have_planned(tmp_path: Path) -> None:
    place = tmp_path / "step-000001"
    place.mkdir()
    (place / "torn").touch()
    first, other = (
        CheckpointWriter(str(place), (place / "torn").unlink, lambda: None) for _ in range(2)
    )
    plans = [each.prepare_local_plan(SavePlan([])) for each in (other, first)]
    assert (place / "torn").exists()  # nobody has touched anything that another may be clearing
    first.prepare_global_plan(plans)
    assert list(place.iterdir()) == []
