"""Collectives between the GPUs of a node, by ``torch.distributed``. One process a GPU. NCCL on
NVIDIA and RCCL on AMD answer to the same name; Gloo serves CPUs, for tests. The time of a
collective is that of its slowest rank."""

import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from eldr_sim.kernel_profiles.profile.timing import Timing, require_torch

OPERATIONS = ("all_reduce", "all_gather", "alltoall")
MESSAGE_BYTES = tuple(1 << power for power in range(10, 29, 2))
_REPEATS = 20


def measure_collectives(
    backend: str,
    n_ranks: int,
    sizes: Sequence[int] = MESSAGE_BYTES,
    operations: Sequence[str] = OPERATIONS,
) -> dict[tuple[str, int], Timing]:
    """Time collectives between ``n_ranks`` processes of this node, one a GPU; returns a dict by
    (operation, bytes).

    ``backend``: ``nccl``, or ``gloo`` for CPUs; ``sizes``: bytes of the sum (all-reduce), of all
    parts together (all-gather), that a rank sends (all-to-all); ``operations``: of
    :data:`OPERATIONS`.
    """
    torch = require_torch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(
        _rank, (backend, n_ranks, port, tuple(sizes), tuple(operations), results), nprocs=n_ranks
    )
    by_rank = [results.get() for _ in range(n_ranks)]
    return {
        key: Timing.of(np.max([samples[key] for samples in by_rank], axis=0).tolist())
        for key in by_rank[0]
    }


def _rank(
    rank: int,
    backend: str,
    n_ranks: int,
    port: int,
    sizes: Sequence[int],
    operations: Sequence[str],
    results: Any,
) -> None:
    torch = require_torch()
    import torch.distributed as dist

    cuda = backend == "nccl"
    if cuda:
        torch.cuda.set_device(rank)
    device = "cuda" if cuda else "cpu"
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n_ranks
    )
    samples = {}
    for operation in operations:
        for size in sizes:
            part = torch.ones(max(1, size // 2 // n_ranks), dtype=torch.bfloat16, device=device)
            whole = torch.ones(len(part) * n_ranks, dtype=torch.bfloat16, device=device)
            spare = torch.empty_like(whole)

            run = {
                "all_reduce": partial(dist.all_reduce, whole),
                "all_gather": partial(dist.all_gather_into_tensor, whole, part),
                "alltoall": partial(dist.all_to_all_single, spare, whole),
            }[operation]
            times = []
            for _ in range(_REPEATS + 3):
                dist.barrier()
                if cuda:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                if cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            samples[operation, size] = times[3:]
    results.put(samples)
    dist.destroy_process_group()
