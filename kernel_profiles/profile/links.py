"""What GPUs and workers send each other: collectives in a node, KV transfers with the real NIXL.

Collectives by ``torch.distributed``, one process a GPU (NCCL on NVIDIA, RCCL on AMD by the same
name; Gloo serves CPUs, for tests); their time is that of the slowest rank. Of transfers the decode
worker's agent reads blocks that the prefill worker's has registered, as vLLM's NixlConnector does,
timed from posting to completion: set-up, one cost a descriptor, and the bytes, which
:func:`fit_transfer` tells apart. Registration and metadata come once a pair of workers."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
from scipy.optimize import nnls

from eldr_sim.errors import InputError, needed
from eldr_sim.kernel_profiles.profile.timing import Timing, require_torch

GRID = tuple(
    (descriptors * size, descriptors)
    for descriptors in (1, 4, 16, 64, 256, 1024)
    for size in (4 << 10, 32 << 10, 256 << 10, 2 << 20)
    if descriptors * size <= 128 << 20
)
"""(bytes, descriptors) of the transfers measured."""


def nixl_version() -> str:
    """Version of the NIXL library."""
    return metadata.version("nixl")


@dataclass(frozen=True)
class TransferFit:
    """``setup_s + descriptors * descriptor_s + bytes / bandwidth``, and its relative errors."""

    setup_s: float
    descriptor_s: float
    bandwidth: float
    mean_error: float
    max_error: float


def fit_transfer(points: Mapping[tuple[int, int], float]) -> TransferFit:
    """Fit seconds by (bytes, descriptors): least squares of relative errors, no term negative."""
    keys = np.array(list(points), dtype=np.float64)
    seconds = np.array(list(points.values()))
    design = np.stack([np.ones(len(keys)), keys[:, 1], keys[:, 0]], axis=1)
    (setup, descriptor, byte), _ = nnls(design / seconds[:, None], np.ones(len(seconds)))
    errors = np.abs(design @ [setup, descriptor, byte] / seconds - 1)
    bandwidth = 1 / byte if byte else float("inf")
    return TransferFit(
        float(setup), float(descriptor), float(bandwidth), float(errors.mean()), float(errors.max())
    )


def measure_transfers(
    device: str, grid: Sequence[tuple[int, int]] = GRID, repeats: int = 15
) -> tuple[dict[tuple[int, int], Timing], float]:
    """Time reads from one local agent's memory into another's: times by (bytes, descriptors), and
    seconds of the first contact (registration, exchange of metadata). Raises InputError: NIXL is
    not installed, or a transfer fails.

    ``device``: ``cuda`` or ``cpu``; ``grid``: (bytes, descriptors); ``repeats``: after one warm-up.
    """
    torch = require_torch()
    api = needed("nixl._api", "nixl", "pip install nixl")
    largest = max(size for size, _ in grid)
    # Blocks lie apart, as the KV blocks of one request do: else NIXL could merge them.
    source = torch.ones(2 * largest, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    start = time.perf_counter()
    config = api.nixl_agent_config(backends=["UCX"])
    prefill, decode = api.nixl_agent("prefill", config), api.nixl_agent("decode", config)
    registered = [
        (agent, agent.register_memory(tensor))
        for agent, tensor in ((prefill, source), (decode, target))
    ]
    peer = decode.add_remote_agent(prefill.get_agent_metadata())
    first_contact = time.perf_counter() - start
    times = {}
    try:
        for n_bytes, count in grid:
            block = n_bytes // count
            handle = decode.initialize_xfer(
                "READ",
                _blocks(decode, target, block, count),
                _blocks(decode, source, block, count),
                peer,
            )
            samples = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                state = decode.transfer(handle)
                while state == "PROC":
                    state = decode.check_xfer_state(handle)
                if state != "DONE":
                    raise InputError("nixl", f"a transfer of {n_bytes} bytes ended as {state}")
                samples.append(time.perf_counter() - start)
            decode.release_xfer_handle(handle)
            times[n_bytes, count] = Timing.of(samples[1:])
        if not bool((target[: grid[-1][0] // grid[-1][1]] == 1).all()):
            raise InputError("nixl", "a completed transfer moved no bytes")
    finally:
        for agent, descriptors in registered:
            agent.deregister_memory(descriptors)
    return times, first_contact


def _blocks(agent: Any, tensor: Any, block: int, count: int) -> Any:
    address, device = tensor.data_ptr(), max(tensor.get_device(), 0)
    memory = "VRAM" if tensor.is_cuda else "DRAM"
    rows = [(address + 2 * block * index, block, device) for index in range(count)]
    return agent.get_xfer_descs(rows, mem_type=memory)


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
    :data:`OPERATIONS`."""
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
