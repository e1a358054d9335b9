"""Takes the custom resources' definitions from their projects: python take.py FOLDER.

FOLDER holds a clone of each repository named below, by the second half of its name. Kept are the
kinds that the manifests may use, in the version that they use, without descriptions: the rest is as
the projects publish it. All of them are licensed under Apache-2.0.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
# A project, its release, and of each of its files the version of the resource that is kept.
SOURCES = {
    "ray-project/kuberay": (
        "v1.7.0",
        {
            "ray-operator/config/crd/bases/ray.io_rayclusters.yaml": "v1",
            "ray-operator/config/crd/bases/ray.io_rayjobs.yaml": "v1",
        },
    ),
    "cert-manager/cert-manager": (
        "v1.21.1",
        {
            "deploy/crds/cert-manager.io_certificates.yaml": "v1",
            "deploy/crds/cert-manager.io_issuers.yaml": "v1",
            "deploy/crds/cert-manager.io_clusterissuers.yaml": "v1",
        },
    ),
    "kubernetes-sigs/kueue": (
        "v0.19.2",
        {
            f"config/components/crd/bases/kueue.x-k8s.io_{plural}.yaml": "v1beta2"
            for plural in (
                "clusterqueues",
                "cohorts",
                "localqueues",
                "resourceflavors",
                "topologies",
                "workloadpriorityclasses",
            )
        },
    ),
    "cloudnative-pg/cloudnative-pg": (
        "v1.30.0",
        {
            f"config/crd/bases/postgresql.cnpg.io_{plural}.yaml": "v1"
            for plural in ("backups", "clusters", "databases", "scheduledbackups")
        },
    ),
    "external-secrets/external-secrets": (
        "v2.9.0",
        {"config/crds/bases/external-secrets.io_externalsecrets.yaml": "v1"},
    ),
    "prometheus-operator/prometheus-operator": (
        "v0.93.0",
        {
            f"example/prometheus-operator-crd/monitoring.coreos.com_{plural}.yaml": "v1"
            for plural in ("podmonitors", "prometheusrules", "servicemonitors")
        },
    ),
    "kubernetes-sigs/gateway-api": (
        "v1.6.1",
        {
            f"config/crd/standard/gateway.networking.k8s.io_{plural}.yaml": "v1"
            for plural in ("backendtlspolicies", "gateways", "httproutes")
        },
    ),
    "envoyproxy/gateway": (
        "v1.9.0",
        {
            "charts/gateway-helm/charts/crds/crds/generated/"
            "gateway.envoyproxy.io_securitypolicies.yaml": "v1alpha1"
        },
    ),
    "kubernetes-csi/external-snapshotter": (
        "v8.6.0",
        {
            f"client/config/crd/snapshot.storage.k8s.io_{plural}.yaml": "v1"
            for plural in ("volumesnapshots", "volumesnapshotclasses")
        },
    ),
}


def without_descriptions(schema: Any) -> Any:
    """A schema less what is there for users; a property may itself be named `description`."""
    if isinstance(schema, list):
        return [without_descriptions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: without_descriptions(each) for key, each in value.items()}
        if name == "properties" and isinstance(value, dict)
        else without_descriptions(value)
        for name, value in schema.items()
        if name not in ("description", "externalDocs", "example")
        or (name == "description" and isinstance(value, dict))
    }


def shared(schema: Any, seen: dict[str, Any]) -> Any:
    """The same schema with equal parts as one object, which YAML then writes once and refers to."""
    if isinstance(schema, dict):
        schema = {key: shared(value, seen) for key, value in schema.items()}
    elif isinstance(schema, list):
        schema = [shared(each, seen) for each in schema]
    else:
        return schema
    written = json.dumps(schema, sort_keys=True)
    return schema if len(written) < 80 else seen.setdefault(written, schema)


def definition(text: str, version: str) -> dict[str, Any]:
    """One version of a resource, as an API server takes it."""
    found = yaml.safe_load(text)
    spec = found["spec"]
    spec.pop("conversion", None)
    (kept,) = [each for each in spec["versions"] if each["name"] == version]
    kept["schema"]["openAPIV3Schema"] = without_descriptions(kept["schema"]["openAPIV3Schema"])
    spec["versions"] = [kept | {"served": True, "storage": True}]
    annotations = found["metadata"].get("annotations", {})
    metadata = {"name": found["metadata"]["name"], "annotations": annotations}
    return {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "metadata": metadata,
        "spec": spec,
    }


def main(clones: Path) -> None:
    for repository, (release, files) in SOURCES.items():
        name = repository.partition("/")[2]
        lines = [f"# {repository} {release}, Apache-2.0, without descriptions:"]
        lines += [f"#   {path} ({version})" for path, version in files.items()]
        taken = []
        for path, version in files.items():
            shown = subprocess.run(
                ["git", "-C", clones / name, "show", f"{release}:{path}"],
                check=True,
                capture_output=True,
                text=True,
            )
            taken.append(definition(shown.stdout, version))
        text = yaml.safe_dump(shared(taken, {}), indent=1, width=1000, default_flow_style=None)
        (HERE / f"{name}.yaml").write_text("\n".join(lines) + "\n" + text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
