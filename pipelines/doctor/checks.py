"""All checks, in the order in which they are told."""

from functools import partial

from pipelines.doctor import (
    clock,
    container_toolkit,
    disk,
    driver_and_cuda,
    gpudirect,
    gpus,
    host,
    kernel_log,
    network,
    numa,
    object_store_check,
    planes,
    services,
    throughput,
    topology,
)
from pipelines.doctor.findings import Check
from pipelines.recipe.recipe import Recipe


def node_checks(recipe: Recipe) -> list[Check]:
    """Return the checks of one machine, a laptop or a node of a cluster."""
    return [*_gpu_checks(), *_network_checks(), *_host_checks(recipe)]


def service_checks(recipe: Recipe) -> list[Check]:
    """Return the checks of the services, which need no machine of their own."""
    return [
        Check("Airflow", "it schedules every stage and retry", services.airflow),
        Check("Ray", "jobs start only where client and cluster agree", services.ray),
        Check("MLflow", "metrics and the registry are there", services.mlflow),
        Check(
            "S3",
            "checkpoints and dataset versions are written there",
            partial(object_store_check.s3, recipe),
        ),
        Check("DVC remote", "dataset versions lie there", object_store_check.datasets_remote),
    ]


def _gpu_checks() -> list[Check]:
    return [
        Check(
            "driver and CUDA",
            "torch starts only on a driver that knows its CUDA",
            driver_and_cuda.driver_and_cuda,
        ),
        Check("GPUs", "one sick or slow GPU slows or ends the whole job", gpus.health),
        Check("kernel log", "the driver writes there what a GPU suffered", kernel_log.kernel_log),
        Check("NVSwitch", "CUDA waits for its fabric manager", gpus.fabric),
        Check("NVLink", "a lost link slows all that GPUs exchange", topology.nvlink),
        Check("topology", "what is far apart is copied through the host", topology.topology),
        Check(
            "container toolkit",
            "the driver is the host's, the CUDA the image's: it joins them",
            container_toolkit.container_toolkit,
        ),
        Check("all-reduce", "gradients are summed by it each step", throughput.collective),
    ]


def _network_checks() -> list[Check]:
    return [
        Check("InfiniBand and RoCE", "NCCL falls back to TCP without a word", network.rdma),
        Check(
            "GPUDirect RDMA",
            "without it each gradient crosses the host's memory twice",
            gpudirect.rdma,
        ),
        Check(
            "GPUDirect Storage",
            "checkpoints reach a GPU past the host's memory; cuFile hides when they don't",
            gpudirect.storage,
        ),
        Check(
            "network planes",
            "storage, GPUs, inference and users must not wait for each other",
            planes.planes,
        ),
    ]


def _host_checks(recipe: Recipe) -> list[Check]:
    return [
        Check("NUMA", "memory of the other socket is slower", numa.numa),
        Check("pinned memory", "RDMA and GPUDirect lock what they read", host.pinned_memory),
        Check("shared memory", "NCCL and Ray's object store live there", host.shared_memory),
        Check("open files", "Ray opens thousands of sockets and files", host.files),
        Check("clock", "S3 refuses a wrong time, and logs of nodes must agree", clock.clock),
        Check(
            "Ray certificate",
            "no worker or node can join once it has ended",
            clock.certificate,
        ),
        Check("memory and disk", "a full machine kills runs", host.memory),
        Check("disk mount", "what lies under PENSTOCK_HOME must last", disk.mounted),
        Check(
            "disk speed",
            "all GPUs wait for a checkpoint that is read",
            partial(disk.speed, recipe),
        ),
    ]
