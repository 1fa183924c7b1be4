"""Assembly of a recorded run from the records of client, proxy and engines."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.profile.device import cpu_model
from eldr_sim.outputs import whole_folder
from eldr_sim.traces.routing.capture.captured import write_captured
from eldr_sim.traces.routing.capture.collect import collect
from eldr_sim.traces.routing.capture.prompts import Prompt
from eldr_sim.validation.live.engine_log import EngineLog, request_rows
from eldr_sim.validation.live.engines.setups import Endpoint
from eldr_sim.validation.live.live_run import STEPS, RunInfo, write_live_run

_TIMES = ("sent_s", "prefilled_s", "routed_s")


def assemble_run(
    out: Path,
    info: RunInfo,
    requests: pa.Table,
    logs: Mapping[str, EngineLog],
    endpoints: Sequence[Endpoint],
    model: str,
) -> None:
    """Write a recorded run into a new folder, times relative to the first request; InputError if
    the engines' logs lack tokens of one. ``requests``: ``live_run.REQUESTS``,
    ``CLOCK_MONOTONIC``."""
    start = float(np.min(requests["sent_s"].to_numpy()))
    rows = {name: row for row, name in enumerate(requests["request_id"].to_pylist())}
    with whole_folder(out) as folder:
        write_trace_of(folder / "trace", requests, endpoints, model)
        steps = steps_table(logs, rows, start)
        write_live_run(folder, info, _shifted(requests, start), steps)


def write_trace_of(
    out: Path,
    requests: pa.Table,
    endpoints: Sequence[Endpoint],
    model: str,
    split: Literal["calibration", "serving"] = "serving",
) -> None:
    """Write the routing of requests as a routing trace, in their order."""
    named = requests.select(["request_id", "domain"]).to_pylist()
    prompts = [Prompt(row["request_id"], row["domain"], None, split) for row in named]
    with TemporaryDirectory() as joint:
        for endpoint in endpoints:
            for file in endpoint.log.glob("steps-*"):
                (Path(joint) / file.name).symlink_to(file.resolve())
        collected = collect(joint, prompts)
    found = collected.prompts
    if len(found) != len(prompts):
        raise InputError("log", f"only {len(found)} of {len(prompts)} requests are in the logs")
    source, name = "prompts of a live validation", Path(model).name
    write_captured(out, collected.captured, found, model=name, source_data=source)


def steps_table(logs: Mapping[str, EngineLog], rows: Mapping[str, int], start: float) -> pa.Table:
    """Return ``live_run.STEPS``, without steps that contain unknown requests."""
    columns: dict[str, list[Any]] = {name: [] for name in STEPS.names}
    for engine, log in logs.items():
        names = request_rows({name for step in log.steps for name, _, _ in step.rows}, rows)
        for step in log.steps:
            if any(name not in names for name, _, _ in step.rows):
                continue
            whole, forward = (step.start_s, step.end_s), (step.forward_start_s, step.forward_end_s)
            values = (
                engine,
                *(moment - start for moment in (*whole, *forward)),
                step.moe_s,
                step.attention_s,
                [names[name] for name, _, _ in step.rows],
                [position for _, position, _ in step.rows],
                [count for _, _, count in step.rows],
                step.distinct.tolist(),
                None if math.isnan(step.probe_s) else step.probe_s,
            )
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    return pa.table(columns, schema=STEPS).sort_by("start_s")


def _shifted(requests: pa.Table, start: float) -> pa.Table:
    for name in _TIMES:
        place = requests.column_names.index(name)
        moments = [None if t is None else t - start for t in requests[name].to_pylist()]
        requests = requests.set_column(place, name, pa.array(moments, pa.float64()))
    place = requests.column_names.index("token_s")
    tokens = [[t - start for t in times] for times in requests["token_s"].to_pylist()]
    return requests.set_column(place, "token_s", pa.array(tokens, pa.list_(pa.float64())))


def versions() -> dict[str, str]:
    """Return the versions of the packages involved that are installed."""
    found = {"python": platform.python_version()}
    for name in ("eldr-sim", "vllm", "torch", "nixl", "transformers", "aiohttp"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine() -> dict[str, str]:
    """Describe the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "processor": cpu_model(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
    }
    try:
        import torch
    except ModuleNotFoundError:
        return facts
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
