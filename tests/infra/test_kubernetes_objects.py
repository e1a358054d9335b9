"""Each object of each overlay and component, applied to a real API server."""

import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.infra.kubernetes.control_plane import ControlPlane, Resource
from tests.infra.kubernetes.overlays import (
    FULLEST,
    NAMESPACE,
    components,
    for_older,
    overlays,
    render,
    render_with,
)

# The first run builds Kubernetes.
pytestmark = [pytest.mark.infra, pytest.mark.timeout(3600)]


@pytest.fixture
def empty(plane: ControlPlane) -> Iterator[ControlPlane]:
    """A control plane on which nothing of ours is, and of which nothing of ours stays."""
    plane.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")
    yield plane
    plane.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")


def lost(sent: Any, stored: Any, path: str = "") -> list[str]:
    """What was sent and isn't stored as it was, such as a field that the server doesn't know."""
    if isinstance(sent, dict) and isinstance(stored, dict):
        return [each for key in sent for each in lost(sent[key], stored.get(key), f"{path}.{key}")]
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        pairs = enumerate(zip(sent, stored, strict=True))
        return [each for number, pair in pairs for each in lost(*pair, f"{path}[{number}]")]
    # A quantity may be a number, and an empty setting isn't kept.
    same = str(sent) == str(stored) or (sent in ({}, [], "", None) and stored is None)
    return [] if same else [f"{path}: {sent!r} became {stored!r}"]


def apply_all(plane: ControlPlane, resources: list[Resource]) -> None:
    """Apply what an overlay holds, and see that the server keeps each field of each object."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    older = for_older(resources)
    if not any(each["kind"] == "Namespace" for each in older):
        plane.apply(namespace)
    plane.apply(*older)
    found = plane.get_all(older)
    problems = [
        f"{sent['kind']} {sent['metadata']['name']} {problem}"
        for sent, stored in zip(older, found, strict=True)
        for problem in lost(sent, stored)
    ]
    assert problems == []


@pytest.mark.parametrize("overlay", overlays(), ids=lambda path: path.name)
def test_the_server_takes_each_object_of_an_overlay(empty: ControlPlane, overlay: Path) -> None:
    apply_all(empty, render(overlay))


@pytest.mark.parametrize("component", components(), ids=lambda path: path.name)
def test_the_server_takes_each_object_with_a_component(
    empty: ControlPlane, component: Path, tmp_path: Path
) -> None:
    apply_all(empty, render_with(tmp_path, component))


def test_the_server_takes_all_components_together(empty: ControlPlane, tmp_path: Path) -> None:
    apply_all(empty, render_with(tmp_path, *components()))


def test_the_server_and_the_comparison_would_tell(empty: ControlPlane) -> None:
    resources = for_older(render(FULLEST))
    (ray,) = [each for each in resources if each["kind"] == "RayCluster"]
    empty.kubectl("create", "namespace", NAMESPACE)

    def refused(change: str, value: Any) -> str:
        wrong = deepcopy(ray)
        wrong["spec"]["headGroupSpec"][change] = value
        done: subprocess.CompletedProcess[str] = empty.try_kubectl(
            "apply", "--filename=-", stdin=yaml.safe_dump(wrong)
        )
        assert done.returncode != 0
        return done.stderr

    assert "rayStartParams" in refused("rayStartParams", "none")
    assert "unknown field" in refused("startParams", {})
    assert lost({"a": [{"b": 1, "c": {}}]}, {"a": [{"b": 2}]}) == [".a[0].b: 1 became 2"]
