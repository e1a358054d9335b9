"""The installation's own look at a cluster, which is a real API server of an old Kubernetes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.kubernetes.control_plane import PROGRAMS, ControlPlane
from tests.infra.kubernetes.overlays import FOLDER, NAMESPACE, render
from tests.unit.infra.test_install import site_overlay

pytestmark = [pytest.mark.infra, pytest.mark.timeout(3600)]
CLASS = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "provisioner": "none"}
ISSUER = {"apiVersion": "cert-manager.io/v1", "kind": "ClusterIssuer", "spec": {"selfSigned": {}}}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return site_overlay(tmp_path)


def missing(plane: ControlPlane, site: Path) -> list[str]:
    """What `install.py check` says is missing."""
    commands = site.parents[2] / "bin"
    commands.mkdir(exist_ok=True)
    config = plane.folder / "admin.kubeconfig"
    reach = f"nsenter --net=/run/netns/{plane.space} {PROGRAMS}/kubectl --kubeconfig={config}"
    (commands / "kubectl").write_text(f'#!/bin/sh\nexec {reach} "$@"\n')
    (commands / "kubectl").chmod(0o755)
    done = subprocess.run(
        [sys.executable, FOLDER / "install.py", "check", site],
        env=os.environ | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return [line.removeprefix("missing: ") for line in done.stderr.splitlines()]


def test_it_names_what_a_cluster_lacks_and_no_longer_what_it_has(
    plane: ControlPlane, site: Path
) -> None:
    found = missing(plane, site)
    assert found == [
        "API policy/v1: newer Kubernetes",
        "storageclass cephfs: not in the cluster",
        "storageclass topolvm: not in the cluster",
        "gatewayclass cilium: not in the cluster",
        "clusterissuer site: not in the cluster",
        "clustersecretstore penstock: not in the cluster",
        *(f"namespace {name}: not in the cluster" for name in ("cnpg-system", "gateways")),
        f"persistentvolumeclaim parallel in {NAMESPACE}: not in the cluster",
    ]
    try:
        for name in ("cephfs", "topolvm"):
            plane.apply(CLASS | {"metadata": {"name": name}})
        plane.apply(ISSUER | {"metadata": {"name": "site"}})
        assert missing(plane, site) == [
            line for line in found if not line.startswith(("storageclass", "clusterissuer"))
        ]
    finally:
        plane.kubectl("delete", "storageclass", "cephfs", "topolvm", "--ignore-not-found")
        plane.kubectl("delete", "clusterissuer", "site", "--ignore-not-found")


def test_a_snapshot_of_the_home_is_one_and_a_claim_can_begin_from_it(plane: ControlPlane) -> None:
    plane.kubectl("create", "namespace", NAMESPACE)
    try:
        for _ in range(2):  # as many as one likes
            plane.kubectl("create", f"--filename={FOLDER / 'home-snapshot.yaml'}")
        snapshots = plane.get(f"--namespace={NAMESPACE}", "volumesnapshots")
        assert len(snapshots) == 2
        (home,) = [r for r in render(FOLDER / "base") if r["kind"] == "PersistentVolumeClaim"]
        for snapshot in snapshots:
            source = snapshot["spec"]["source"]
            assert source == {"persistentVolumeClaimName": home["metadata"]["name"]}
        source = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot"}
        home["spec"]["dataSource"] = source | {"name": snapshots[0]["metadata"]["name"]}
        plane.apply(home)
    finally:
        plane.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s")
