"""Installs the platform on a Kubernetes cluster, or says what is missing.

install.py prerequisites OVERLAY    prints the commands of helm that install what the overlay needs
install.py check OVERLAY            says what is missing, and changes nothing
install.py apply OVERLAY            checks, applies, and waits until all parts are there
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
NAMESPACE = "penstock"
# A job can't be changed: the next version's is another.
JOBS = ("airflow-prepare", "mlflow-prepare")
EXAMPLES = ("example.com", "192.0.2.0/24", f"sha256:{'0' * 64}")  # of the overlay that is copied
Resource = dict[str, Any]


def kubectl(*arguments: str, text: str | None = None) -> str:
    """Return what kubectl says; ends with its own words where it fails."""
    done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def say(text: str) -> None:
    """Write at once: who installs watches."""
    sys.stdout.write(text)
    sys.stdout.flush()


def names(kind: str, namespace: str | None = None) -> set[str]:
    """Return the cluster's objects of a kind; of a kind that it doesn't know, none."""
    where = ["--namespace", namespace] if namespace else []
    command = ["kubectl", "get", kind, *where, "--output=json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "doesn't have a resource type" in done.stderr:
        return set()
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}: {done.stderr.strip()}")
    return {each["metadata"]["name"] for each in json.loads(done.stdout)["items"]}


def prerequisites(resources: list[Resource]) -> list[Resource]:
    """Return those of prerequisites.yaml whose API the overlay uses, in the order of that file."""
    used = {group(each) for each in resources}
    listed: list[Resource] = yaml.safe_load((FOLDER / "prerequisites.yaml").read_text())
    return [each for each in listed if used.intersection(each["serves"])]


def group(resource: Resource) -> str:
    """Return the API that a resource is of; empty: Kubernetes' first."""
    name: str = resource["apiVersion"]
    return name.rpartition("/")[0]


def helm(needed: Resource) -> str:
    """Return the command that installs a prerequisite, or brings it to its version."""
    command = ["helm", "upgrade", "--install", needed["release"], needed["chart"]]
    if "repository" in needed:
        command += ["--repo", needed["repository"]]
    command += ["--version", str(needed["version"]), "--namespace", needed["namespace"]]
    command += ["--create-namespace", "--wait"]
    for setting in needed.get("settings", []):
        command += ["--set", setting]
    return shlex.join(command)


def left_of_the_example(resources: list[Resource]) -> Iterator[str]:
    """Yield what the overlay still says as it was copied."""
    for resource in resources:
        for line in yaml.safe_dump(resource, width=1000).splitlines():
            if found := [example for example in EXAMPLES if example in line]:
                where = f"{resource['kind']} {resource['metadata']['name']}"
                yield f"{where}: {line.strip()!r} still says {found[0]}, as the example does"


def not_pinned(resources: list[Resource]) -> Iterator[str]:
    """Images that are not named to the byte."""
    images = set(re.findall(r"\bimage(?:Name)?: (\S+)", yaml.safe_dump_all(resources)))
    for image in sorted(images):
        if "@sha256:" not in image:
            yield f"image {image}: no digest, so that nodes may run different ones"


def missing_apis(resources: list[Resource]) -> Iterator[str]:
    """Kinds that the cluster doesn't know, with who brings them."""
    served = set(kubectl("api-versions").split())
    brings = {api: each for each in prerequisites(resources) for api in each["serves"]}
    for api in sorted({each["apiVersion"] for each in resources} - served):
        needed = brings.get(api.rpartition("/")[0])
        yield f"API {api}: " + (
            f"{needed['name']}: {helm(needed)}" if needed else "newer Kubernetes"
        )


def missing_objects(resources: list[Resource]) -> Iterator[str]:
    """Yield what the overlay names, and who administers the cluster makes."""
    text = yaml.safe_dump_all(resources, width=1000)
    wanted = {
        "storageclass": set(re.findall(r"storageClassName: (\S+)", text)),
        "gatewayclass": set(re.findall(r"gatewayClassName: (\S+)", text)),
        "clusterissuer": set(re.findall(r"cert-manager.io/cluster-issuer: (\S+)", text)),
        "clustersecretstore": set(re.findall(r"kind: ClusterSecretStore\n\s+name: (\S+)", text)),
        "namespace": set(re.findall(r"kubernetes.io/metadata.name: (\S+)", text)),
    }
    for kind, these in wanted.items():
        for name in sorted(these - names(kind)) if these else []:
            yield f"{kind} {name}: not in the cluster"
    made = {
        each["metadata"]["name"] for each in resources if each["kind"] == "PersistentVolumeClaim"
    }
    claims = set(re.findall(r"claimName: (\S+)", text)) - made
    there = names("persistentvolumeclaim", NAMESPACE) if claims else set()
    for name in sorted(claims - there):
        yield f"persistentvolumeclaim {name} in {NAMESPACE}: not in the cluster"


def missing_devices(resources: list[Resource]) -> Iterator[str]:
    """Devices that pods ask for and no node offers, by a pool that may grow from none as well."""
    nodes = json.loads(kubectl("get", "nodes", "--output=json"))["items"]
    offered = {name for node in nodes for name in node["status"]["allocatable"]}
    clusters = [each for each in resources if each["kind"] == "RayCluster"]
    asked = set(re.findall(r"(\S+/\S+): \d+\n", yaml.safe_dump_all(clusters)))
    for name in sorted(asked - offered):
        yield f"device {name}: no node has one now; a pool that grows from none has to bring it"


def missing_gate(_: list[Resource]) -> Iterator[str]:
    """KubeRay without the certificates of Ray's processes would start no Ray."""
    found = json.loads(kubectl("get", "deployments", "--all-namespaces", "--output=json"))["items"]
    operators = [each for each in found if each["metadata"]["name"] == "kuberay-operator"]
    if operators and "RayClusterMTLS=true" not in json.dumps(operators):
        yield "KubeRay's operator: its feature gate RayClusterMTLS is off"


def check(resources: list[Resource]) -> list[str]:
    """Return all that is missing, one line each."""
    looks = (left_of_the_example, not_pinned, missing_apis, missing_objects, missing_gate)
    return [line for look in looks for line in look(resources)]


def apply(overlay: Path, resources: list[Resource]) -> None:
    """Apply in one go; parts that need another one wait for it themselves."""
    for name in JOBS:
        kubectl("--namespace", NAMESPACE, "delete", "job", name, "--ignore-not-found", "--wait")
    say(kubectl("apply", "--filename=-", text=kubectl("kustomize", str(overlay))))
    for name in JOBS:
        wait("wait", "--for=condition=complete", f"job/{name}")
    for each in resources:
        if each["kind"] == "Deployment":
            wait("rollout", "status", f"deployment/{each['metadata']['name']}")
    wait("wait", "--for=condition=HeadPodReady", "raycluster/ray")


def wait(*arguments: str) -> None:
    """Wait for one thing, a quarter of an hour at most, and say that it is there."""
    say(kubectl("--namespace", NAMESPACE, *arguments, "--timeout=15m"))


def main() -> None:
    """Do one of the three, by the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("prerequisites", "check", "apply"))
    parser.add_argument("overlay", type=Path)
    arguments = parser.parse_args()
    resources = list(yaml.safe_load_all(kubectl("kustomize", str(arguments.overlay))))
    if arguments.command == "prerequisites":
        say("".join(f"{helm(each)}\n" for each in prerequisites(resources)))
        return
    if missing := check(resources):
        sys.exit("\n".join(f"missing: {line}" for line in missing))
    for line in missing_devices(resources):
        say(f"note: {line}\n")
    if arguments.command == "apply":
        apply(arguments.overlay, resources)
    else:
        say("nothing is missing\n")


if __name__ == "__main__":
    main()
