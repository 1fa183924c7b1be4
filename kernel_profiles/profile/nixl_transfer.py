"""KV transfers with the real NIXL library between two agents of this machine.

The decode worker's agent reads blocks that the prefill worker's agent has registered, as vLLM's
NixlConnector does. Times run from posting to completion, so they hold set-up, one cost a
descriptor, and the bytes; :func:`fit_transfer` tells the three apart. Registration and the
exchange of metadata come once a pair of workers and are timed apart.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
            raise InputError("nixl", "a transfer reported as done moved nothing")
    finally:
        for agent, descriptors in registered:
            agent.deregister_memory(descriptors)
    return times, first_contact


def _blocks(agent: Any, tensor: Any, block: int, count: int) -> Any:
    address, device = tensor.data_ptr(), max(tensor.get_device(), 0)
    memory = "VRAM" if tensor.is_cuda else "DRAM"
    rows = [(address + 2 * block * index, block, device) for index in range(count)]
    return agent.get_xfer_descs(rows, mem_type=memory)
