"""Collectives: NCCL's version, what steers it, and an all-reduce over this machine's GPUs.

Without GPUs it is gloo's, over two processes.
"""

import os
from collections.abc import Iterator, Mapping

from pipelines.core.figures import size
from pipelines.doctor.findings import Seen, ok, problem, warning
from pipelines.doctor.torch_probe import Facts, facts

# Each takes a path away. NVIDIA's NCCL guide lists them for debugging only: "should not be used in
# production" (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
_DEBUGGING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_GDR_DISABLE")


def collective() -> Iterator[Seen]:
    """A real all-reduce, and the environment it runs in."""
    yield from judge(facts(), os.environ)


def judge(found: Facts, environ: Mapping[str, str]) -> Iterator[Seen]:
    """What it summed, and how fast."""
    with_what = f"NCCL {found.nccl}" if found.nccl else "gloo"
    saw = f"{with_what}: an all-reduce over {found.processes} processes"
    if not found.reduced.right:
        mend = "run it again with NCCL_DEBUG=INFO, then GPU by GPU: one computes or sends wrongly"
        yield problem(f"{saw} gave a wrong sum", mend)
    elif found.processes == 1:
        yield ok(f"{with_what}; one GPU has nobody to send to")
    else:
        yield ok(f"{saw}, bus bandwidth {size(found.reduced.bandwidth)}/s")
    if found.pinned:
        mend = "raise memlock and the container's memory limit; other processes may hold much"
        yield problem(f"memory can't be pinned: {found.pinned}", mend)
    for name in _DEBUGGING:
        if environ.get(name, "0") != "0":
            mend = f"unset {name}, and see in NCCL_DEBUG=INFO whether the reason for it is gone"
            yield warning(f"{name}={environ[name]} takes a path away from NCCL", mend)
