import shutil
from typing import Any

import pytest

from tests.benchmarks import contender, harness
from tests.benchmarks.harness import (
    Benchmark,
    Contender,
    Demand,
    Limit,
    kept_limits,
    ratios,
    run_case,
)

ROUND = """
import threading, time
from tests.benchmarks.contender import serve

count = 0

def work_ahead():
    global count
    while True:
        time.sleep(0.001)
        count += 1

def prepare(folder, options):
    print("a library's chatter")
    threading.Thread(target=work_ahead, daemon=True).start()
    def round():
        before = count
        time.sleep(options["seconds"])
        return 10.0, {"before": before, "seen": (folder / "data").read_text()}
    return round

serve(prepare)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "tests" / "benchmarks"
    (folder / "contenders").mkdir(parents=True)
    for package in (folder.parent, folder, folder / "contenders"):
        (package / "__init__.py").touch()
    (folder / "contenders" / "waiter.py").write_text(ROUND)
    shutil.copy(contender.__file__, folder)
    (tmp_path / "data").write_text("words")
    monkeypatch.setattr(harness, "PROJECT", tmp_path)
    return tmp_path


def benchmark(*demands: Demand, **options: Any) -> Benchmark:
    return Benchmark(
        name="waiting",
        unit="naps",
        contenders=[
            Contender("penstock", "waiter", options={"seconds": 0.02}),
            Contender("slow", "waiter", options={"seconds": 0.2}),
        ],
        demands=list(demands),
        make_data=lambda folder: {},
        **options,
    )


def test_the_faster_one_has_the_higher_ratio_pair_by_pair(project):
    reached, missed = Demand("slow", 3.0), Demand("slow", 50.0)
    bench = benchmark(reached, missed)
    figures = run_case(bench, project, {}, pairs=3, told=lambda line: None)
    assert len(figures["penstock"].values) == 3
    assert figures["slow"].figures["seen"] == "words"
    found = list(ratios(bench, "", figures))
    assert [each["reached"] for each in found] == [True, False]
    assert found[0]["min"] <= found[0]["median"] <= found[0]["max"]


def test_seconds_are_the_better_the_fewer_and_may_have_a_limit(project):
    demands = Demand("slow", 0.3), Demand("slow", 0.01)
    limits = [Limit("median", 10), Limit("median", 0.001), Limit("before", 1e9, of="slow")]
    bench = benchmark(*demands, measures="seconds", limits=limits)
    figures = run_case(bench, project, {}, pairs=3, told=lambda line: None)
    assert 0.002 <= figures["penstock"].summary()["median"] < 0.02  # of ten units a round
    assert [each["reached"] for each in ratios(bench, "", figures)] == [True, False]
    assert [each["reached"] for each in kept_limits(bench, figures)] == [True, False, True]


def test_a_contender_is_stopped_while_another_does_its_round(project):
    figures = run_case(benchmark(), project, {}, pairs=3, told=lambda line: None)
    # Four rounds of 0.2 s by the other one would have let its thread count some 800 on.
    assert figures["penstock"].figures["before"] < 300


def test_a_contender_that_breaks_ends_the_benchmark_by_name(project):
    (project / "data").unlink()
    with pytest.raises(SystemExit, match="slow ended with code 1"):
        run_case(benchmark(), project, {}, pairs=1, told=lambda line: None)
