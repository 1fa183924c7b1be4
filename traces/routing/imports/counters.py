"""Counters of experts, as engines and monitoring export them: loads without single tokens.

Read are the files that SGLang's expert distribution recorder dumps (``logical_count`` of the modes
``stat`` and ``stat_approx``, ``records`` of ``per_pass`` and ``per_token``), Prometheus counters
with labels for the layer and the expert or rank (scrapes in text, or the JSON of ``query_range``),
SGLang's histogram ``eplb_gpu_physical_count`` with ranks as buckets, CSV files, and the lines on
balancedness in the logs of vLLM's EPLB and of SGLang."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.inputs import array_limit, parse_json, read_text, within
from eldr_sim.traces.routing.counters import Counters, CountOf
from eldr_sim.traces.routing.imports.dumps import is_torch_file, load_tensors

FORMATS = (
    "a dump of SGLang's recorder (.pt or JSON), Prometheus counters with labels layer and "
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
_VLLM = re.compile(r"(?:for model (\S+): )?avg_tokens=([\d.]+), max_tokens=([\d.]+)")
_SGLANG = re.compile(r"current_pass_balancedness=([\d.]+)")


_RECORDER = "SGLang's recorder"
#: Loads of logical experts, [layers, experts], by forward pass, of one rank.
_Passes = Mapping[int, Floats]
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
    read = [_read(path) for path in paths]
    parts = [part for part in read if isinstance(part, Counters)]
    if passes := [part for part in read if not isinstance(part, Counters)]:
        parts.append(_whole(_of_passes(passes, str(paths[0])), str(paths[0]), _RECORDER, "experts"))
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


def _read(path: Path) -> Counters | _Passes:
    where = str(path)
    if is_torch_file(path):
        return _sglang(load_tensors(path), where)
    text = read_text(path, "counters")
    if text.lstrip()[:1] == "{" and '"' in text[:200]:
        data = parse_json(text, where)
        if isinstance(data, dict) and ({"logical_count", "records"} & set(data)):
            return _sglang(data, where)
        return _query_range(data, where)
    if _VLLM.search(text) or _SGLANG.search(text) or "EPLB step:" in text:
        return _log(text, where)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if "," in first and "{" not in first and not first.startswith("#"):
        return _table(text, where)
    return _prometheus(text, where)


def _whole(counts: Any, where: str, source: str, of: CountOf) -> Counters:
    """Check counts; one window where they have two axes."""
    try:
        whole_counts = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(where, "counts that are not a whole array of numbers", FORMATS) from None
    whole_counts = whole_counts[None] if whole_counts.ndim == 2 else whole_counts
    if whole_counts.ndim != 3 or not whole_counts.size:
        problem = f"counts of shape {list(whole_counts.shape)}"
        raise InputError(where, problem, "[layers, experts] or [windows, layers, experts]")
    if not np.isfinite(whole_counts).all() or (whole_counts < 0).any():
        raise InputError(where, "a count is negative or not finite", "0 or more")
    return Counters(whole_counts, of, np.empty(0), source)


def _sglang(data: Any, where: str) -> Counters | _Passes:
    """Read a dump: of all ranks and by step (``stat``), or of one rank and by pass."""
    if isinstance(data, dict) and "records" in data:
        return _passes(data, where)
    if not isinstance(data, dict) or "logical_count" not in data:
        raise InputError(where, "no logical_count and no records in it", "a dump of the recorder")
    found = _whole(data["logical_count"], where, _RECORDER, "experts")
    return replace(found, counts=_served(found.counts))


def _passes(data: Mapping[str, Any], where: str) -> _Passes:
    """Read the passes of a rank, physical experts as logical ones by the dump's map."""
    passes: dict[int, Floats] = {}
    try:
        logical = np.asarray(data["last_physical_to_logical_map"], dtype=np.int64)
        for record in data["records"]:
            counts = np.asarray(record["global_physical_count"], dtype=np.float64)
            if counts.shape != logical.shape:
                raise ValueError
            own = passes.setdefault(
                int(record["forward_pass_id"]), np.zeros((len(counts), int(logical.max()) + 1))
            )
            np.add.at(own, (np.arange(len(counts))[:, None], logical), counts)
    except (KeyError, TypeError, ValueError, IndexError):
        problem = "records without forward_pass_id and global_physical_count, or of another map"
        raise InputError(where, problem, "a dump of the mode per_pass or per_token") from None
    return passes


def _of_passes(ranks: Sequence[_Passes], where: str) -> Floats:
    """Return the sum over ranks by pass, [windows, layers, experts]."""
    shapes = {own.shape for passes in ranks for own in passes.values()}
    if len(shapes) != 1:
        raise InputError(where, "no passes, or passes of several sizes", "dumps of one engine")
    known = sorted({number for passes in ranks for number in passes})
    nothing = np.zeros(shapes.pop())
    return _served(np.array([sum((p.get(n, nothing) for p in ranks), nothing) for n in known]))


def _served(counts: Floats) -> Floats:
    """Leave out steps without tokens (of a buffer that is not full) and dense layers."""
    own = counts[counts.any(axis=(1, 2))][:, counts.any(axis=(0, 2))]
    return own if own.size else counts


def _log(text: str, where: str) -> Counters:
    """Read mean over greatest load from each line that has it."""
    windows, models = [], dict[str, None]()
    for number, line in enumerate(text.splitlines(), 1):
        if vllm := _VLLM.search(line):
            models |= {vllm[1] or "": None}
            mean, most = float(vllm[2]), float(vllm[3])
            if mean > most:
                problem = f"line {number}: avg_tokens {mean:g} is above max_tokens {most:g}"
                raise InputError(where, problem)
            if most:  # steps without tokens say nothing
                windows.append(mean / most)
        elif sglang := _SGLANG.search(line):
            windows.append(float(sglang[1]))
        elif "EPLB step:" in line or "current_pass_balancedness" in line:
            raise InputError(where, f"line {number}: no balancedness in {line.strip()[:60]!r}")
    if len(models) > 1:  # such as a drafter's
        raise InputError(where, f"lines of several models: {', '.join(models)}", "those of one")
    return Counters(np.empty((0, 0, 0)), "ranks", np.array(windows), "a log of balancedness")


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
    series: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
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
                    sums = series.setdefault((name, of), {})
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
    experts = {key: each for key, each in series.items() if key[1] == "experts"} or series
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
