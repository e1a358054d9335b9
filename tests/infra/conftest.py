"""What several files of infrastructure tests share."""

from collections.abc import Iterator

import pytest

from tests.infra.kubernetes.control_plane import ControlPlane, control_plane
from tests.infra.kubernetes.overlays import definitions


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
