"""Kubernetes' control plane on a host of its own: etcd, the API server and the controllers."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.core.settings import PROJECT
from tests.hosts import Hosts
from tests.infra.machine import CACHE, needs

Resource = dict[str, Any]
PROGRAMS = CACHE / "kubernetes"
_HERE = PROJECT / "tests" / "infra" / "kubernetes"
# What newer versions have without asking.
_GATES = "GenericEphemeralVolume=true,TTLAfterFinished=true"


class ControlPlane:
    """An API server that answers on a host's own network, and `kubectl` there."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.folder = folder
        self._hosts = hosts
        self.address = hosts.address(1)
        self.space = hosts.space(1)
        self._running: list[subprocess.Popen[bytes]] = []
        pki = _HERE / "pki.sh"
        subprocess.run(["bash", pki, folder / "pki", self.address], check=True, capture_output=True)
        for user in ("admin", "kubelet", "controllers", "scheduler"):
            self._write_kubeconfig(user)

    def start(self, *command: str | Path) -> subprocess.Popen[bytes]:
        """Run one of Kubernetes' programs on the host; its log has its name."""
        program = Path(command[0]).name
        # Unlike `ip netns exec`, this leaves the cgroups where they are, which the kubelet reads.
        inside = ["nsenter", f"--net=/run/netns/{self.space}", *command]
        with (self.folder / f"{program}.log").open("ab") as log:
            process = subprocess.Popen(inside, stdout=log, stderr=log)
        self._running.append(process)
        return process

    def raise_up(self) -> None:
        """etcd, the API server, and the controllers; returns when the server says it is ready."""
        pki, state = self.folder / "pki", self.folder / "etcd"
        store = "http://127.0.0.1:2379"
        self.start(
            "etcd",
            *(f"--data-dir={state}", f"--listen-client-urls={store}"),
            *(f"--advertise-client-urls={store}", "--listen-peer-urls=http://127.0.0.1:2380"),
        )
        self.start(
            PROGRAMS / "kube-apiserver",
            f"--etcd-servers={store}",
            f"--advertise-address={self.address}",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--tls-cert-file={pki}/server.crt",
            f"--tls-private-key-file={pki}/server.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/admin.crt",
            f"--kubelet-client-key={pki}/admin.key",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={pki}/accounts.key",
            f"--service-account-key-file={pki}/accounts.key",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            f"--feature-gates={_GATES}",
        )
        self.wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", 180)
        self.start(
            PROGRAMS / "kube-controller-manager",
            f"--kubeconfig={self._kubeconfig('controllers')}",
            f"--service-account-private-key-file={pki}/accounts.key",
            f"--root-ca-file={pki}/ca.crt",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--node-monitor-grace-period=1h",  # nodes without a kubelet stay
            f"--feature-gates={_GATES}",
        )

    def bring_down(self) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """What kubectl prints, as the administrator.

        Raises:
            AssertionError: it failed, with what it said.
        """
        done = self.try_kubectl(*arguments, stdin=stdin)
        if check:
            assert done.returncode == 0, f"kubectl {arguments}: {done.stderr}"
        return done.stdout

    def try_kubectl(
        self, *arguments: str, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """kubectl, however it ends."""
        command: list[str | Path] = ["nsenter", f"--net=/run/netns/{self.space}"]
        command += [PROGRAMS / "kubectl", f"--kubeconfig={self._kubeconfig('admin')}"]
        return subprocess.run(
            [*command, *arguments], input=stdin, capture_output=True, text=True, timeout=300
        )

    def get(self, *arguments: str) -> Any:
        """What `kubectl get` finds: one resource, or a list of them."""
        found = json.loads(self.kubectl("get", "--output=json", *arguments))
        return found["items"] if found["kind"] == "List" else found

    def get_all(self, resources: list[Resource]) -> list[Resource]:
        """What the server holds of these resources, in their order."""
        text = yaml.safe_dump_all(resources)
        stored = self.kubectl("get", "--filename=-", "--output=json", stdin=text)
        found: list[Resource] = json.loads(stored)["items"]
        return found

    def apply(self, *resources: Resource) -> str:
        """Apply these resources; what kubectl says of each."""
        return self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(resources))

    def token_of(self, namespace: str, account: str) -> str:
        """A token for an hour of an account, as `kubectl create token` gives one."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        answer = self.kubectl(
            *("create", "--raw", path, "--filename=-"),
            stdin=json.dumps(asked | {"metadata": {}, "spec": {}}),
        )
        token: str = json.loads(answer)["status"]["token"]
        return token

    def say_ready(self, namespace: str, pod: str, ready: bool = True) -> None:
        """Say of a pod that it runs, and whether it is ready, as a kubelet would."""
        stored = self.get(f"--namespace={namespace}", "pod", pod)
        condition = {"type": "Ready", "status": str(ready)}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/status"
        self.kubectl(
            *("replace", "--raw", path, "--filename=-"),
            stdin=json.dumps(stored | {"status": {"phase": "Running", "conditions": [condition]}}),
        )

    def wait_for(self, condition: Any, seconds: float = 60) -> None:
        """Return as soon as the condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            ended = [p.args for p in self._running if p.poll() is not None]
            assert not ended, f"ended: {ended}; logs in {self.folder}"
            assert time.monotonic() < end, f"not within {seconds:.0f} s; logs in {self.folder}"
            time.sleep(0.5)

    def _kubeconfig(self, user: str) -> Path:
        return self.folder / f"{user}.kubeconfig"

    def _write_kubeconfig(self, user: str) -> None:
        pki = self.folder / "pki"
        server = f"https://{self.address}:6443"
        cluster = {"server": server, "certificate-authority": str(pki / "ca.crt")}
        certificate = {
            "client-certificate": str(pki / f"{user}.crt"),
            "client-key": str(pki / f"{user}.key"),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": certificate}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        self._kubeconfig(user).write_text(yaml.safe_dump(config))


def built() -> None:
    """Build Kubernetes where that was not done yet, or skip with the reason."""
    needs("ip", "nsenter", "openssl", "etcd", "go", "dpkg-source", "rsync", "make", "jq")
    done = subprocess.run(
        ["bash", _HERE / "build.sh", PROGRAMS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"Kubernetes could not be built: {(done.stdout + done.stderr)[-1000:]}")


@contextmanager
def control_plane(folder: Path, name: str, subnet: str) -> Iterator[ControlPlane]:
    """A control plane while in the block."""
    built()
    with ExitStack() as stack:
        plane = ControlPlane(stack.enter_context(Hosts(1, name=name, subnet=subnet)), folder)
        stack.callback(plane.bring_down)
        plane.raise_up()
        yield plane
