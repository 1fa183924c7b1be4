"""Counters of experts, as engines and monitoring export them: loads without single tokens.

Read are the files that SGLang's expert distribution recorder dumps (``logical_count`` of a ``.pt``
file or of JSON), Prometheus counters with labels for the layer and the expert or rank (scrapes in
text, or the JSON of ``query_range``), SGLang's histogram ``eplb_gpu_physical_count`` with ranks as
buckets, CSV files, and the lines on balancedness in the logs of vLLM's EPLB and of SGLang."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.inputs import array_limit, parse_json, read_text, within
from eldr_sim.traces.routing.counters import Counters, CountOf
from eldr_sim.traces.routing.imports.dumps import is_torch_file, load_tensors

FORMATS = (
    "an SGLang dump (.pt, or JSON with logical_count), Prometheus counters with labels layer and "
    "expert or rank (text or query_range JSON), a CSV with columns layer, expert or rank, count, "
    "or a log with vLLM's 'EPLB step' or SGLang's '[Expert Balancedness]' lines"
)
_LAYER = ("layer", "layer_id", "layer_idx")
_OF: dict[CountOf, tuple[str, ...]] = {
    "experts": ("expert", "expert_id", "expert_idx", "logical_expert"),
    "ranks": ("rank", "ep_rank", "gpu_rank", "gpu"),
}
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)\{(.*)\}\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_VLLM = re.compile(r"avg_tokens=([\d.]+), max_tokens=([\d.]+)")
_SGLANG = re.compile(r"current_pass_balancedness=([\d.]+)")


#: Samples of a counter: (layer, expert or rank) to its value.
_Scrape = Mapping[tuple[int, int], float]


def read_counters(paths: Sequence[Path]) -> Counters:
    """Read counters; several files are successive windows, or successive scrapes of counters.

    Args:
        paths: files of one format, in order of time.

    Returns:
        The loads by window. Scrapes become the differences between them.

    Raises:
        InputError: a file has another format, a line is not valid, or files do not fit together."""
    parts = [_read(path) for path in paths]
    kinds = {(part.source, part.of, part.counts.shape[1:]) for part in parts}
    if len(kinds) != 1:
        problem = "files of several formats or sizes: " + "; ".join(
            f"{path}: {part.source}, {part.counts.shape[1]} layers of {part.counts.shape[2]} "
            f"{part.of}" for path, part in zip(paths, parts, strict=True)
        )  # fmt: skip
        raise InputError("counters", problem, "files of one engine and one format")
    counts = np.concatenate([part.counts for part in parts])
    if parts[0].source.startswith("Prometheus"):
        counts = _differences(counts)
    balance = np.concatenate([part.balancedness for part in parts])
    if not (counts.sum() > 0 or len(balance)):
        raise InputError("counters", "no token was counted", "counters of an engine that served")
    return Counters(counts, parts[0].of, balance, parts[0].source)


def _read(path: Path) -> Counters:
    where = str(path)
    if is_torch_file(path):
        return _sglang(load_tensors(path), where)
    text = read_text(path, "counters")
    if text.lstrip()[:1] == "{" and '"' in text[:200]:
        data = parse_json(text, where)
        if isinstance(data, dict) and "logical_count" in data:
            return _sglang(data, where)
        return _query_range(data, where)
    if _VLLM.search(text) or _SGLANG.search(text) or "EPLB step" in text:
        return _log(text, where)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if "," in first and "{" not in first and not first.startswith("#"):
        return _table(text, where)
    return _prometheus(text, where)


def _whole(counts: Any, where: str, source: str, of: CountOf) -> Counters:
    """Check counts; one window where they have two axes."""
    try:
        found = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(where, "counts that are not a whole array of numbers", FORMATS) from None
    found = found[None] if found.ndim == 2 else found
    if found.ndim != 3 or not found.size:
        problem = f"counts of shape {list(found.shape)}"
        raise InputError(where, problem, "[layers, experts] or [windows, layers, experts]")
    if not np.isfinite(found).all() or (found < 0).any():
        raise InputError(where, "a count is negative or not finite", "0 or more")
    return Counters(found, of, np.empty(0), source)


def _sglang(data: Any, where: str) -> Counters:
    if not isinstance(data, dict) or "logical_count" not in data:
        known = "a dump of the mode stat, stat_approx or per_pass"
        raise InputError(where, "no logical_count in it", known)
    return _whole(data["logical_count"], where, "SGLang's recorder", "experts")


def _log(text: str, where: str) -> Counters:
    """Read mean over greatest load from each line that has it."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if vllm := _VLLM.search(line):
            mean, most = map(float, vllm.groups())
            if mean > most:
                problem = f"line {number}: avg_tokens {mean:g} is above max_tokens {most:g}"
                raise InputError(where, problem)
            if most:  # steps without tokens say nothing
                found.append(mean / most)
        elif sglang := _SGLANG.search(line):
            found.append(float(sglang[1]))
        elif "EPLB step" in line or "current_pass_balancedness" in line:
            raise InputError(where, f"line {number}: no balancedness in {line.strip()[:60]!r}")
    return Counters(np.empty((0, 0, 0)), "ranks", np.array(found), "a log of balancedness")


def _table(text: str, where: str) -> Counters:
    """Read a CSV: layer, expert or rank, count, and window where there are several."""
    rows = csv.DictReader(text.splitlines())
    names = [name.strip() for name in rows.fieldnames or ()]
    of = next((of for of, known in _OF.items() if set(known) & set(names)), None)
    if of is None or "count" not in names or not set(_LAYER) & set(names):
        raise InputError(where, f"columns {', '.join(names)}", "layer, expert or rank, count")
    layer, item = (next(n for n in known if n in names) for known in (_LAYER, _OF[of]))
    windows: dict[str, dict[tuple[int, int], float]] = {}
    for number, row in enumerate(rows, 2):
        try:
            key, value = (int(row[layer]), int(row[item])), float(row["count"])
        except (TypeError, ValueError):
            raise InputError(where, f"line {number}: not numbers: {_said(row)}") from None
        windows.setdefault(row.get("window") or "", {})[key] = value
    return _whole(_arrays(list(windows.values()), where), where, "a CSV", of)


def _said(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in list(row.items())[:4])


def _prometheus(text: str, where: str) -> Counters:
    """Read one scrape."""

    def samples() -> Iterator[tuple[str, dict[str, str], float]]:
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#") or "{" not in line:
                continue
            found = _SAMPLE.fullmatch(line.strip())
            try:
                if found is None:
                    raise ValueError
                yield found[1], dict(_LABEL.findall(found[2])), float(found[3])
            except ValueError:
                problem = f"line {number}: not a sample: {line.strip()[:60]!r}"
                raise InputError(where, problem, 'NAME{layer="0",expert="0"} 1') from None

    of, known = _by_item(samples(), where)
    return _whole(_arrays([known], where), where, "Prometheus counters", of)


def _query_range(data: Any, where: str) -> Counters:
    """Read the answer of Prometheus to a range query."""
    try:
        series = [(s["metric"], s.get("values") or [s["value"]]) for s in data["data"]["result"]]
        times = sorted({float(at) for _, values in series for at, _ in values})
        at_time: list[list[tuple[str, dict[str, str], float]]] = [[] for _ in times]
        place = {at: i for i, at in enumerate(times)}
        for labels, values in series:
            name = labels.get("__name__", "counter")
            for at, value in values:
                at_time[place[float(at)]].append((name, labels, float(value)))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(where, "not an answer of Prometheus", FORMATS) from None
    found = [_by_item(iter(samples), where) for samples in at_time]
    if not found:
        raise InputError(where, "no series in it", "a query that matches counters")
    arrays = _arrays([known for _, known in found], where)
    return _whole(arrays, where, "Prometheus counters", found[0][0])


def _by_item(
    samples: Iterator[tuple[str, dict[str, str], float]], where: str
) -> tuple[CountOf, _Scrape]:
    """Sum the samples of one metric by layer and expert, or else rank."""
    found: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    buckets: dict[int, dict[float, float]] = {}
    for name, labels, value in samples:
        layer = next((labels[n] for n in _LAYER if n in labels), None)
        if layer is None:
            continue
        try:
            if "eplb_gpu_physical_count_bucket" in name:
                own = buckets.setdefault(int(layer), {})
                own[float(labels["le"])] = own.get(float(labels["le"]), 0.0) + value
                continue
            for of, known in _OF.items():
                item = next((labels[n] for n in known if n in labels), None)
                if item is not None:
                    key = int(layer), int(item)
                    sums = found.setdefault((name, of), {})
                    sums[key] = sums.get(key, 0.0) + value
                    break
        except (KeyError, ValueError):
            problem = f"{name}: layers and experts that are not numbers: {_said(labels)}"
            raise InputError(where, problem) from None
    if buckets:  # cumulative over ranks
        ranks = {
            (layer, rank): value
            for layer, own in buckets.items()
            for rank, value in enumerate(np.diff([0.0, *(own[le] for le in sorted(own)
                                                         if np.isfinite(le))]))
        }  # fmt: skip
        return "ranks", ranks
    experts = {key: each for key, each in found.items() if key[1] == "experts"} or found
    if len(experts) > 1:
        names = ", ".join(name for name, _ in experts)
        raise InputError(where, f"several metrics by layer and expert: {names}", "one of them")
    if not experts:
        raise InputError(where, "no counters of experts or ranks", FORMATS)
    (((_, kind), by_place),) = experts.items()
    return ("experts" if kind == "experts" else "ranks"), by_place


def _arrays(windows: Sequence[_Scrape], where: str) -> Floats:
    """Return values as [windows, layers, items]; layers as they are numbered, without gaps."""
    layers = sorted({layer for known in windows for layer, _ in known})
    items = 1 + max((item for known in windows for _, item in known), default=-1)
    if not layers or min(item for known in windows for _, item in known) < 0:
        raise InputError(where, "no counts, or a negative number of an expert", "0 or more")
    within(where, len(windows) * len(layers) * items, array_limit() // 8, " counts")
    place = {layer: i for i, layer in enumerate(layers)}
    found = np.zeros((len(windows), len(layers), items))
    for i, known in enumerate(windows):
        for (layer, item), value in known.items():
            found[i, place[layer], item] = value
    return found


def _differences(counts: Floats) -> Floats:
    """Return what was counted between scrapes; a counter that fell began again at 0."""
    if len(counts) == 1:
        return counts
    more = np.diff(counts, axis=0)
    return np.asarray(np.where(more < 0, counts[1:], more))
