"""The pods that operators and the scheduler would make and place, as no operator runs here."""

import json
from copy import deepcopy
from typing import Any

from tests.infra.kubernetes.control_plane import ControlPlane, Resource
from tests.infra.kubernetes.overlays import NAMESPACE

NODE = "node-1"
# What else runs in a cluster, by its namespace and its pods' labels.
NEIGHBOURS = {
    "gateway": ("envoy-gateway-system", {"app.kubernetes.io/name": "envoy"}),
    "prometheus": ("monitoring", {"app.kubernetes.io/name": "prometheus"}),
    "postgres-operator": ("cnpg-system", {"app.kubernetes.io/name": "cloudnative-pg"}),
    "dns": ("kube-system", {"k8s-app": "kube-dns"}),
    "stranger": (NAMESPACE, {"app.kubernetes.io/name": "stranger"}),
    "other-team": ("other-team", {"app.kubernetes.io/name": "airflow"}),
}


def neighbours() -> list[Resource]:
    """Pods of others, with their namespaces."""
    found: list[Resource] = []
    for name, (namespace, labels) in NEIGHBOURS.items():
        if namespace != NAMESPACE:
            metadata = {"name": namespace, "labels": {"kubernetes.io/metadata.name": namespace}}
            found.append({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        found.append(_pod(name, namespace, labels, _something()))
    return found


def node(name: str = NODE) -> Resource:
    """A node on which no kubelet runs."""
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}


def ray_pods(cluster: Resource) -> list[Resource]:
    """The head and one worker of each group, with the labels that KubeRay sets."""
    groups = [("head", "headgroup", cluster["spec"]["headGroupSpec"])]
    groups += [("worker", each["groupName"], each) for each in cluster["spec"]["workerGroupSpecs"]]
    found = []
    for kind, group, spec in groups:
        template = spec["template"]
        labels = template["metadata"]["labels"] | {
            "ray.io/cluster": cluster["metadata"]["name"],
            "ray.io/node-type": kind,
            "ray.io/group": group,
        }
        name = "ray-head" if kind == "head" else f"ray-worker-{group}"
        pod = _pod(name, NAMESPACE, labels, template["spec"])
        found.append(pod | {"metadata": pod["metadata"] | _owned_by(cluster)})
    return found


def ray_head(cluster: Resource) -> Resource:
    """The head with what KubeRay 1.7 adds to its first container: the command, token and TLS."""
    pod, *_ = ray_pods(cluster)
    parameters = cluster["spec"]["headGroupSpec"]["rayStartParams"] | {
        "block": "true",
        "metrics-export-port": "8080",
        "dashboard-agent-listen-port": "52365",
    }
    flags = [
        f"--{name}" if value == "true" else f"--{name}={value}"
        for name, value in sorted(parameters.items())
    ]
    folder = "/etc/ray/tls"
    settings = {
        "KUBERAY_GEN_RAY_START_CMD": f"ray start --head {' '.join(flags)}",
        "RAY_PORT": "6379",
        "RAY_ADDRESS": "127.0.0.1:6379",
        "RAY_CLUSTER_NAME": cluster["metadata"]["name"],
        "RAY_CLUSTER_NAMESPACE": NAMESPACE,
        "RAY_CLOUD_INSTANCE_ID": pod["metadata"]["name"],
        "RAY_NODE_TYPE_NAME": "headgroup",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": f"{folder}/tls.crt",
        "RAY_TLS_SERVER_KEY": f"{folder}/tls.key",
        "RAY_TLS_CA_CERT": f"{folder}/ca.crt",
    }
    spec = deepcopy(pod["spec"])
    ray = spec["containers"][0]
    ray["env"] = [
        *ray.get("env", []),
        *({"name": name, "value": value} for name, value in settings.items()),
        _token_of_ray(cluster, spec),
    ]
    ray["volumeMounts"].append({"name": "ray-tls", "mountPath": folder, "readOnly": True})
    spec["volumes"].append({"name": "ray-tls", "secret": {"secretName": "ray-tls"}})
    return pod | {"spec": spec}


def postgres_pods(cluster: Resource) -> list[Resource]:
    """The instances of a Postgres, with the labels that CloudNativePG sets."""
    labels = cluster["spec"].get("inheritedMetadata", {}).get("labels", {})
    found = []
    for number in range(1, cluster["spec"]["instances"] + 1):
        own = labels | {"cnpg.io/cluster": cluster["metadata"]["name"]}
        pod = _pod(f"{cluster['metadata']['name']}-{number}", NAMESPACE, own, _something())
        found.append(pod | {"metadata": pod["metadata"] | _owned_by(cluster)})
    return found


def all_pods_made(plane: ControlPlane) -> bool:
    """Whether each Deployment, StatefulSet and Job of ours has its pods."""
    pods = [pod["metadata"] for pod in plane.get(f"--namespace={NAMESPACE}", "pods")]
    wanted = 0
    for each in plane.get(f"--namespace={NAMESPACE}", "deployments,statefulsets,jobs"):
        wanted += each["spec"].get("replicas", each["spec"].get("completions", 0))
    operators = ("RayCluster", "Cluster")
    made = [
        pod
        for pod in pods
        if any(owner["kind"] not in operators for owner in pod.get("ownerReferences", []))
    ]
    return len(made) >= wanted


def remove_all(plane: ControlPlane) -> None:
    """Delete the namespaces with all that is in them; pods at once, as no kubelet ends them."""
    namespaces = [NAMESPACE, *{space for space, _ in NEIGHBOURS.values()} - {NAMESPACE}]
    namespaces.remove("kube-system")
    for namespace in ("kube-system", *namespaces):
        plane.kubectl(
            *("delete", "pods", "--all", f"--namespace={namespace}"),
            *("--force", "--grace-period=0", "--ignore-not-found"),
        )
    plane.kubectl("delete", "namespace", *namespaces, "--ignore-not-found", "--timeout=180s")


def place_all(plane: ControlPlane, node: str = NODE) -> None:
    """Bind each pod that has no node to this one, and say that all run and are ready."""
    for pod in plane.get("pods", "--all-namespaces"):
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        if "nodeName" not in pod["spec"]:
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
            binding |= {"target": {"apiVersion": "v1", "kind": "Node", "name": node}}
            plane.kubectl(
                "create", "--raw", f"{path}/binding", "--filename=-", stdin=json.dumps(binding)
            )
        plane.say_ready(namespace, name)


def kind_of(pod: Resource) -> str:
    """`scheduler` of the pod scheduler-5f6d-x7z, and so on."""
    name = str(pod["metadata"]["name"])
    owner = pod["metadata"].get("ownerReferences", [{}])[0]
    if owner.get("kind") == "ReplicaSet":
        return name.rsplit("-", 2)[0]
    of_many = owner.get("kind") in ("Job", "StatefulSet", "Cluster")
    return str(owner["name"]) if of_many else name


def _owned_by(owner: Resource) -> dict[str, Any]:
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
    reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
    return {"ownerReferences": [reference]}


def _token_of_ray(cluster: Resource, pod: Resource) -> Resource:
    """How a process gets its token; an account's needs no volume where the pod brings its own."""
    options = cluster["spec"]["authOptions"]
    if options.get("enableK8sTokenAuth"):
        assert "ray-token" in [volume["name"] for volume in pod["volumes"]]
        return {"name": "RAY_ENABLE_K8S_TOKEN_AUTH", "value": "true"}
    key = {"name": options["secretName"], "key": "auth_token"}
    return {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": key}}


def _something() -> Resource:
    return {"containers": [{"name": "main", "image": "any"}]}


def _pod(name: str, namespace: str, labels: dict[str, str], spec: Resource) -> Resource:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
