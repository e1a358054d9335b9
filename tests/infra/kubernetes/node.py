"""A node of a cluster: containerd, a bridge for its pods, the kubelet and the names of services."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.infra.kubernetes.control_plane import PROGRAMS, ControlPlane
from tests.infra.kubernetes.operators import NODE
from tests.infra.kubernetes.overlays import NAMESPACE

# Few, so that a certificate may name all of them.
PODS = [f"10.88.83.{number}" for number in range(2, 31)]
PAUSE = "localhost/pause:1"  # what holds the namespaces of a pod
_HERE = Path(__file__).parent
_NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "pods",
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.88.83.0/27"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}


class Node:
    """One node, on the host of its control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._folder = plane.folder
        self._state = Path("/run") / plane.space
        self._images = Path(tempfile.mkdtemp(prefix="containerd-", dir=PROGRAMS))
        self._socket = self._state / "containerd.sock"
        self._names = self._folder / "names.json"
        self._kubelet: subprocess.Popen[bytes] | None = None

    def raise_up(self) -> None:
        """Start all of it; returns when the node says it is ready."""
        network = self._folder / "net.d"
        network.mkdir()
        (network / "pods.conflist").write_text(
            json.dumps(_NETWORK | {"dataDir": str(self._folder / "leases")})
        )
        self._names.write_text("{}")
        self._start_containerd(network)
        self._plane.start(
            sys.executable, _HERE / "service_names.py", self._plane.address, self._names
        )
        self._start_kubelet()
        self._plane.start(
            PROGRAMS / "kube-scheduler",
            f"--kubeconfig={self._folder}/scheduler.kubeconfig",
            "--leader-elect=false",
        )
        self._plane.wait_for(self._is_ready, 120)

    def load(self, image: str, environment: dict[str, str]) -> None:
        """Give the node one of podman's images."""
        save = subprocess.Popen(["podman", "save", image], env=environment, stdout=subprocess.PIPE)
        self._ctr("images", "import", "-", stdin=save.stdout)
        assert save.wait() == 0, image

    def publish(self) -> None:
        """Let names lead to the pods that are ready behind each service now."""
        names = {}
        for each in self._plane.get("endpoints", "--all-namespaces"):
            metadata = each["metadata"]
            found = [
                address["ip"]
                for subset in each.get("subsets") or []
                for address in subset.get("addresses") or []
            ]
            names[f"{metadata['name']}.{metadata['namespace']}.svc.cluster.local"] = found
        written = self._names.with_suffix(".new")
        written.write_text(json.dumps(names))
        written.replace(self._names)

    def take_down(self) -> None:
        """End the pods, then the kubelet, and then what containers are left."""
        ending = ("delete", "namespace", NAMESPACE, "--ignore-not-found")
        self._plane.kubectl(*ending, "--wait=false", check=False)
        # Nothing of theirs is needed any more, so they get seconds instead of a minute and more.
        pods = ("delete", "pods", "--all", f"--namespace={NAMESPACE}", "--grace-period=3")
        self._plane.kubectl(*pods, "--wait=false", check=False)
        self._plane.kubectl(*ending, "--timeout=120s", check=False)
        if self._kubelet:
            self._kubelet.terminate()
            self._kubelet.wait(30)
        for task in self._ctr("tasks", "list", "--quiet", check=False).split():
            self._ctr("tasks", "kill", "--all", "--signal=KILL", task, check=False)
            self._ctr("tasks", "delete", "--force", task, check=False)

    def clean_up(self) -> None:
        """Remove what is left of pods and images, when nothing of the node runs any more."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed(mounts):
            if mount.startswith((f"{self._folder}/", f"{self._state}/", f"{self._images}/")):
                subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
        for folder in (self._images, self._state):
            shutil.rmtree(folder, ignore_errors=True)

    def _start_containerd(self, network: Path) -> None:
        cri = "plugins.'io.containerd.grpc.v1.cri'"
        unused = [
            f"io.containerd.snapshotter.v1.{n}" for n in ("btrfs", "zfs", "aufs", "devmapper")
        ]
        config = self._folder / "containerd.toml"
        config.write_text(f"""version = 2
root = "{self._images}"
state = "{self._state}/containerd"
disabled_plugins = {unused}
[grpc]
  address = "{self._socket}"
[{cri}]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  [{cri}.cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{network}"
  [{cri}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
""")
        self._plane.start("containerd", f"--config={config}")
        self._plane.wait_for(self._socket.exists)

    def _start_kubelet(self) -> None:
        folder, pki = self._folder, self._folder / "pki"
        resolver = folder / "resolv.conf"
        resolver.write_text(f"nameserver {self._plane.address}\n")
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "maxOpenFiles": 20000,
            "clusterDNS": [self._plane.address],
            "clusterDomain": "cluster.local",
            "resolvConf": str(resolver),
            "tlsCertFile": f"{pki}/kubelet.crt",
            "tlsPrivateKeyFile": f"{pki}/kubelet.key",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi"},
            "imageGCHighThresholdPercent": 100,  # however full this machine's disk is
            "featureGates": {"GenericEphemeralVolume": True},
        }
        (folder / "kubelet.yaml").write_text(yaml.safe_dump(config))
        self._kubelet = self._plane.start(
            PROGRAMS / "kubelet",
            f"--config={folder}/kubelet.yaml",
            f"--kubeconfig={folder}/kubelet.kubeconfig",
            f"--root-dir={folder}/kubelet",
            f"--cert-dir={folder}/kubelet-certificates",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{self._socket}",
            f"--hostname-override={NODE}",
            f"--node-ip={self._plane.address}",
        )

    def _is_ready(self) -> bool:
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return "True" in self._plane.kubectl("get", "node", NODE, f"--output={path}", check=False)

    def _ctr(self, *arguments: str, stdin: object = None, check: bool = True) -> str:
        command = ["ctr", f"--address={self._socket}", "--namespace=k8s.io", *arguments]
        done = subprocess.run(
            command,
            stdin=stdin,  # type: ignore[arg-type]  # a pipe or none
            capture_output=True,
            text=True,
            env=os.environ | {"TMPDIR": str(self._folder)},
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


@contextmanager
def node_of(plane: ControlPlane) -> Iterator[Node]:
    """A node while in the block."""
    node = Node(plane)
    try:
        node.raise_up()
        yield node
    finally:
        node.take_down()
        plane.bring_down()
        node.clean_up()
