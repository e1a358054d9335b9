"""Progress travels through a file that one process appends and others tail."""

from pipelines.run.progress import (
    PROGRESS_FILE,
    Progress,
    ProgressMeter,
    ProgressReader,
    ProgressWriter,
    add_note,
)


def test_a_reader_goes_on_where_it_stopped_and_ignores_half_a_line(tmp_path):
    writer = ProgressWriter(tmp_path, "train", interval=0)
    reader = ProgressReader(tmp_path)
    assert list(reader.read()) == []
    writer.write(1, 10, "steps", loss=2.5)
    assert [event.done for event in reader.read()] == [1]
    with (tmp_path / PROGRESS_FILE).open("a") as file:
        file.write('{"stage": "train", "do')
    assert list(reader.read()) == []
    with (tmp_path / PROGRESS_FILE).open("a") as file:
        file.write('ne": 2, "unit": "steps"}\n')
    assert [event.done for event in reader.read()] == [2]


def test_a_late_reader_can_skip_what_is_old(tmp_path):
    writer = ProgressWriter(tmp_path, "train", interval=0)
    writer.write(1, 10, "steps")
    reader = ProgressReader.at_end(tmp_path)
    writer.write(2, 10, "steps")
    assert [event.done for event in reader.read()] == [2]


def test_frequent_writes_are_thinned_but_the_last_is_kept(tmp_path):
    writer = ProgressWriter(tmp_path, "train", interval=60)
    for step in range(1, 101):
        writer.write(step, 100, "steps", force=step == 100)
    assert [event.done for event in ProgressReader(tmp_path).read()] == [1, 100]


def test_a_meter_tells_how_much_time_is_left():
    told = []
    meter = ProgressMeter("int8", told.append, interval=0)
    meter.write(0, 100, "KiB scored")
    meter.write(50, 100, "KiB scored")
    first, second = told
    assert (first.line(), first.eta) == ("int8 0/100 KiB scored", None)
    assert second.eta > 0
    assert second.line().startswith("int8 50/100 KiB scored, ")
    assert second.line().endswith(" s left")


def test_a_note_repeats_how_far_the_stage_is(tmp_path):
    add_note(tmp_path, "train", "waits for memory")  # of a stage that has not begun
    writer = ProgressWriter(tmp_path, "train", interval=0)
    writer.write(7, 9, "steps", loss=2.0)
    add_note(tmp_path, "train", "waits for memory")
    said, noted = ProgressReader(tmp_path).read()
    assert noted == said.model_copy(update={"note": "waits for memory"})
    assert noted.line() == "train 7/9 steps, loss 2.0000, waits for memory"


def test_the_line_for_people():
    progress = Progress(stage="train", done=120, total=400, unit="steps", rate=4, eta=70, loss=2.3)
    assert progress.line() == "train 120/400 steps, 4 steps/s, loss 2.3000, 70 s left"
