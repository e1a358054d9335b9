"""A real object store on loopback: Ceph's gateway with a monitor and one device in memory."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from pipelines.core.machine import free_port
from tests.infra.machine import needs

CONFIGURATION = """[global]
fsid = {fsid}
mon_host = v1:127.0.0.1:{port}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = false
osd_class_update_on_start = false
mon_allow_pool_size_one = true
osd_objectstore = memstore
memstore_device_bytes = 4294967296
rgw_dynamic_resharding = false
mon_data = {folder}/mon
mon_data_avail_crit = 1
osd_data = {folder}/osd
rgw_data = {folder}/rgw
run_dir = {folder}
keyring = {folder}/keyring
log_file = {folder}/$name.log
admin_socket = {folder}/$name.asok
"""
START_LIMIT_S = 300  # beside Compose, which takes both cores, more than 120 s were seen


class Gateway(NamedTuple):
    """A store that answers, and the keys of a user of it."""

    url: str
    access_key: str
    secret_key: str

    def variables(self) -> dict[str, str]:
        """What leads AWS's clients there."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def object_gateway() -> Iterator[Gateway]:
    """Up while in the block, some 15 s after; what it holds goes with it."""
    needs("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
    # A socket's path may have 107 bytes, and pytest's folders are deep.
    folder = Path(tempfile.mkdtemp(prefix="ceph-"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield _start(folder, processes)
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGKILL)  # it holds nothing that is to last
            process.wait()
        shutil.rmtree(folder)


def _start(folder: Path, processes: list[subprocess.Popen[bytes]]) -> Gateway:
    fsid, port = str(uuid.uuid4()), free_port()
    configuration = CONFIGURATION.format(fsid=fsid, port=port, folder=folder)
    (folder / "ceph.conf").write_text(configuration)
    (folder / "keyring").touch()
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    environment = os.environ | {"CEPH_CONF": str(folder / "ceph.conf")}

    def run(*command: str) -> None:
        limit = {"timeout": START_LIMIT_S, "check": True, "capture_output": True}
        subprocess.run(command, env=environment, cwd=folder, **limit)

    def serve(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("wb") as log:
            processes.append(
                subprocess.Popen([*command, "-f"], env=environment, stdout=log, stderr=log)
            )

    run("monmaptool", "--create", "--addv", "a", f"v1:127.0.0.1:{port}", "--fsid", fsid, "monmap")
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap")
    serve("ceph-mon", "-i", "a")
    device = str(uuid.uuid4())
    run("ceph", "osd", "new", device)
    # A device that says its place itself ends where it asks before it knows the cluster's id, which
    # one start in some fifteen does.
    run("ceph", "osd", "crush", "add", "osd.0", "1", "root=default", "host=a")
    run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", device)
    serve("ceph-osd", "-i", "0")
    keys = secrets.token_hex(10), secrets.token_hex(20)
    own = [f"--access-key={keys[0]}", f"--secret={keys[1]}"]  # of a store that ends with the test
    run("radosgw-admin", "user", "create", "--uid=penstock", "--display-name=penstock", *own)
    gateway = Gateway(f"http://127.0.0.1:{free_port()}", *keys)
    address = gateway.url.removeprefix("http://")
    serve("radosgw", "-n", "client.rgw", f"--rgw-frontends=beast endpoint={address}")
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            httpx.get(gateway.url, trust_env=False).raise_for_status()
            return gateway
        except httpx.TransportError:
            assert processes[-1].poll() is None, (folder / "radosgw.out").read_text()[-2000:]
            assert time.monotonic() < deadline, "the gateway does not answer"
            time.sleep(0.5)
