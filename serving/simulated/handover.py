"""Prefill and decode of a request at two ports: the ``kv_transfer_params`` that vLLM's NIXL
connector exchanges (``kv_connector/v1/nixl/pull_scheduler.py``, ``request_finished``).

A prefill worker is a 1P cluster; its requests end with their prompts. A decode worker is a 1P1D
cluster that computes prompts in no time: its requests begin with the transfer of their KV
caches."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.pools import Pool
from eldr_sim.simulator.setup.config.run_config import RunConfig

Role = Literal["prefill", "decode"]

#: What a decode worker needs to fetch a KV cache.
_NEEDED = ("remote_block_ids", "remote_engine_id", "remote_host", "remote_port")
#: Port of vLLM's side channel (VLLM_NIXL_SIDE_CHANNEL_PORT); workers count from it.
_SIDE_CHANNEL = 5600


class Worker(NamedTuple):
    """A worker that has a port, or a header's number, to itself."""

    config: RunConfig  #: of the cluster that it is the whole of
    role: Role | None  #: None: it computes prompts and decodes


def workers_of(config: RunConfig) -> list[Worker]:
    """Return the workers of a cluster as servers that share nothing, prefill workers first.

    Raises:
        InputError: A router outside cannot choose between the workers of such a cluster.
    """
    topology = config.cluster.topology
    if not isinstance(topology, str) or not config.cluster.generates:
        raise InputError(
            "topology", f"{topology} workers cannot be served at separate ports", "xC or xPyD"
        )
    if config.cluster.conditional_disagg is not None:
        problem = "decode workers with separate ports compute no prompts"
        raise InputError("conditional_disagg", problem, "a rule in your router")
    roles: list[Role | None] = ["prefill"] * config.cluster.n_prefill
    roles += ["decode" if roles else None] * config.cluster.n_decode
    alone: dict[Role | None, dict[str, Any]] = {
        "prefill": {"topology": "1P", "output_len": 1, "decode": Pool()},
        "decode": {"topology": "1P1D"},
        None: {"topology": "1C"},
    }
    return [
        Worker(config.replace(**alone[role], seed=config.requests.seed + number), role)
        for number, role in enumerate(roles)
    ]


def check(body: Mapping[str, Any], role: Role | None, n_answers: int) -> None:
    """Check the ``kv_transfer_params`` of a request.

    Args:
        body: The request.
        role: What the worker does; None if one port stands for prefill and decode workers.
        n_answers: The number of answers that the request asks for.

    Raises:
        ValueError: The worker would not do what these parameters ask for.
    """
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise ValueError("kv_transfer_params: no object")
    params = params or {}
    if role is None:
        if params:
            problem = "this port stands for prefill and decode workers"
            raise ValueError(f"kv_transfer_params: {problem} (allowed: --engine-ports of an xPyD)")
        return
    if n_answers != 1:
        raise ValueError("n: a KV cache is handed over for one prompt and one answer")
    if role == "prefill":
        if body.get("max_completion_tokens", body.get("max_tokens")) != 1:
            raise ValueError("max_tokens: this is a prefill worker (allowed: 1)")
        if params.get("do_remote_prefill"):
            raise ValueError("kv_transfer_params: do_remote_prefill at a prefill worker")
        return
    if not params.get("do_remote_prefill"):
        raise ValueError(
            "kv_transfer_params: no do_remote_prefill; this decode worker computes no prompts "
            "(allowed: those of a prefill worker's answer)"
        )
    missing = [name for name in _NEEDED if not params.get(name)]
    if missing:
        raise ValueError(f"kv_transfer_params: no {', '.join(missing)}")


def handed_over(rank: int, name: str, prompt_len: int, block_size: int) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a prefill worker's answer.

    Args:
        rank: Number of the worker.
        name: Id of its answer.
        prompt_len: Tokens of the prompt.
        block_size: Size of a KV block, tokens.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 2 + (prompt_len - 1) // block_size))],
        "remote_engine_id": f"eldr-sim-{rank}",
        "remote_request_id": name,
        "remote_host": "127.0.0.1",
        "remote_port": _SIDE_CHANNEL + rank,
        "tp_size": 1,
        "remote_num_tokens": prompt_len,
    }
