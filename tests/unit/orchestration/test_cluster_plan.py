"""What Ray's dashboard says of its nodes, as its own models give it (`reporter_models.py`)."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.settings import Settings, load_settings
from pipelines.orchestration.cluster_plan import (
    VARIABLE,
    dry_run_on_cluster,
    settle_on_cluster,
    training_machine,
)
from pipelines.planning.hardware_table import named, of_driver
from pipelines.recipe.recipe_files import parse_recipe
from pipelines.registry.parents import Settled

H100 = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "memoryTotal": 81_559, "memoryUsed": 4}
GIB = 2**30


def node(gpus: int = 0, state: str = "ALIVE", **gpu: Any) -> dict[str, Any]:
    return {
        "raylet": {"state": state, "nodeId": "a"},
        "cpus": [4, 2],
        "mem": [24 * GIB, 20 * GIB, 16.7, 4 * GIB],
        "gpus": [H100 | gpu for _ in range(gpus)],
    }


@contextmanager
def ray_says(body: Any, after: float = 0.0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/nodes?view=summary"
            content = json.dumps(body).encode()
            time.sleep(after)
            allowed = self.headers["Authorization"] == "Bearer t"
            self.send_response(200 if known and allowed else 401)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def machine(
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    samplers: int = 0,
    **resources: Any,
):
    sampling = {"samplers": samplers}
    recipe = parse_recipe({"name": "t", "resources": resources, "reinforcement": sampling})
    with cluster(nodes, tmp_path, monkeypatch) as settings:
        return training_machine(settings, recipe)


@contextmanager
def cluster(
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: float = 0.0,
) -> Iterator[Settings]:
    """Yield the settings with which a run is prepared while Ray says that it has these nodes."""
    (tmp_path / "token").write_text("t\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with ray_says({"result": True, "msg": "", "data": {"summary": nodes}}, after) as url:
        yield replace(load_settings(), ray_url=url)


def test_gpus_are_known_by_their_driver_s_name(tmp_path, monkeypatch) -> None:
    nodes = [node(8), node(8, memoryTotal=81_000), node(0), node(8, state="DEAD", name="?")]
    found = machine(nodes, tmp_path, monkeypatch, workers=16, price_per_gpu_hour=2.5)
    assert found.hardware.flops == of_driver("NVIDIA H100 80GB HBM3").flops
    assert found.hardware.memory_bytes == 81_000 * 2**20
    assert (found.gpus, found.nodes, found.price_per_hour) == (16, 2, 40.0)


def test_without_gpus_a_worker_has_its_share_of_the_node(tmp_path, monkeypatch) -> None:
    found = machine([node()], tmp_path, monkeypatch, workers=[1, 2])
    assert (found.gpus, found.nodes) == (2, 1)
    assert found.hardware.memory_bytes == 12 * GIB
    assert found.hardware.flops["fp32"] == pytest.approx(named("cpu").flops["fp32"] * 2 / 56)


def test_what_is_not_known_is_not_planned(tmp_path, monkeypatch, caplog) -> None:
    assert machine([node(2, name="NVIDIA GeForce GTX 1080")], tmp_path, monkeypatch) is None
    assert "the hardware table has no NVIDIA GeForce GTX 1080; set PENSTOCK_GPU" in caplog.text
    assert machine([{"raylet": {"state": "ALIVE"}}], tmp_path, monkeypatch) is None
    assert machine([{"other": 1}], tmp_path, monkeypatch) is None
    assert "does not report its nodes" in caplog.text


def test_more_workers_than_there_is_room_for_are_refused(tmp_path, monkeypatch) -> None:
    told = "resources.workers = 9: the Ray cluster has 8 GPUs, one for each worker"
    with pytest.raises(UserError, match=told):
        machine([node(8)], tmp_path, monkeypatch, workers=9)
    with pytest.raises(UserError, match="the Ray cluster has 4 CPUs"):
        machine([node()], tmp_path, monkeypatch, workers=[5, 9])
    assert machine([node()], tmp_path, monkeypatch, workers=[2, 9])  # it begins with four
    told = "workers = 3 and reinforcement.samplers = 2: the Ray cluster has 4 CPUs, one for each wo"
    with pytest.raises(UserError, match=f"{told}rker and sampler.*resources.workers to 2 or fewer"):
        machine([node()], tmp_path, monkeypatch, workers=3, samplers=2)
    monkeypatch.setenv("PENSTOCK_NODES", "command")  # which starts nodes for the run
    assert machine([node()], tmp_path, monkeypatch, workers=9)


def test_a_cluster_that_is_away_is_not_waited_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    settings = replace(load_settings(), ray_url="http://127.0.0.1:9")
    assert training_machine(settings, parse_recipe({"name": "t"})) is None


def test_the_environment_names_what_workers_will_get(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "h200")
    found = training_machine(load_settings(), parse_recipe({"name": "t"}))
    assert (found.hardware, found.gpus) == (named("h200"), 2)


def dry_run(gpu: str, monkeypatch: pytest.MonkeyPatch, wanted: bool = True, **train: Any) -> Any:
    monkeypatch.setenv(VARIABLE, gpu)
    resources = {"workers": 1, "dry_run": wanted}
    values = {"name": "a", "resources": resources, "train": train, "data": {"sequence_length": 128}}
    return dry_run_on_cluster(load_settings(), parse_recipe(values))


def test_a_run_s_step_is_tried_where_its_recipe_wants_it(monkeypatch) -> None:
    assert dry_run("h100", monkeypatch, wanted=False) is None
    tried = dry_run("h100", monkeypatch)
    assert tried["peak_bytes"] > 0
    assert tried["formula_error"] == pytest.approx(0, abs=0.08)


def test_no_dry_run_of_a_device_without_cuda(monkeypatch, caplog) -> None:
    assert dry_run("cpu", monkeypatch) is None
    assert "no dry run" in caplog.text


def test_a_run_whose_dry_run_does_not_fit_is_refused(monkeypatch) -> None:
    huge = {"micro_batch_size": 65_536, "global_batch_size": 65_536}
    with pytest.raises(UserError, match=r"dry run needs .* GiB .* but a device has 15 GiB"):
        dry_run("t4", monkeypatch, **huge)


def a_run(**train: Any) -> Settled:
    recipe = parse_recipe({"name": "t", "train": train})
    return Settled(recipe, recipe.model_copy(update={"description": "with folders"}), {"s": 1})


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node()], ("fp32", False)),
        ([node(), node(8)], ("bf16", True)),
        ([node(2, name="Tesla T4")], ("fp32", False)),
    ],
    ids=["cpu", "h100", "t4"],
)
def test_a_run_s_recipe_has_the_precision_of_its_workers(
    nodes, expected, tmp_path, monkeypatch, caplog
) -> None:
    caplog.set_level("INFO")
    with cluster(nodes, tmp_path, monkeypatch) as settings:
        run = settle_on_cluster(settings, a_run())
    for recipe in (run.recipe, run.ready):
        assert (recipe.train.precision, recipe.train.compile) == expected
    assert (run.ready.description, run.source) == ("with folders", {"s": 1})
    assert f"train.precision: auto is {expected[0]} on " in caplog.text


def test_varlen_attn_is_refused_on_a_cpu_beforehand(tmp_path, monkeypatch) -> None:
    with (
        cluster([node()], tmp_path, monkeypatch) as settings,
        pytest.raises(UserError, match=r"attention = varlen: .* but train\.precision is fp32"),
    ):
        settle_on_cluster(settings, a_run(attention="varlen"))
    with cluster([node(2)], tmp_path, monkeypatch) as settings:
        settled = settle_on_cluster(settings, a_run(attention="varlen"))
    assert settled.recipe.train.attention == "varlen"


def test_what_a_recipe_sets_needs_no_cluster(tmp_path) -> None:
    settings = replace(load_settings(), ray_url="http://127.0.0.1:9")
    run = a_run(precision="fp32", compile=False)
    assert settle_on_cluster(settings, run) is run


def test_no_precision_is_guessed(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    away = replace(load_settings(), ray_url="http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match=r"train\.precision: auto .* not report its nodes"):
        settle_on_cluster(away, a_run())
    unknown = [node(2, name="NVIDIA GeForce GTX 1080")]
    told = r"table has no NVIDIA GeForce GTX 1080; set PENSTOCK_GPU .*; or set both"
    with (
        cluster(unknown, tmp_path, monkeypatch) as settings,
        pytest.raises(UserError, match=told) as refused,
    ):
        settle_on_cluster(settings, a_run())
    assert not isinstance(refused.value, UnreachableError)  # a retry would not help


def test_a_cluster_that_is_busy_is_waited_for(tmp_path, monkeypatch) -> None:
    """Longer than for a plan."""
    with cluster([node(8)], tmp_path, monkeypatch, after=2.5) as settings:
        assert settle_on_cluster(settings, a_run()).recipe.train.precision == "bf16"
        assert training_machine(settings, a_run().recipe) is None


def test_nodes_that_start_with_the_run_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_NODES", "command")
    with cluster([node()], tmp_path, monkeypatch) as settings:
        with pytest.raises(UserError, match="nodes start with the run; set PENSTOCK_GPU"):
            settle_on_cluster(settings, a_run())
        for name, expected in (("cpu", "fp32"), ("h100", "bf16")):
            monkeypatch.setenv(VARIABLE, name)
            assert settle_on_cluster(settings, a_run()).recipe.train.precision == expected
