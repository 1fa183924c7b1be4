"""Check of an engine's features: serve, simulate, compare. ``OUT/features/NAME.json``,
``OUT/features.md``; set-up ``colocated``, calibrated in ``OUT/calibration``."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.kinds import Row
from eldr_sim.outputs import keeping, markdown_table, whole_file
from eldr_sim.validation.live.calibration.engine_calibration import (
    EngineCalibration,
    model_of,
    read_calibration,
)
from eldr_sim.validation.live.calibration.setup_calibration import capacity, engine_infos, read_logs
from eldr_sim.validation.live.campaign import Campaign, begin_campaign, calibrated_setup, on_core
from eldr_sim.validation.live.engines.load import Load, LoadRequest, domain_slices, write_draft
from eldr_sim.validation.live.engines.run_writer import machine, versions, write_trace_of
from eldr_sim.validation.live.engines.setups import Endpoint, Setup, started_setup
from eldr_sim.validation.live.features import feature_setups as features
from eldr_sim.validation.live.features.routed import serve_routed
from eldr_sim.validation.live.live_run import EngineInfo, LoadInfo
from eldr_sim.validation.live.report.comparison import noise_floor

Told = Callable[[str, float], None]

#: Largest error, %, by figure.
GOALS = {"tpot p50": 5.0, "tpot p99": 15.0, "ttft p50": 10.0, "ttft p99": 15.0}
#: Rate of open loads, as a share of what the engine carries without the feature.
_SHARE = 0.6
_NAME, _PAIR = "colocated", "2C"
_SIDES = ("live", "simulated")
#: Requests at once of the loads that drafts are calibrated on, and tokens of each.
_AT_ONCE, _DRAFT_LEN = (1, 8), 64


@dataclass(frozen=True)
class _Base:
    """What the calibrated engine has shown."""

    calibrated: EngineCalibration
    engine: EngineInfo
    sent: dict[features.FeatureLoad, list[features.Sent]]  #: of each load, a repeat each
    traces: dict[features.FeatureLoad, list[Path]]  #: their routing
    rates: dict[features.FeatureLoad, float]  #: requests/s


def check_features(campaign: Campaign, names: Sequence[str], progress: Told) -> list[Row]:
    """Check features, and return the figures of each; those in OUT are kept. Raises InputError if
    an engine does not start or a request fails."""
    begin_campaign(campaign, progress)
    folder = campaign.out / "features"
    folder.mkdir(exist_ok=True)
    todo = [name for name in names if not (folder / f"{name}.json").exists()]
    with keeping(campaign.kept):
        if todo:
            base = _serve_base(campaign, [features.FEATURES[name].load for name in todo], progress)
            for name in todo:
                found = _check(campaign, name, base, progress)
                found |= {"machine": machine(), "versions": versions()}
                text = json.dumps(found | {"doubts": base.calibrated.info.doubts}, indent=2)
                with whole_file(folder / f"{name}.json") as file:
                    file.write_text(text + "\n", encoding="utf-8")
    files = sorted(folder.glob("*.json"), key=lambda file: list(features.FEATURES).index(file.stem))
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    with whole_file(campaign.out / "features.md") as file:
        file.write_text(page(rows), encoding="utf-8")
    return rows


def _serve_base(campaign: Campaign, loads: Sequence[features.FeatureLoad], progress: Told) -> _Base:
    """Calibrate an engine without the features, and send it the loads of all."""
    dims = model_of(campaign.config)
    with _engine(campaign, "base", progress) as setup:
        calibrated = calibrated_setup(campaign, setup, progress)
        base = _Base(calibrated, engine_infos(setup, read_logs(setup))[0], {}, {}, {})
        for name, repeat in itertools.product(dict.fromkeys(loads), range(campaign.repeats)):
            progress(f"{name} #{repeat}", 0.0)
            lengths = features.lengths_of(name, campaign.prompt_len, campaign.output_len)
            carried = capacity(setup, campaign.options, dims, calibrated, *lengths[:2])
            base.rates[name] = _SHARE * carried
            sent = _serve(campaign, name, base.rates[name], setup, calibrated, repeat)
            read_logs(setup, sent.requests)  # until they hold the last tokens
            trace = campaign.out / "features" / f"trace-{time.time_ns():x}"
            write_trace_of(trace, sent.requests, setup.endpoints, campaign.options.model)
            base.sent.setdefault(name, []).append(sent)
            base.traces.setdefault(name, []).append(trace)
    return base


@contextmanager
def _engine(
    campaign: Campaign, task: str, progress: Told, extra: tuple[str, ...] = (),
    capture: bool = True, name: str = _NAME, kv_events: bool = False,
) -> Iterator[Setup]:  # fmt: skip
    """Start the engine of a set-up, or two, and be the client on its core in the block."""
    progress(f"{task}: starting vLLM", 0.0)
    options = replace(campaign.options, extra=(*campaign.options.extra, *extra), capture=capture,
                      kv_events=kv_events)  # fmt: skip
    log = campaign.out / "logs" / f"{task.replace(' ', '-')}-{time.time_ns():x}"
    with (
        started_setup(name, options, log, gpu="gpu" in machine()) as setup,
        on_core(setup.client_core),
    ):
        yield setup


def _serve(
    campaign: Campaign, name: features.FeatureLoad, rate: float, setup: Setup,
    calibrated: EngineCalibration, repeat: int,
) -> features.Sent:  # fmt: skip
    load, most = _load(campaign, name, rate, repeat)
    return features.serve(load, setup.endpoints[0], calibrated, most)


def _load(
    campaign: Campaign, name: features.FeatureLoad, rate: float, repeat: int
) -> tuple[Load, int | None]:
    return features.feature_load(
        name,
        domain_slices(model_of(campaign.config).vocab_size),
        rate=rate,
        duration_s=campaign.duration_s,
        lengths=features.lengths_of(name, campaign.prompt_len, campaign.output_len),
        seed=campaign.seed,
        repeat=repeat,
        prefix=f"{name.replace(' ', '-')}-{time.time_ns():x}",
    )


def _check(campaign: Campaign, name: str, base: _Base, progress: Told) -> Row:
    """Return a feature's figures without it and with it, live and simulated."""
    feature = features.FEATURES[name]
    load, traces = feature.load, base.traces[feature.load]

    about = {"engine": base.engine, "calibration": campaign.calibration(_NAME),
             "calibrated": base.calibrated, "model": campaign.options.model,
             "max_model_len": campaign.options.max_model_len, "seed": campaign.seed}  # fmt: skip

    def simulated(sent: features.Sent, trace: Path, fields: Mapping[str, Any]) -> tuple[Row, Row]:
        return features.simulate_sent(sent, fields, trace=trace, **about)

    def sides(all_sent: Sequence[features.Sent], fields: Mapping[str, Any]) -> Row:
        pairs = [
            simulated(sent, trace, fields) for sent, trace in zip(all_sent, traces, strict=True)
        ]
        live, ours = (
            [features.live_figures(sent) for sent in all_sent],
            [figures for figures, _ in pairs],
        )
        counted = {
            counter: {"live": [sent.counted.get(counter, 0.0) for sent in all_sent],
                      "simulated": [_figure(summary, figure) for _, summary in pairs]}
            for counter, figure in feature.counters.items()
        }  # fmt: skip
        return {"figures": _errors(live, ours), "counters": counted if fields else {}}

    row: Row = {"feature": name, "load": load, "repeats": len(traces),
                "requests": len(base.sent[load][0].contexts)}  # fmt: skip
    if feature.router is not None:
        return row | _routed(campaign, name, base, traces, about, progress)
    row["without"] = sides(base.sent[load], {})
    drafts, extra, fields = feature.drafts, feature.engine, feature.fields
    if drafts is not None:
        if drafts["method"] == "draft_model":
            draft = campaign.out / "draft"
            if not draft.exists():
                write_draft(draft, model_of(campaign.config).vocab_size, campaign.seed)
            drafts = dict(drafts) | {"model": str(draft)}
        extra = ("--speculative-config", json.dumps(drafts))
    if not extra:
        return row
    with _engine(campaign, name, progress, extra, capture=False) as setup:
        # Engines are slow in their first steps.
        _send_alike(campaign, setup.endpoints[0], base, 8, _DRAFT_LEN)
        if drafts is not None:
            progress(f"{name}: calibration of drafts", 0.0)
            fields = {
                "speculative_config": _calibrated_drafts(
                    drafts, campaign, setup, base, simulated, traces[0]
                )
            }
        progress(f"{name}: {load}", 0.0)
        served = [
            _serve(campaign, load, base.rates[load], setup, base.calibrated, repeat)
            for repeat in range(len(traces))
        ]
    return row | {"with": sides(served, fields), "fields": dict(fields)}


def _calibrated_pair(campaign: Campaign, progress: Told) -> EngineCalibration:
    """Calibrate two engines beside each other, unless they were."""
    folder = campaign.calibration(_PAIR)
    if (folder / "calibration.json").exists():
        return read_calibration(folder)
    with _engine(campaign, "two engines", progress, name=_PAIR) as setup:
        return calibrated_setup(campaign, setup, progress)


def _routed(
    campaign: Campaign, name: str, base: _Base, traces: Sequence[Path], about: Mapping[str, Any],
    progress: Told,
) -> Row:  # fmt: skip
    """Return the figures of two engines behind the router, with the feature and without."""
    feature, sides = features.FEATURES[name], {}
    calibrated = _calibrated_pair(campaign, progress)
    about = dict(about) | {"calibration": campaign.calibration(_PAIR), "calibrated": calibrated}
    for side in ("without", "with"):
        live, ours, counted = [], [], []
        policy = feature.router if side == "with" and feature.router else "round_robin"
        struck = feature.fault if side == "with" else None
        with _engine(
            campaign, f"{name} {side}", progress, feature.engine, False, _PAIR,
            kv_events=policy != "round_robin",
        ) as setup:  # fmt: skip
            for endpoint in setup.endpoints:
                _send_alike(campaign, endpoint, base, 8, _DRAFT_LEN)
            for repeat, trace in enumerate(traces):
                progress(f"{name} {side} #{repeat}", 0.0)
                load, _ = _load(campaign, feature.load, base.rates[feature.load], repeat)
                told = {"policy": policy, **feature.fields}
                pair = serve_routed(load, setup, calibrated, told, struck, trace, about)
                live.append(pair[0].figures)
                ours.append(pair[1].figures)
                counted.append([outcome.counted for outcome in pair])
        sides[side] = {"figures": _errors(live, ours), "counters": {
            name: {which: [pair[i][name] for pair in counted] for i, which in enumerate(_SIDES)}
            for name in counted[0][0]
        }}  # fmt: skip
    return sides


def _calibrated_drafts(
    drafts: Mapping[str, Any],
    campaign: Campaign,
    setup: Setup,
    base: _Base,
    simulated: Callable[[features.Sent, Path, Mapping[str, Any]], tuple[Row, Row]],
    trace: Path,
) -> Row:
    """Return a ``speculative_config`` with what drafts cost and are worth on loads of their own:
    host time beyond verification, from requests alone and eight at once; acceptance and frequency
    of drafts unless they are synthetic."""
    k = int(drafts["num_speculative_tokens"])
    told = {name: value for name, value in drafts.items() if not name.startswith("prompt_lookup")}
    loads = [_send_alike(campaign, setup.endpoints[0], base, n, _DRAFT_LEN) for n in _AT_ONCE]
    by_place = [f"spec_decode_num_accepted_tokens_per_pos_{i}" for i in range(k)]
    counted = [
        sum(sent.counted.get(name, 0.0) for sent in loads)
        for name in ("spec_decode_num_drafts", *by_place)
    ]
    tokens, extra = _DRAFT_LEN - 1, []
    if not counted[0]:
        raise InputError("features", f"{drafts['method']} drafted nothing")
    if drafts.get("rejection_sample_method") != "synthetic":
        told["synthetic_acceptance_rates"] = [each / counted[0] for each in counted[1:]]
        # Look-ups find drafts before some steps only.
        steps = sum(tokens * len(sent.contexts) for sent in loads) - sum(counted[1:])
        told["lookup_hit_rate"] = min(1.0, counted[0] / steps)
    for sent in loads:
        free = {"speculative_config": told | {"draft_host_ms": 1e-6}}
        ours, summary = simulated(sent, trace, free)
        live, n = features.live_figures(sent), len(sent.contexts)
        name = "spec_decode_num_accepted_tokens"
        steps = tokens - sent.counted.get(name, 0.0) / n
        ours_steps = tokens - _figure(summary, name) / n
        extra.append(live["tpot p50"] * tokens / steps - ours["tpot p50"] * tokens / ours_steps)
    a, b = _AT_ONCE
    per_request = max(0.0, (extra[1] - extra[0]) / (b - a))
    told["draft_host_ms"] = max(1e-6, (extra[0] - a * per_request) / k)
    return told | {"draft_host_ms_per_request": per_request}


def _send_alike(
    campaign: Campaign, to: Endpoint, base: _Base, n: int, tokens: int
) -> features.Sent:
    """Send so many requests at once, of as many tokens to compute as to generate."""
    ids = next(iter(domain_slices(model_of(campaign.config).vocab_size).values()))
    rng = np.random.default_rng(campaign.seed)
    named = enumerate(rng.integers(*ids, size=(n, tokens)).tolist(), start=time.time_ns())
    requests = tuple(LoadRequest(f"alike-{i:x}", "", ids, tokens, 0.0) for i, ids in named)
    info = LoadInfo(name="alike", request_rate=1e6, burstiness=1.0, lengths="fixed",
                    num_requests=n, seed=campaign.seed)  # fmt: skip
    return features.serve(Load(info, requests), to, base.calibrated, None)


def _figure(summary: Mapping[str, Any], name: str) -> float:
    """Return a figure of a summary, 0 where it has none."""
    return float(summary.get(name) or 0.0)


def _errors(live: Sequence[Row], simulated: Sequence[Row]) -> Row:
    """Return by figure: means over repeats, the mean of the errors' sizes, noise and verdict."""
    errors: Row = {}
    for name, q in features.FIGURES:
        figure = f"{name} p{q}"
        mine, ours = [r[figure] for r in live], [r[figure] for r in simulated]
        mean, noise = float(np.mean(mine)), noise_floor(mine)
        size = float(np.mean([abs(s / m - 1) for s, m in zip(ours, mine, strict=True)])) * 100
        errors[figure] = {"live_ms": mean, "simulated_ms": float(np.mean(ours)),
                         "error_percent": 100 * (float(np.mean(ours)) / mean - 1),
                         "abs_error_percent": size, "noise_percent": noise}  # fmt: skip
        if figure in GOALS:
            within = noise is not None and size <= noise
            met = "met" if size <= GOALS[figure] else "within the noise" if within else "missed"
            errors[figure] |= {"goal_percent": GOALS[figure], "verdict": met}
    return errors


def page(rows: Sequence[Row]) -> str:
    """Return the page of features that were checked."""
    lines = ["# Features of a live engine, and their simulation", ""]
    if rows:
        about = rows[0]["machine"] | rows[0]["versions"]
        lines += [", ".join(f"{name} {value}" for name, value in about.items()) + ".", ""]
    if doubts := [doubt for row in rows[:1] for doubt in row["doubts"]]:
        lines += [f"**The calibrated tables are not to be trusted**: {'; '.join(doubts)}.", ""]
    lines += ["Mean of the repeats, live and simulated; error +- difference between repeats.", ""]
    columns = ["feature", "load", "engine", *(f"{n.upper()} p{q}, ms" for n, q in features.FIGURES)]
    sides = [
        [row["feature"], row["load"], side, *map(_cell, row[side]["figures"].values())]
        for row in rows
        for side in ("without", "with")
        if side in row
    ]
    counted = [
        [
            row["feature"],
            name if side == "with" else f"{name}, without",
            *(", ".join(map(_number, both[which])) for which in _SIDES),
        ]
        for row in rows
        for side in ("without", "with")
        for name, both in row.get(side, {}).get("counters", {}).items()
    ]
    lines += [*markdown_table(columns, sides), ""]
    lines += markdown_table(["feature", "counted", *_SIDES], counted)
    return "\n".join([*lines, ""])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}".removesuffix(".0")


def _cell(figure: Row) -> str:
    noise = figure["noise_percent"]
    text = f"{figure['live_ms']:.1f}, {figure['simulated_ms']:.1f}: {figure['error_percent']:+.1f}%"
    text += "" if noise is None else f" +- {noise:.1f}"
    return f"**{text}**" if figure.get("verdict") == "missed" else text
