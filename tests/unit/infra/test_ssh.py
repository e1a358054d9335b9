"""`ray up` over SSH: its file against Ray's own schema, and what it runs on a host."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipelines.core.settings import PROJECT
from tests.unit.infra.ray_stub import write_ray

FOLDER = PROJECT / "infra" / "ssh"
CONFIG = yaml.safe_load((FOLDER / "ray-up.yaml").read_text())
RAY = """
echo "$*" >>"$NOTES"
[ $1 = stop ] && exit
openssl verify -CAfile "$RAY_TLS_CA_CERT" "$RAY_TLS_SERVER_CERT" >>"$NOTES"
python -c 'from pipelines.platform.ray_start import check_node
check_node("10.0.0.1", "127.0.0.1")'
"""


def test_ray_takes_it() -> None:
    import ray
    from ray.autoscaler._private.util import prepare_config, validate_config

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    # The schema leaves out a group's own keys, where a word that is wrong would hide.
    assert CONFIG.keys() <= schema["properties"].keys()
    assert CONFIG["provider"].keys() <= schema["properties"]["provider"]["properties"].keys()
    assert [error.message for error in Draft202012Validator(schema).iter_errors(CONFIG)] == []
    validate_config(prepare_config(CONFIG))


def test_each_worker_may_come() -> None:
    assert CONFIG["max_workers"] == len(CONFIG["provider"]["worker_ips"])
    assert CONFIG["provider"]["head_ip"] in CONFIG["head_start_ray_commands"][-1]


@pytest.mark.parametrize("part", ["head", "worker"])
def test_a_host_has_token_and_certificate_before_ray_starts(part: str, tmp_path: Path) -> None:
    stubs, project = tmp_path / "stubs", tmp_path / "penstock"
    for folder in (stubs, project / "infra" / "ssh", project / ".venv" / "bin"):
        folder.mkdir(parents=True)
    (project / "infra" / "images").symlink_to(PROJECT / "infra" / "images")
    (project / "pipelines").symlink_to(PROJECT / "pipelines")
    script = project / "infra" / "ssh" / "start-ray.sh"
    script.write_bytes((FOLDER / "start-ray.sh").read_bytes())
    script.chmod(0o755)
    secrets = script.parent / "secrets"
    subprocess.run([PROJECT / "infra" / "make-secrets.sh", secrets], check=True)
    (project / ".venv" / "bin" / "python").symlink_to(sys.executable)
    write_ray(stubs / "ray", RAY)
    (stubs / "ip").write_text("#!/bin/sh\necho '10.0.0.1 dev eth0 src 10.0.0.9 uid 1000'\n")
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    (tmp_path / "ray_bootstrap_config.yaml").touch()
    (command,) = CONFIG[f"{part}_start_ray_commands"]
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
        "RAY_HEAD_IP": "10.0.0.1",
    }
    subprocess.run(["bash", "-c", command], env=environment, check=True, capture_output=True)
    stop, start, verified = (tmp_path / "notes").read_text().splitlines()
    assert (stop, verified[-2:]) == ("stop", "OK")
    own = "10.0.0.1" if part == "head" else "10.0.0.9"
    assert f"--node-ip-address={own} " in start
    assert ("--head" in start) == (part == "head") == ("--address=10.0.0.1:6379" not in start)
    assert ("--autoscaling-config=" in start) == (part == "head")
    token = (secrets / "ray-token").read_text()
    assert not re.search(token, start)
