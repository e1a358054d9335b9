"""What the component `rdma` gives a GPU pod for a direct path to the device."""

import resource as limits
import subprocess

import pytest

from tests.unit.infra.manifests import Resource, config, one, pods, render

UNLIMITED = limits.RLIM_INFINITY


@pytest.fixture(scope="module")
def pod() -> Resource:
    return pods(render())["ray-gpu"]


def test_the_gpu_pool_has_what_a_direct_path_needs(pod: Resource) -> None:
    ray, _ = pod["spec"]["containers"]
    mounts = {m["name"]: m["mountPath"] for m in ray["volumeMounts"]}
    variables = {each["name"]: each["value"] for each in ray["env"]}
    assert ray["resources"]["limits"]["nvidia.com/gpu"] == ray["resources"]["limits"]["rdma/hca"]
    assert variables["NVIDIA_GDS"] == variables["NVIDIA_MOFED"] == "enabled"
    assert variables["CUFILE_ENV_PATH_JSON"] == f"{mounts['files']}/cufile.json"
    assert variables["PENSTOCK_SHARD_CACHE"].startswith(mounts["nvme"])
    assert "cufile.json" in config(render(), "ray-files")
    assert mounts["shm"] == "/dev/shm"
    names = [each["configMapRef"]["name"] for each in ray["envFrom"]]
    assert any(name.startswith("nccl-") for name in names)
    assert config(render(), "nccl")["NCCL_IB_HCA"]


def test_the_kubelet_may_give_it_cores_of_its_own(pod: Resource) -> None:
    """Its CPU and topology managers ask that all requests are limits, and cores whole."""
    for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        assert container["resources"]["requests"] == container["resources"]["limits"]
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"].isdigit()


def test_nodes_of_a_run_are_near_each_other_where_there_is_room(pod: Resource) -> None:
    (near,) = pod["spec"]["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert near["podAffinityTerm"]["labelSelector"] == {"matchLabels": {"ray.io/group": "gpu"}}


def test_nothing_of_it_asks_for_a_right(pod: Resource) -> None:
    """A capability would be nobody's: Kubernetes gives a user that is not root an empty set."""
    assert "add" not in str([c["securityContext"] for c in pod["spec"]["containers"]])
    labels = one(render(), "Namespace", "penstock")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("kibibytes", [64, None], ids=["limited", "unlimited"])
def test_a_node_that_limits_locked_memory_says_so_before_anything_starts(
    kibibytes: int | None, pod: Resource
) -> None:
    (memlock,) = pod["spec"]["initContainers"]
    if kibibytes is None and limits.getrlimit(limits.RLIMIT_MEMLOCK)[1] != UNLIMITED:
        pytest.skip("this machine limits locked memory itself")
    limit = UNLIMITED if kibibytes is None else kibibytes * 1024
    ended = subprocess.run(
        memlock["command"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: limits.setrlimit(limits.RLIMIT_MEMLOCK, (limit, limit)),
    )
    assert ended.returncode == (0 if kibibytes is None else 1)
    assert ("LimitMEMLOCK=infinity" in ended.stdout) is (kibibytes is not None)
