"""Format of a recorded run of a live vLLM; see ``validation/live/README.md``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from eldr_sim.errors import InputError
from eldr_sim.kinds import AnyPath
from eldr_sim.traces.routing.format import RoutingTrace, open_trace

REQUESTS = pa.schema(
    [
        ("request_id", pa.string()),
        ("domain", pa.string()),
        ("prompt_len", pa.int32()),
        ("output_len", pa.int32()),
        ("sent_s", pa.float64()),  # the client posts it
        ("prefilled_s", pa.float64()),  # the proxy has the prefill engine's answer
        ("routed_s", pa.float64()),  # the proxy posts it to a decode engine
        ("engine", pa.int16()),  # index among the decode or co-located engines
        ("token_s", pa.list_(pa.float64())),  # the client has each output token
    ]
)
STEPS = pa.schema(
    [
        ("engine", pa.string()),  # name of the engine
        ("start_s", pa.float64()),  # scheduling begins
        ("end_s", pa.float64()),  # outputs are handed to the front end
        ("forward_start_s", pa.float64()),  # the worker gets the step
        ("forward_end_s", pa.float64()),  # its model has run
        ("moe_s", pa.float64()),  # all MoE layers, gates included, s
        ("attention_s", pa.float64()),  # attention of all layers, s
        ("request", pa.list_(pa.int32())),  # row in requests.parquet
        ("position", pa.list_(pa.int32())),  # first token of each request in this step
        ("tokens", pa.list_(pa.int32())),  # tokens of each request in this step
        ("distinct", pa.list_(pa.int16())),  # distinct experts of each MoE layer
        ("probe_s", pa.float64()),  # one token in one MoE layer before the step; null without
    ]
)


class EngineInfo(BaseModel):
    """One engine of a set-up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  #: such as ``prefill0``
    role: Literal["prefill", "decode", "colocated"]  #: work of the engine
    max_num_seqs: int  #: most running sequences
    max_num_batched_tokens: int  #: token budget of a step
    block_size: int  #: tokens of a KV block
    n_blocks: int  #: KV blocks

    @property
    def unnamed(self) -> Self:
        """The engine without its name: equal for engines of a kind."""
        return self.model_copy(update={"name": ""})


class LoadInfo(BaseModel):
    """The load that was offered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  #: name of the load in the report
    request_rate: float  #: mean requests per second
    burstiness: float  #: shape of the gamma distribution of the gaps; 1 is Poisson
    #: Whether all requests have the same lengths, or lengths from a recorded distribution.
    lengths: Literal["fixed", "recorded"]
    num_requests: int  #: requests sent
    seed: int  #: seed of arrivals, lengths and prompts
    #: Order of the engines' queues; with ``sjf`` a request's priority is its prompt's length.
    queue_order: Literal["fcfs", "sjf"] = "fcfs"


class RunInfo(BaseModel):
    """Set-up and load of a live run."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    setup: str  #: ``colocated``, ``1P1D`` or ``1P2D``
    policy: str  #: decode policy of the proxy; ``round_robin`` if there is one engine
    repeat: int  #: number of the repetition of this load
    load: LoadInfo  #: offered load
    engines: list[EngineInfo]  #: prefill engines first
    #: Whether prompts were computed before the run; requests begin with their KV transfer.
    prefilled: bool = False
    model: dict[str, Any]  #: the model's ``config.json``
    max_model_len: int  #: most tokens of a request
    versions: dict[str, str]  #: versions of vLLM, torch, NIXL and eldr-sim
    machine: dict[str, str]  #: processor or GPU, cores, memory, kernel


@dataclass(frozen=True)
class LiveRun:
    """A recorded run."""

    info: RunInfo
    requests: pa.Table
    steps: pa.Table
    trace: RoutingTrace

    @property
    def label(self) -> str:
        """Name of the run."""
        info = self.info
        return f"{info.setup} {info.policy} {info.load.name} #{info.repeat}"


def write_live_run(folder: AnyPath, info: RunInfo, requests: pa.Table, steps: pa.Table) -> None:
    """Write everything except the trace into an existing folder."""
    base = Path(folder)
    pq.write_table(requests.cast(REQUESTS), base / "requests.parquet", compression="zstd")
    pq.write_table(steps.cast(STEPS), base / "steps.parquet", compression="zstd")
    (base / "run.json").write_text(info.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_live_run(folder: AnyPath) -> LiveRun:
    """Read a recorded run; raises InputError if a file is missing or not what it should be."""
    base = Path(folder)
    try:
        info = RunInfo.model_validate_json((base / "run.json").read_text(encoding="utf-8"))
        requests = pq.read_table(base / "requests.parquet").cast(REQUESTS)
        steps = pq.read_table(base / "steps.parquet").cast(STEPS)
    except OSError as error:
        raise InputError("run", f"{base}: cannot read {error.filename or error}") from None
    except (ValidationError, pa.ArrowInvalid, ValueError) as error:
        line = " ".join(str(error).split())
        raise InputError("run", f"{base} is not a recorded run: {line}") from None
    trace = open_trace(base / "trace")
    if len(trace.prompt_len) != requests.num_rows:
        problem = f"{base}: the trace has {len(trace.prompt_len)} requests"
        raise InputError("run", problem, f"{requests.num_rows}, those of requests.parquet")
    return LiveRun(info, requests, steps, trace)
