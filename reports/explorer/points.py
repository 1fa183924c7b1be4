"""A state of the page: its configuration, the command that gives it, and its figures."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.planning.compare.what_if import change_fields
from eldr_sim.reports.cells import number
from eldr_sim.simulator.outcome.result_parts import Figure, headline_of, parts_of
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.paths import known_names
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config
from eldr_sim.simulator.setup.config.speculative import SpeculativeConfig
from eldr_sim.simulator.setup.config.spellings import POOLS

#: Fields that the page has controls for; ``more`` takes all others, as ``what-if --set`` does.
FIELDS = (
    "model", "gpu", "topology", "tensor_parallel_size", "engine", "policy", "workload",
    "input_len", "output_len", "request_rate", "kv_tier", "goodput", "price_per_gpu_hour",
)  # fmt: skip
#: Rates of a state: a point of fewer requests/s would last longer than any run.
_RATES_PER_S = (1e-6, 1e6)
#: Requests that a point measures, and the least of its warm-up and window, s.
_REQUESTS, _WARMUP_S, _WINDOW_S = 240, 6.0, 4.0
#: Rates of the curve, of the state's own.
_RATES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
#: What the curves and the plane are drawn of.
_DRAWN = (
    "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p90_tpot_ms", "p99_tpot_ms",
    "request_goodput", "slo_attainment", "output_throughput", "gpus",
    "cost_per_million_output_tokens", "completed", "weakest_provenance", "label",
)  # fmt: skip
#: What has a slash and is no path, and what may stand between the parts of a text.
_BANDWIDTH = re.compile(r"(?<![^\s=,:@+(])[\d.]+[kMGT]?i?B/s(?![^\s,:;@+)])")
_SEPARATORS, _NAME = re.compile(r"([^\w.-]+)"), re.compile(r"[\w.-]")
#: Parts of a text, and workers of a cluster, at most.
_PARTS, _WORKERS = 64, 1024
_PICTURES = ("Activated experts against batch", "Components of TTFT", "TPOT over time")


def config_of(state: Mapping[str, Any], base: RunConfig, most: int | None = None) -> RunConfig:
    """Return the run of a state; what it leaves out is the base's. Its window is short, unless
    ``more`` says otherwise: a point takes a fraction of a second. Raises InputError: names the
    field that is wrong; paths are allowed where the base has the same. ``most``: requests."""
    values = base.explicit_fields("json")
    for name in FIELDS:
        text = str(state.get(name) or "").strip()
        if name == "kv_tier" and text:
            values[name] = text.split()
        elif text:
            values[name] = text
    _check_texts(values, base)  # before anything reads them: a policy of a file would run it
    rate = make_config(values).requests.request_rate
    if rate is None or not _RATES_PER_S[0] <= rate < _RATES_PER_S[1]:
        least, most_rate = _RATES_PER_S
        raise InputError("request_rate", f"{rate}", f"requests/s, {least:g} to {most_rate:g}")
    values["warmup"], values["duration"] = _WARMUP_S, max(_WINDOW_S, round(_REQUESTS / rate, 2))
    if more := str(state.get("more") or "").strip():
        values = change_fields(values, more)
        _check_texts(values, base)
    config = make_config(values)
    _check_texts(config.model_dump(mode="json"), base)
    _check_size(config, most)
    return config


def _check_size(config: RunConfig, most: int | None) -> None:
    """Raise InputError for a point of more than ``most`` requests, or of too many workers."""
    load = config.requests
    times = (load.request_rate or 0.0) * ((load.warmup or 0.0) + (load.duration or 0.0))
    n = max(times, load.num_requests or 0, config.value("sessions") or 0)
    if most is not None and n > most:
        problem = f"a point of {n:,.0f} requests"
        raise InputError("explore", problem, f"at most {most:,} (--point-requests)")
    within("topology", sum(pool.workers for pool in config.pools), _WORKERS, " workers")


def _check_texts(values: Any, base: RunConfig) -> None:
    """Raise InputError for a text that may be a path and is none of the base's, and for values
    that JSON does not have, which may become texts."""
    known = set(_texts(base.model_dump(mode="json"))) | set(_texts(base.explicit_fields("json")))
    names = {name.lower() for name in known_names()}
    for text in set(_texts(values)) - known:
        if not text.isprintable():
            raise InputError("explore", f"{text[:80]!r} has characters that are not printable")
        if text.lower() not in names and _may_be_path(text):
            allowed = "names, and paths that it was started with"
            raise InputError("explore", f"{text[:80]!r} is a path", allowed)


def _may_be_path(text: str) -> bool:
    """Whether a text, or a part of it between separators, names a file that may be read."""
    plain = _BANDWIDTH.sub("", text)
    parts = _SEPARATORS.split(text)
    if any(mark in plain for mark in ("/", "\\", "~", "\0")) or ".py" in text.lower():
        return True
    if len(parts) > 2 * _PARTS:
        raise InputError("explore", f"{text[:40]!r} ... has too many parts", f"at most {_PARTS}")
    words = ("".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 1, len(parts) + 1))
    return any(_NAME.search(word) and _exists(word) for word in words)


def _exists(name: str) -> bool:
    try:
        return os.path.lexists(name)
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of values as JSON has them, keys too; raises InputError for others."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif not isinstance(value, int | float | None):
        raise InputError("explore", f"a value of type {type(value).__name__}", "text and numbers")


def around(config: RunConfig) -> list[RunConfig]:
    """Return the points of the curve over the rate, the nearest to the state's own first."""
    rate = config.requests.request_rate or 1.0
    rates = [float(f"{factor * rate:.3g}") for factor in _RATES]
    return [_at(config, own) for own in sorted(rates, key=lambda own: abs(own - rate))]


def _at(config: RunConfig, rate: float) -> RunConfig:
    if rate == config.requests.request_rate:
        return config
    window = max(_WINDOW_S, round(_REQUESTS / rate, 2))
    return config.replace(request_rate=rate, duration=window)


def plane(config: RunConfig) -> list[RunConfig]:
    """Return the clusters of the plane of P and D around the state's own; none where co-located."""
    if not config.cluster.hands_over:
        return []
    p, d = config.cluster.n_prefill, config.cluster.n_decode
    sides = [sorted({max(1, n - 1), n, n + 1, n + 2}) for n in (p, d)]
    return [config.replace(topology=f"{x}P{y}D") for x in sides[0] for y in sides[1]]


def command_of(config: RunConfig) -> str:
    """Return the command that gives a run, with the options that are not the defaults."""
    words = ["eldr-sim", "run"]
    plain = RunConfig()
    for name in RUN_FIELDS:
        value, usual = config.value(name), plain.value(name)
        flag = "--" + name.replace("_", "-")
        if value == usual:
            continue
        if name in POOLS:
            for inner, own in value.model_dump(exclude_none=True).items():
                shown = json.dumps(own) if isinstance(own, dict) else str(own).lower()
                shown = shown if isinstance(own, bool | dict) else str(own)
                words += ["--set", f"{name}.{inner}={shown}"]
        elif name == "goodput":
            level = value.model_dump(exclude_none=True).items()
            words += [flag, ",".join(f"{key}:{bound:g}" for key, bound in level)]
        elif isinstance(value, tuple):
            words += [word for text in value for word in (flag, str(text))]
        else:
            words += _option(flag, value)
    return shlex.join(words)


def _option(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, SpeculativeConfig):
        value = value.model_dump(exclude_none=True)
    if flag.endswith("speculative-config"):
        return [flag, json.dumps(value)]
    if isinstance(value, dict):
        return [flag, ",".join(f"{key}={inner:g}" for key, inner in value.items())]
    return [flag, f"{value:.12g}" if isinstance(value, float) else str(value)]


def run_point(values: str, pictures: bool) -> dict[str, Any]:
    """Run a configuration, as JSON, in a process of the explorer; return figures, with ``pictures``
    what limits it, warnings and pictures, or ``error``, one line."""
    from eldr_sim.simulator.outcome.error_band import one_line
    from eldr_sim.simulator.outcome.metrics import warnings_of
    from eldr_sim.simulator.run import simulate

    try:
        config = make_config(json.loads(values))
        result = simulate(config)
    except InputError as error:
        return {"error": str(error)}
    except MemoryError:
        raise
    except Exception as error:  # of any kind: the page goes on
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    summary = result.summary
    figures = {name: summary[name] for name in _DRAWN} | {"rate": config.requests.request_rate}
    figures["headline"] = [(figure.label, number(figure.value)) for figure in headline_of(summary)]
    if pictures:
        figures["parts"] = [
            (part.title, [_shown(row) for row in part.rows]) for part in parts_of(summary)
        ]
        figures |= {"limits": summary.get("limits"), "warnings": warnings_of(summary)}
        if band := summary.get("error_band"):
            figures["band"] = one_line(band)
        figures["pictures"] = _pictures(result)
    return figures


def _shown(row: Figure | str) -> tuple[str, ...]:
    """Return a row's cells as text; a remark is one cell."""
    if isinstance(row, str):
        return (row,)
    value = row.value if isinstance(row.value, str) else number(row.value)
    return f"{row.of}: {row.label}" if row.of else row.label.strip(), value


def _pictures(result: Any) -> list[dict[str, Any]]:
    from eldr_sim.reports.explanation import step_parts
    from eldr_sim.reports.figures import pictures_of
    from eldr_sim.reports.folders import open_folders
    from eldr_sim.reports.pictures import stacked_bars
    from eldr_sim.simulator.results import write_result

    with TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        write_result(result, folder)
        drawn = [p for p in pictures_of(folder, "this run") if p.title in _PICTURES]
        if result.summary["mean_tpot_ms"] is not None:
            found = step_parts(open_folders([folder])[0]).items()
            some = [(re.split("[:,]", name)[0], ms) for name, ms in found if ms > 0.0]
            parts = [(name, [ms], n) for n, (name, ms) in enumerate(some)]
            drawn.insert(0, stacked_bars("Parts of TPOT", "run", "ms a token", ["this run"], parts))
    return [{"title": p.title, **p.spec} for p in drawn]
