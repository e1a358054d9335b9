"""The images, built by the project's script from its Dockerfile as it is, and looked into."""

import json
import shutil
import subprocess
import tarfile
import time

import pytest

from pipelines.core.settings import PROJECT
from tests.infra import containers
from tests.infra.containers import BASE, PLANTED, podman
from tests.infra.machine import needs

pytestmark = [pytest.mark.infra, pytest.mark.timeout(3000)]

# In GB, of what lies on the disk.
BUDGETS = {"mlflow": 0.9, "airflow": 1.8, "ray-cpu": 2.2}
COMMANDS = {"mlflow": "mlflow --version", "airflow": "airflow version", "ray-cpu": "ray --version"}
REGISTRY = """version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/registry}}}}
http: {{addr: "127.0.0.1:5917"}}
log: {{level: error}}
"""
MIRROR = """[[registry]]
location = "docker.io"
[[registry.mirror]]
location = "127.0.0.1:5917"
insecure = true
"""


@pytest.fixture(scope="module", params=BUDGETS)
def target(request):
    return request.param


@pytest.fixture(scope="module")
def image(target):
    """The built image."""
    needs("podman", "runc", "mmdebstrap")
    return containers.our_image(target)


def in_container(image, script):
    """What a shell prints in a container that has no right, no network and nowhere to write."""
    restricted = ["--rm", "--network=none", "--read-only", "--read-only-tmpfs=false"]
    restricted += ["--cap-drop=all", "--security-opt=no-new-privileges"]
    writable = ["--tmpfs=/home/penstock:mode=1777", "--tmpfs=/tmp:mode=1777,exec"]
    secrets = ["--env=PENSTOCK_PART=", "--env=AIRFLOW_HOME=/tmp/airflow"]
    return podman("run", *restricted, *writable, *secrets, image, "bash", "-euc", script)


def test_an_image_keeps_its_budget(image, target):
    size = int(podman("image", "inspect", "--format={{.Size}}", image)) / 1e9
    print(f"{target}: {size:.2f} GB")
    assert size <= BUDGETS[target]


def test_an_image_runs_without_rights_and_its_code_is_not_its_users(image, target):
    said = in_container(
        image,
        """id -u; id -g; grep CapEff /proc/self/status | cut -f 2
        find / -xdev -user 1000 | sort | tr '\\n' ' '; echo
        ! touch /opt/penstock/planted 2>/dev/null
        git clone --quiet /opt/penstock /tmp/clone; git -C /tmp/clone rev-parse HEAD
        git -C /opt/penstock status --porcelain | wc -l""",
    ).splitlines()
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout.strip()
    uid, gid, rights, own, commit, changed = said
    assert (uid, gid, int(rights, 16)) == ("1000", "1000", 0)
    assert set(own.split()) <= {"/tmp/ray", "/var/lib/penstock"}
    assert (commit, changed) == (head, "0")
    start = time.monotonic()
    assert in_container(image, COMMANDS[target])
    print(f"{target}: {COMMANDS[target]} in {time.monotonic() - start:.0f} s")


def test_a_bill_of_materials_has_all_that_is_installed(image, target):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (PROJECT / "build" / f"penstock-{target}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = {(each["name"], each["version"]) for each in json.loads(text)["components"]}
    lines = (PROJECT / "requirements.lock").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if line[0].isalnum() and "==" in line)
    named = {name: version.split("+")[0] for name, version in components}
    for package in {"mlflow": ("mlflow",), "airflow": ("apache-airflow", "torch")}.get(
        target, ("ray", "torch")
    ):
        assert named[package] == locked[package]
    debian = in_container(image, "dpkg-query --show --showformat='${Package} ${Version}\\n'")
    assert {tuple(line.split()) for line in debian.splitlines()} <= components
    count = in_container(image, "ls -d /opt/venv/lib/python3*/site-packages/*.dist-info | wc -l")
    assert len(components) >= len(debian.splitlines()) + int(count)


def test_no_layer_has_a_secret_of_the_build(image, tmp_path):
    podman("save", "--format=docker-archive", f"--output={tmp_path}/image.tar", image)
    found, looked_at = [], 0
    with tarfile.open(tmp_path / "image.tar") as archive:
        for layer in archive:
            text = archive.extractfile(layer)
            if not layer.name.endswith(".tar"):
                found += [layer.name] if text and PLANTED.encode() in text.read() else []
                continue
            with tarfile.open(fileobj=text) as files:
                for file in files:
                    looked_at += 1
                    content = files.extractfile(file).read() if file.isfile() else b""
                    if PLANTED.encode() in content or b"PRIVATE KEY" in content[:64]:
                        found.append(file.name)
    assert looked_at > 10_000
    ours = f"opt/penstock/tests/infra/{containers.__name__.rpartition('.')[2]}"
    assert [name for name in found if not name.startswith(ours)] == []


def test_the_bases_digest_is_fetched_and_recorded(tmp_path):
    """From a registry, by the command that the runbook has."""
    needs("podman", "runc", "mmdebstrap", "docker-registry")
    digest = containers.base_image()
    for name, text in {"registry.yaml": REGISTRY, "mirror.conf": MIRROR}.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path) if "yaml" in name else text)
    registry = subprocess.Popen(["docker-registry", "serve", tmp_path / "registry.yaml"])
    shutil.copytree(PROJECT / "infra" / "images", tmp_path / "infra" / "images")
    try:
        copy = f"127.0.0.1:5917/{BASE.partition('/')[2]}"
        for _ in range(20):
            try:
                podman("push", "--quiet", "--tls-verify=false", BASE, f"docker://{copy}")
                break
            except RuntimeError:
                time.sleep(1)
        # Pulled into an empty storage: what this machine has already says nothing.
        (tmp_path / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/storage"\n'
            f'runroot = "{tmp_path}/storage-run"\n'
        )
        environment = containers.environment() | {
            "ENGINE": "podman",
            "CONTAINERS_REGISTRIES_CONF": str(tmp_path / "mirror.conf"),
            "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
        }
        pin = [tmp_path / "infra" / "images" / "build.sh", "--pin"]
        subprocess.run(pin, env=environment, check=True)
        manifest = tmp_path / "registry/docker/registry/v2/repositories/library/python/_manifests"
        held = (manifest / "tags/3.11-slim-bookworm/index/sha256").iterdir()
        recorded = (tmp_path / "infra" / "images" / "base-digest").read_text().strip()
        assert [recorded] == [f"sha256:{path.name}" for path in held]
        assert digest.startswith("sha256:")
    finally:
        registry.terminate()
        registry.wait()
