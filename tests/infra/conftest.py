"""What several files of infrastructure tests share."""

from collections.abc import Iterator

import pytest

from tests.infra.kubernetes.control_plane import ControlPlane, control_plane
from tests.infra.kubernetes.operators import (
    NODE,
    all_pods_made,
    neighbours,
    node,
    place_all,
    postgres_pods,
    ray_pods,
    remove_all,
)
from tests.infra.kubernetes.overlays import (
    NAMESPACE,
    components,
    definitions,
    for_older,
    render_with,
)

# Networks beyond the cluster, each of another kind, so that policies tell them apart.
ADDRESSES = {
    "s3-cidr": "10.1.0.0/24",
    "s3-port": "9000",
    "kubernetes-api-cidr": "10.2.0.0/28",
    "database-cidr": "10.3.0.0/28",
    "oidc-cidr": "10.4.0.0/28",
}


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Kubernetes without a node, which knows the custom resources that the manifests use."""
    folder = tmp_path_factory.mktemp("control-plane")
    with control_plane(folder, "penstock-kube", "10.83.1") as plane:
        known = definitions()
        plane.apply(*known)
        names = [f"crd/{each['metadata']['name']}" for each in known]
        plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
        yield plane


@pytest.fixture(scope="module")
def platform(
    plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """The whole platform in Kubernetes, on a node that isn't there, and neighbours of it."""
    resources = render_with(tmp_path_factory.mktemp("overlay"), *components(), values=ADDRESSES)
    remove_all(plane)
    plane.apply(*for_older(resources), *neighbours(), node())
    (ray,) = plane.get(f"--namespace={NAMESPACE}", "rayclusters")
    (postgres,) = plane.get(f"--namespace={NAMESPACE}", "clusters.postgresql.cnpg.io")
    plane.apply(*ray_pods(ray), *postgres_pods(postgres))
    plane.wait_for(lambda: all_pods_made(plane))
    place_all(plane)
    yield plane
    remove_all(plane)
    plane.kubectl("delete", "node", NODE)
