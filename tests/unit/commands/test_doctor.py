"""`penstock doctor` as a user calls it: here, and on a machine whose tools say what they said."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.machine import free_port

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"
RECORDED = Path(__file__).parent.parent / "doctor" / "recorded"


@pytest.fixture
def doctor(tmp_path):
    """The command, with tools that print recordings first on PATH."""

    def run(*arguments: str, tools: dict[str, str] | None = None, **variables: str):
        for name, script in (tools or {}).items():
            tool = tmp_path / name
            tool.write_text(f"#!/bin/sh\n{script}\n")
            tool.chmod(0o755)
        ports = {f"PENSTOCK_{part}_PORT": str(free_port()) for part in ("AIRFLOW", "MLFLOW", "RAY")}
        environment = {
            **os.environ,
            **ports,
            "PENSTOCK_HOME": str(tmp_path / "home"),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "no_proxy": "*",
            **variables,
        }
        for variable in ("PENSTOCK_AIRFLOW_URL", "MLFLOW_TRACKING_URI", "RAY_API_SERVER_ADDRESS"):
            environment.pop(variable, None)
        return subprocess.run(
            [PENSTOCK, "doctor", *arguments], env=environment, capture_output=True, text=True
        )

    return run


def show(name: str) -> str:
    return f"cat {shlex.quote(str(RECORDED / name))}"


def parts(done) -> dict[str, dict[str, list[dict[str, str]]]]:
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"], done.stderr
    found: dict[str, dict[str, list[dict[str, str]]]] = {}
    for part, findings in told["parts"].items():
        for finding in findings:
            assert finding["why"]
            assert bool(finding["fix"]) == (finding["state"] in ("warning", "problem")), finding
            assert "the check itself failed" not in finding["saw"]
            found.setdefault(part, {}).setdefault(finding["check"], []).append(finding)
    return found


def test_a_machine_without_gpus_has_no_fault_of_theirs(doctor):
    done = doctor("--json")
    found = parts(done)
    assert json.loads(done.stdout)["seconds"] < 12  # 8 for the checks, however busy the machine
    assert list(found) == ["this machine", "services"]
    for check in ("driver and CUDA", "GPUs", "NVLink", "GPUDirect Storage", "network planes"):
        (finding,) = found["this machine"][check]
        assert finding["state"] == "not here", finding
    for check in ("Airflow", "Ray", "MLflow"):
        assert "penstock up" in found["services"][check][0]["saw"]
    assert found["services"]["DVC remote"][0]["state"] == "ok"


def test_a_sick_machine_is_told_by_its_tools_and_ends_with_2(doctor):
    smi = f"""case "$1" in
        topo) {show("topo_a100_far_nic.txt")} ;;
        nvlink) {show("nvlink_v100_inactive.txt")} ;;
        *) {show("smi_rtx4000_ada.xml")} ;;
    esac"""
    container = f"{show('container_cli_mismatch.txt')} >&2; exit 1"
    clock = show("chronyc_not_synchronised.txt")
    tools = {"nvidia-smi": smi, "nvidia-container-cli": container, "chronyc": clock}
    done = doctor("--json", tools=tools)
    assert done.returncode == 2
    machine = parts(done)["this machine"]
    seen = {check: (each[-1]["state"], each[-1]["saw"]) for check, each in machine.items()}
    assert seen["GPUs"] == ("warning", "GPU 0: ECC is off, so that a flipped bit goes unseen")
    assert seen["NVLink"] == ("problem", "NVLinks are down: 2 of 6 on GPU 3")
    assert seen["topology"][0] == "warning"
    assert seen["clock"] == ("problem", "chrony follows no time server")
    assert seen["driver and CUDA"][0] in ("ok", "warning", "problem")  # by the torch that is here


def test_a_driver_that_fails_is_told_once(doctor):
    smi = f"{show('smi_driver_mismatch.txt')}; exit 18"
    machine = parts(doctor("--json", tools={"nvidia-smi": smi}))["this machine"]
    (finding,) = machine["driver and CUDA"]
    assert finding["state"] == "problem"
    assert "Driver/library version mismatch" in finding["saw"]
    assert "reboot" in finding["fix"]
    assert machine["GPUs"][0]["saw"] == "the driver does not answer: see driver and CUDA"


def test_a_user_reads_mark_reason_and_fix(doctor):
    tools = {"chronyc": show("chronyc_not_synchronised.txt")}
    done = doctor(tools=tools, PENSTOCK_NETWORK_PLANES="disk=eth0")
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    start = lines.index("✘ clock: chrony follows no time server")
    assert lines[start + 1].startswith("  why: S3 refuses a wrong time")
    assert lines[start + 2].startswith("  fix: start chronyd")
    assert "- GPUs: no NVIDIA GPU" in lines
    refused = "✘ network planes: PENSTOCK_NETWORK_PLANES: 'disk=eth0' is no PLANE=INTERFACE"
    assert any(line.startswith(refused) for line in lines)
    assert "problem" in lines[-1]


def test_the_help_says_what_the_exit_codes_mean(doctor):
    words = " ".join(doctor("--help").stdout.split())
    assert "0 if all is well or not here, 1 with a warning, 2 with a problem" in words
