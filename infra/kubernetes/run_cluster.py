"""Raises and ends a Ray cluster for one run: what PENSTOCK_NODES names on Kubernetes.

run_cluster.py up      makes the cluster, waits until its nodes are ready, and says its address
run_cluster.py down    ends it, and waits until it is gone

The cluster is the platform's own, `ray`, with another name, one group of workers and no autoscaler:
it has as many nodes as the run has workers. `pipelines/orchestration/temporary_nodes.py` says what
stands in the environment.
"""

import copy
import hashlib
import os
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

Resource = dict[str, Any]
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts one
PLATFORM = "ray"
GROUP = os.environ.get("PENSTOCK_RUN_GROUP", "gpu")
CLUSTERS = "/apis/ray.io/v1/namespaces/penstock/rayclusters"
SERVICES = "/api/v1/namespaces/penstock/services"
GPU = "nvidia.com/gpu"
ASK_EVERY_S = 5.0
TELL_EVERY_S = 60.0
AUTOSCALER = ("enableInTreeAutoscaling", "autoscalerOptions", "suspend")
QUEUE_LABELS = "kueue.x-k8s.io/"


def kubernetes() -> httpx.Client:
    """Return a client of the cluster's API, as this pod's account; its token's file is renewed."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]

    def with_token(request: httpx.Request) -> httpx.Request:
        request.headers["Authorization"] = f"Bearer {(ACCOUNT / 'token').read_text().strip()}"
        return request

    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    transport = httpx.HTTPTransport(verify=trusted, retries=5)
    return httpx.Client(
        base_url=f"https://{host}:{port}", transport=transport, auth=with_token, timeout=30
    )


def cluster_name(run: str) -> str:
    """Return a name that Kubernetes takes, of a run whose own may be long and have capitals."""
    return f"run-{hashlib.sha256(run.encode()).hexdigest()[:12]}"


def cluster_for(platform: Resource, run: str, workers: int, priority: str) -> Resource:
    """Return the platform's RayCluster, changed into one for a run."""
    name = cluster_name(run)
    labels = platform["metadata"].get("labels", {})
    queue = {key: value for key, value in labels.items() if key.startswith(QUEUE_LABELS)}
    if queue and priority:
        queue["kueue.x-k8s.io/priority-class"] = priority
    annotations = platform["metadata"].get("annotations", {})
    kept = {key: value for key, value in annotations.items() if key.startswith("ray.io/")}
    spec = copy.deepcopy(platform["spec"])
    for key in AUTOSCALER:
        spec.pop(key, None)
    groups = {each["groupName"]: each for each in spec["workerGroupSpecs"]}
    if GROUP not in groups:
        sys.exit(f"error: run-group {GROUP!r}: RayCluster {PLATFORM} has {', '.join(groups)}")
    group = groups[GROUP]
    nodes = -(-workers // workers_of_a_node(group))
    group |= {"replicas": nodes, "minReplicas": nodes, "maxReplicas": nodes}
    spec["workerGroupSpecs"] = [group]
    spec["headGroupSpec"]["template"]["spec"]["serviceAccountName"] = "ray-worker"
    return {
        "apiVersion": platform["apiVersion"],
        "kind": "RayCluster",
        "metadata": {
            "name": name,
            "labels": queue,
            "annotations": kept | {"penstock/run": run},
            "ownerReferences": [reference(platform)],  # what removes the platform removes it, too
        },
        "spec": spec,
    }


def workers_of_a_node(group: Resource) -> int:
    """Return one for each GPU; where there are none, one for each CPU."""
    (ray,) = [each for each in group["template"]["spec"]["containers"] if each["name"] == "ray"]
    asked = ray["resources"]["requests"]
    return int(asked.get(GPU, asked["cpu"]))


def service_for(cluster: Resource) -> Resource:
    """Return the way to the cluster's Jobs API, which goes with the cluster."""
    name = cluster["metadata"]["name"]
    head = {"ray.io/cluster": name, "app.kubernetes.io/name": "ray-head"}
    ports = [{"name": "https", "port": 8443, "targetPort": "https"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "ownerReferences": [reference(cluster)]},
        "spec": {"selector": head, "ports": ports},
    }


def reference(owner: Resource) -> Resource:
    """Return a reference to the owner, whose deletion deletes the other too."""
    named = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **named}


def get(api: httpx.Client, path: str) -> Resource | None:
    """Return a resource, None where there is none."""
    answer = api.get(path)
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    found: Resource = answer.raise_for_status().json()
    return found


def make(api: httpx.Client, path: str, resource: Resource) -> Resource:
    """Make a resource unless it is there, and return it as it is there."""
    answer = api.post(path, json=resource)
    if answer.status_code == httpx.codes.CONFLICT:
        answer = api.get(f"{path}/{resource['metadata']['name']}")
    made: Resource = answer.raise_for_status().json()
    return made


def up(api: httpx.Client, run: str) -> None:
    """Make the cluster and its service, and write its address once all nodes are ready."""
    platform = get(api, f"{CLUSTERS}/{PLATFORM}")
    if platform is None:
        sys.exit(f"error: there is no RayCluster {PLATFORM} to take the run's after")
    workers, priority = int(os.environ["PENSTOCK_WORKERS"]), os.environ.get("PENSTOCK_RUN_PRIORITY")
    cluster = make(api, CLUSTERS, cluster_for(platform, run, workers, priority or ""))
    name = cluster["metadata"]["name"]
    make(api, SERVICES, service_for(cluster))
    wait(f"RayCluster {name}", lambda: missing(get(api, f"{CLUSTERS}/{name}")))
    address = Path(os.environ["PENSTOCK_RAY_ADDRESS_FILE"])
    address.write_text(f"https://{name}.penstock.svc:8443\n")


def missing(cluster: Resource | None) -> str:
    """Return what is not there yet, in words; empty: nothing."""
    if cluster is None:
        sys.exit("error: the RayCluster was removed while its nodes were waited for")
    status = cluster.get("status", {})
    wanted = cluster["spec"]["workerGroupSpecs"][0]["replicas"]
    ready = status.get("readyWorkerReplicas", 0)
    conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if conditions.get("HeadPodReady") != "True":
        return "its head is not ready (a queue may hold it back)"
    return "" if ready >= wanted else f"{ready} of {wanted} nodes are ready"


def down(api: httpx.Client, run: str) -> None:
    """End the cluster and all that it owns."""
    path = f"{CLUSTERS}/{cluster_name(run)}"
    answer = api.delete(path, params={"propagationPolicy": "Foreground"})
    if answer.status_code != httpx.codes.NOT_FOUND:
        answer.raise_for_status()
        wait(f"RayCluster {cluster_name(run)}", lambda: "it is ending" if get(api, path) else "")


def wait(what: str, missing: Callable[[], str]) -> None:
    """Ask until nothing is missing, and say each minute what is; Airflow's own time limits hold."""
    told = float("-inf")
    while lacking := asked(missing):
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            sys.stdout.write(f"waiting for {what}: {lacking}\n")
            sys.stdout.flush()
        time.sleep(ASK_EVERY_S)


def asked(missing: Callable[[], str]) -> str:
    """Return what is missing; it may be Kubernetes itself for a while, which costs no run its
    nodes.
    """
    try:
        return missing()
    except httpx.HTTPError as error:
        if isinstance(error, httpx.HTTPStatusError) and not error.response.is_server_error:
            raise
        return f"Kubernetes gives no answer ({error!r})"


def main() -> None:
    """Do what the command line asks; what Kubernetes refuses is one line."""
    try:
        with kubernetes() as client:
            {"up": up, "down": down}[sys.argv[1]](client, os.environ["PENSTOCK_RUN"])
    except httpx.HTTPStatusError as error:
        asked_for = f"{error.request.method} {error.request.url.path}"
        said = " ".join(error.response.text.split())
        sys.exit(f"error: Kubernetes answered {error.response.status_code} to {asked_for}: {said}")
    except httpx.TransportError as error:
        sys.exit(f"error: Kubernetes gives no answer: {error!r}")


if __name__ == "__main__":
    main()
