"""MLflow, Postgres and a Ray head under a real kubelet, from the manifests, and a job of Ray's."""

import base64
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from pipelines.core.settings import PROJECT
from tests.infra.containers import IMAGES, build_options, environment, our_image, podman, stand_in
from tests.infra.kubernetes.control_plane import ControlPlane, Resource, control_plane
from tests.infra.kubernetes.node import PAUSE, PODS, Node, node_of
from tests.infra.kubernetes.operators import ray_head
from tests.infra.kubernetes.overlays import (
    FOLDER,
    FULLEST,
    NAMESPACE,
    definitions,
    for_older,
    render_with,
)
from tests.infra.machine import needs

# The first run builds Kubernetes and the images.
pytestmark = [pytest.mark.infra, pytest.mark.timeout(5400)]

# Of a node with two cores.
VALUES = {
    "head-cpus": "250m",
    "head-memory": "4Gi",
    "kubernetes-api-cidr": "10.83.2.0/24",
}
SMALL = """
- {op: replace, path: /spec/replicas, value: 1}
- {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 250m}
"""
JOB = """
import mlflow, ray
ray.init()
run = mlflow.start_run(experiment_id=mlflow.set_experiment("kubernetes").experiment_id)
mlflow.log_metric("answer", 42)
mlflow.end_run()
print("MLflow answers", mlflow.get_run(run.info.run_id).data.metrics["answer"])
"""


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    """Our images and what stands in for those of registries, by the manifests' names."""
    needs("podman", "containerd", "ctr", "runc", "loopback", "mmdebstrap")
    ours = {f"penstock-{target}": our_image(target) for target in ("mlflow", "ray-cpu")}
    for name in ("postgres", "nginx"):
        stand_in(name)
    pause = PROJECT / "tests" / "infra" / "kubernetes" / "pause"
    podman("build", *build_options(), f"--tag={PAUSE}", pause)
    return ours | {"nginx": IMAGES["nginx"], "postgres": IMAGES["postgres"], "pause": PAUSE}


@pytest.fixture(scope="module")
def cluster(
    images: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ControlPlane, Node]]:
    """A cluster of one node that has the images."""
    folder = tmp_path_factory.mktemp("cluster")
    with (
        control_plane(folder, "penstock-node", "10.83.2") as plane,
        node_of(plane) as node,
        names_on_the_host(plane),
    ):
        for image in images.values():
            node.load(image, environment())
        plane.apply(*definitions())
        yield plane, node


@contextmanager
def names_on_the_host(plane: ControlPlane) -> Iterator[None]:
    """Who enters the cluster's network by `ip netns exec` knows the services' names."""
    folder = Path("/etc/netns") / plane.space
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolv.conf").write_text(
        f"nameserver {plane.address}\nsearch {NAMESPACE}.svc.cluster.local\n"
    )
    try:
        yield
    finally:
        shutil.rmtree(folder)


def rendered(images: dict[str, str], folder: Path, *components: Path) -> list[Resource]:
    """The overlay of a site with one small node, whose images are the node's own."""
    named = yaml.safe_load((FULLEST / "kustomization.yaml").read_text())["images"]
    for each in named:
        if image := images.get(each["name"]):
            each.pop("digest")
            each["newName"], each["newTag"] = image.rsplit(":", 1)
    small = {"target": {"kind": "Deployment", "name": "mlflow"}, "patch": SMALL}
    changes = {"values": VALUES, "images": named, "patches": [small]}
    return for_older(render_with(folder, *components, **changes))


@pytest.fixture(scope="module")
def manifests(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Resource]:
    return rendered(images, tmp_path_factory.mktemp("overlay"))


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a secret store, and certificates."""
    folder = tmp_path_factory.mktemp("secrets")
    subprocess.run([PROJECT / "infra" / "make-secrets.sh", folder], check=True)
    return folder


def secret(name: str, files: dict[str, Path]) -> Resource:
    data = {key: base64.b64encode(path.read_bytes()).decode() for key, path in files.items()}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def made_secrets(manifests: list[Resource], store: Path) -> list[Resource]:
    """What External Secrets would make; templates, which only Postgres' own has, are left out."""
    return [
        secret(
            each["spec"]["target"]["name"],
            {
                item["secretKey"]: store / item["remoteRef"]["key"].removeprefix("penstock/")
                for item in each["spec"]["data"]
            },
        )
        for each in manifests
        if each["kind"] == "ExternalSecret"
    ]


def certificates(plane: ControlPlane) -> list[Resource]:
    """What cert-manager would make of the Certificate and for KubeRay, by one authority."""
    folder = plane.folder / "certificates"
    pki = PROJECT / "tests" / "infra" / "kubernetes" / "certificate.sh"
    names = ", ".join(["DNS:ray-https", "IP:127.0.0.1", *(f"IP:{address}" for address in PODS)])
    subprocess.run(["bash", pki, folder, names], check=True, capture_output=True)
    files = {name: folder / name for name in ("tls.crt", "tls.key", "ca.crt")}
    return [secret("ray-https", files), secret("ray-tls", files)]


def home(folder: Path) -> Resource:
    """A volume for the claim `home`, in a folder of the node's."""
    folder.mkdir()
    folder.chmod(0o777)
    spec = {
        "capacity": {"storage": "1Ti"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "shared",
        "hostPath": {"path": str(folder)},
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "home"},
        "spec": spec,
    }


def postgres(image: str) -> list[Resource]:
    """What CloudNativePG would make of the Cluster: a pod, and the service that leads to it."""
    labels = {"app.kubernetes.io/name": "postgres", "cnpg.io/cluster": "postgres"}
    sql = (PROJECT / "infra" / "compose" / "databases.sql").read_text()
    container = {
        "name": "postgres",
        "image": image,
        "env": [
            {"name": "POSTGRES_USER", "value": "penstock"},
            {"name": "POSTGRES_PASSWORD_FILE", "value": "/secrets/password"},
        ],
        "readinessProbe": {
            "exec": {"command": ["pg_isready", "--host=127.0.0.1", "--username=penstock"]}
        },
        "volumeMounts": [
            {"name": "secrets", "mountPath": "/secrets"},
            {"name": "databases", "mountPath": "/docker-entrypoint-initdb.d"},
        ],
    }
    volumes = [
        {"name": "secrets", "secret": {"secretName": "postgres"}},
        {"name": "databases", "configMap": {"name": "databases"}},
    ]

    def named(name: str, **more: object) -> Resource:
        return {"metadata": {"name": name, "namespace": NAMESPACE, **more}}

    service = {"selector": labels, "ports": [{"port": 5432}]}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"databases.sql": sql}}
        | named("databases"),
        {"apiVersion": "v1", "kind": "Service", "spec": service} | named("postgres-rw"),
        {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container], "volumes": volumes}}
        | named("postgres-1", labels=labels),
    ]


def waits(plane: ControlPlane, what: str, condition: str, seconds: int) -> None:
    """Wait for a pod or a job; if in vain, say what its containers said."""
    done = plane.try_kubectl(
        *("wait", f"--namespace={NAMESPACE}", what),
        *(f"--for=condition={condition}", f"--timeout={seconds}s"),
    )
    if done.returncode:
        state = plane.kubectl("get", "pods,events", f"--namespace={NAMESPACE}", check=False)
        logs = plane.kubectl(
            *("logs", what, f"--namespace={NAMESPACE}", "--all-containers", "--tail=50"),
            check=False,
        )
        pytest.fail(f"{what} is not {condition}: {done.stderr}\n{state}\n{logs}")


@pytest.fixture(scope="module")
def running(
    cluster: tuple[ControlPlane, Node],
    manifests: list[Resource],
    images: dict[str, str],
    secrets: Path,
) -> ControlPlane:
    """Postgres, MLflow and Ray's head, from the manifests."""
    plane, node = cluster
    of_airflow = [
        each
        for each in manifests
        if each["kind"] in ("Deployment", "Job")
        and each["metadata"]["labels"]["app.kubernetes.io/name"] == "airflow"
    ]
    wanted = [each for each in manifests if each not in of_airflow]
    namespace = [each for each in wanted if each["kind"] == "Namespace"]
    plane.apply(*namespace, *made_secrets(manifests, secrets), *certificates(plane))
    plane.apply(home(plane.folder / "home"), *postgres(images["postgres"]))
    waits(plane, "pod/postgres-1", "Ready", 180)
    node.publish()
    plane.apply(*wanted)
    waits(plane, "job/mlflow-prepare", "complete", 400)
    waits(plane, "deployment/mlflow", "Available", 400)
    node.publish()
    start_head(plane, node)
    return plane


def start_head(plane: ControlPlane, node: Node) -> None:
    """The pod that KubeRay would make of the RayCluster."""
    (ray,) = plane.get(f"--namespace={NAMESPACE}", "rayclusters")
    head = ray_head(ray)
    head["spec"]["containers"][0]["env"] += [
        # Ray gives its agents 15 seconds, which a busy machine of two cores needs for itself.
        {"name": "RAY_raylet_start_wait_time_s", "value": "240"},
        # No proxy of services runs here, which would lead to the API server.
        {"name": "KUBERNETES_SERVICE_HOST", "value": plane.address},
        {"name": "KUBERNETES_SERVICE_PORT", "value": "6443"},
    ]
    plane.apply(head)
    waits(plane, "pod/ray-head", "Ready", 300)
    node.publish()


def submit(plane: ControlPlane, token: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`ray job submit` from inside the cluster's network, by the service, its TLS and a token."""
    token_path = f"RAY_AUTH_TOKEN_PATH={token}"
    return subprocess.run(
        [
            *("ip", "netns", "exec", plane.space, "env", "RAY_AUTH_MODE=token", token_path),
            *(Path(sys.executable).with_name("ray"), "job", "submit"),
            *("--address=https://ray-https:8443", f"--verify={plane.folder}/certificates/ca.crt"),
            "--",
            *command,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def passes(plane: ControlPlane, token: Path) -> None:
    """A job with this token tells MLflow, once Ray's head takes jobs."""
    plane.wait_for(lambda: submit(plane, token, "true").returncode == 0, 300)
    done = submit(plane, token, "python", "-c", JOB)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MLflow answers 42.0" in done.stdout


def refused(plane: ControlPlane, token: Path) -> None:
    done = submit(plane, token, "true")
    assert done.returncode != 0
    assert "authentication failed" in (done.stdout + done.stderr).lower()


def test_a_job_passes_on_ray_and_tells_mlflow(running: ControlPlane, secrets: Path) -> None:
    passes(running, secrets / "ray-token")


def test_without_the_token_ray_takes_no_job(running: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "ray-token").write_text("0" * 64)
    refused(running, tmp_path / "ray-token")


def test_containers_have_no_rights_and_can_write_to_their_volumes_only(
    running: ControlPlane,
) -> None:
    probe = "cat /proc/self/status; id -u; touch /opt/penstock/x || echo read-only"
    for pod in ("deployment/mlflow", "pod/ray-head"):
        said = running.kubectl("exec", f"--namespace={NAMESPACE}", pod, "--", "sh", "-c", probe)
        lines = said.splitlines()
        assert "CapEff:\t0000000000000000" in lines, pod
        assert "NoNewPrivs:\t1" in lines, pod
        assert "Seccomp:\t2" in lines, pod
        assert lines[-2:] == ["1000", "read-only"], pod


@pytest.fixture(scope="module")
def with_roles(
    running: ControlPlane,
    cluster: tuple[ControlPlane, Node],
    images: dict[str, str],
    secrets: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> ControlPlane:
    """The same with the component ray-roles, and a head that has started since."""
    plane, node = cluster
    kinds = ("ServiceAccount", "Secret", "Role", "RoleBinding", "ClusterRoleBinding", "RayCluster")
    manifests = rendered(images, tmp_path_factory.mktemp("roles"), FOLDER / "ray-roles")
    of_ray = [each for each in manifests if each["kind"] in kinds]
    plane.apply(*of_ray, *made_secrets(manifests, secrets))
    plane.kubectl("delete", "pod", f"--namespace={NAMESPACE}", "ray-head", "--grace-period=3")
    start_head(plane, node)
    return plane


def of_account(plane: ControlPlane, secret: str, folder: Path) -> Path:
    """The token that Kubernetes wrote into an account's secret."""
    data = plane.get(f"--namespace={NAMESPACE}", "secret", secret)["data"]
    (folder / "token").write_bytes(base64.b64decode(data["token"]))
    return folder / "token"


def test_airflow_has_a_token_of_its_own(with_roles: ControlPlane, tmp_path: Path) -> None:
    passes(with_roles, of_account(with_roles, "airflow-on-ray-token", tmp_path))


def test_the_token_that_all_shared_opens_nothing_any_more(
    with_roles: ControlPlane, secrets: Path
) -> None:
    refused(with_roles, secrets / "ray-token")


def test_a_team_is_let_in_and_out_again(with_roles: ControlPlane, tmp_path: Path) -> None:
    here = f"--namespace={NAMESPACE}"
    with_roles.kubectl("create", "serviceaccount", here, "research")
    team = tmp_path / "ray-token"
    team.write_text(with_roles.token_of(NAMESPACE, "research"))
    refused(with_roles, team)
    account = f"--serviceaccount={NAMESPACE}:research"
    with_roles.kubectl("create", "rolebinding", here, "research", "--role=uses-ray", account)
    assert submit(with_roles, team, "true").returncode == 0
    with_roles.kubectl("delete", "rolebinding", here, "research")
    team.write_text(with_roles.token_of(NAMESPACE, "research"))  # Ray remembers the other's yes
    refused(with_roles, team)
