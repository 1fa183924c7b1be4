"""A result's figures as rows, in parts: the terminal, pages and the explorer render these.

A figure of `catalogue` brings its heading and unit from there; others have theirs here."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from eldr_sim.kernel_profiles.tables.format import IN_WORDS, parts_by_provenance
from eldr_sim.simulator.outcome.catalogue import LATENCIES, heading, unit
from eldr_sim.simulator.outcome.error_band import in_words, interval
from eldr_sim.traces.requests.logs.log_window import part_in_words

Summary = Mapping[str, Any]


class Figure(NamedTuple):
    """A row: a figure of a result, or a choice that it was made with."""

    name: str
    value: Any  #: None: there is none
    unit: str = ""
    of: str = ""  #: the event that it is about

    @property
    def label(self) -> str:
        """Name and unit as vLLM prints them, such as ``P99 TPOT (ms)``."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


class Part(NamedTuple):
    """Rows that belong together, in order; a text is a remark."""

    title: str
    rows: tuple[Figure | str, ...]


def parts_of(summary: Summary) -> list[Part]:
    """Return the parts of a run's summary, in reading order.

    Args:
        summary: content of ``summary.json``.

    Returns:
        The parts that this summary has.
    """
    alone = summary["policy"] is None  # requests end with their prompts
    parts = [Part("Run", tuple(_run(summary, alone)))]
    if sessions := summary.get("sessions"):
        parts.append(Part("Sessions", tuple(_sessions(summary, sessions))))
    if front_end := summary.get("front_end"):
        parts.append(Part("Front end, part of TTFT", tuple(_front_end(front_end))))
    parts += [
        Part(latency.heading, _tagged(summary, *(f"{s}_{tag}_ms" for s in _STATISTICS)))
        for tag, latency in LATENCIES.items()
        if tag == "ttft" or not alone
    ]
    if not alone:
        parts.append(Part("Decode steps", tuple(_steps(summary))))
    for key, title, rows in (
        ("kv_tiers", "KV tiers", _tiers),
        ("speculative_decoding", "Speculative Decoding", _drafts),
        ("group", "Engines that share experts", _group),
        ("weight_streaming", "Streamed experts", _streaming),
        ("faults", "Faults", _faults),
        ("scaling", "Workers over time", _scaling),
    ):
        if own := summary.get(key):
            parts.append(Part(title, tuple(rows(summary, own))))
    parts.append(Part("Memory and cost", tuple(_cost(summary, alone))))
    if limits := summary.get("limits"):
        because = limits["because"]
        parts.append(Part("What limits it", (Figure("Bottleneck", limits["bottleneck"]), because)))
    if band := summary.get("error_band"):
        title = f"Error band ({100 * band['level']:.0f}% of published runs)"
        parts.append(Part(title, tuple(_band(summary, band, alone))))
    return [*parts, Part("Rests on", tuple(_basis(summary)))]


def basis_in_short(summary: Summary) -> Part:
    """Return what the part *Rests on* says, in two lines: the weakest source of a step's time, and
    where the routing comes from."""
    rows: list[Figure | str] = []
    if sources := parts_by_provenance(summary.get("provenance", {})):
        weakest, parts = list(sources.items())[-1]
        named = ", ".join(parts)
        if len(named) > _NAMED:
            named = f"{len(parts)} of {len(set().union(*sources.values()))} parts"
        rows.append(f"Step times: {weakest} at worst ({named})")
    if summary["trace"]["name"] is not None:  # a dense model has none
        rows.append(f"Routing: {summary['trace']['in_short']}")
    return Part("Rests on (in full: --verbose)", tuple(rows))


_NAMED = 30  #: most characters of names of a step's parts in a line


def headline_of(summary: Summary) -> list[Figure]:
    """Return the few figures that a reader looks for first."""
    tags = [f"{s}_{metric}_ms" for metric in ("ttft", "tpot") for s in ("median", "p99")]
    if summary["slo_attainment_by_metric"]:
        tags += ["slo_attainment", "request_goodput"]
    tags.append("output_throughput")
    if summary["mean_active_experts_per_step"] is not None:
        tags += ["mean_active_experts_per_step", "mean_active_experts_per_token"]
    cost = "cost_per_million_output_tokens"
    other = "gpu_hours_per_million_output_tokens"
    return list(_tagged(summary, *tags, "gpus", other if summary[cost] is None else cost))


#: Statistics of a latency that are shown.
_STATISTICS = ("mean", "median", "p90", "p99")


def _tagged(summary: Summary, *tags: str) -> tuple[Figure, ...]:
    return tuple(Figure(heading(tag), summary[tag], unit(tag)) for tag in tags)


def _run(summary: Summary, alone: bool) -> Iterator[Figure | str]:
    policies = summary["policy"], summary["prefill_policy"]
    names = ("Policy", "prefill policy")
    both = [(name, word) for name, word in zip(names, policies, strict=True) if word is not None]
    name = ", ".join(name for name, _ in both)
    yield Figure(name[0].upper() + name[1:], ", ".join(word for _, word in both))
    yield Figure("Model on GPU", f"{summary['model_id']} on {summary['gpu']}")
    yield Figure("Topology", summary["topology"])
    yield from _tagged(summary, "completed", "failed")
    for reason, count in summary["failed_reasons"].items():
        yield Figure(f"  {reason}", count)
    rate, trace = summary["request_rate"], summary["trace"]
    yield Figure(heading("request_rate"), "recorded" if rate is None else rate, "RPS")
    if "arrivals" in trace:
        yield Figure("Arrivals", trace["arrivals"])
    yield from log_lines(trace)
    if summary["max_concurrency"] is not None:
        yield from _tagged(summary, "max_concurrency")
    for name in ("isl", "osl"):
        if lengths := trace.get(name):
            shown = ", ".join(f"{lengths[key]:.0f}" for key in ("mean", "p50", "p99"))
            yield Figure(f"{name.upper()}: mean, median, p99", shown, "tokens")
    yield from _tagged(
        summary, "duration", "total_input_tokens", "total_output_tokens", "request_throughput"
    )
    if summary["slo_attainment_by_metric"]:  # without an SLO there is nothing to attain
        yield from _tagged(summary, "request_goodput", "slo_attainment")
    prompts = ("prefill_throughput", "computed_prompt_throughput", "prefill_mfu", "makespan_s")
    answers = ("output_throughput", "total_token_throughput")
    yield from _tagged(summary, *(prompts if alone else answers), "max_concurrent_requests")
    if summary.get("prefix_cache_hits"):
        yield from _tagged(summary, "prefix_cache_hit_rate")
        if summary.get("ideal_prefix_cache_hit_rate"):
            yield from _tagged(summary, "ideal_prefix_cache_hit_rate", "common_prefix_share")


def log_lines(trace: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was read of a log, and what of it is measured, if anything is."""
    if header := trace.get("log"):
        from eldr_sim.traces.requests.logs.log_header import header_in_words

        yield f"Read: {header_in_words(header)}"
    if part := trace.get("log_window"):
        yield f"Measured: {part_in_words(part)}"


def _sessions(summary: Summary, sessions: Summary) -> Iterator[Figure]:
    counts = (str(sessions[key]) for key in ("begun", "completed", "abandoned"))
    yield Figure("Begun, completed, abandoned", ", ".join(counts))
    yield Figure("Mean duration", sessions["mean_duration_s"], "s")
    yield from _tagged(summary, "mean_e2el_per_token_ms", "p90_e2el_per_token_ms")
    for row in sessions["by_turn"]:
        columns = ("mean_ttft_ms", "mean_tpot_ms", "prefix_cache_hit_rate")
        shown = (f"{row[key]:.4g}" if row[key] is not None else "-" for key in columns)
        yield Figure(f"Turn {row['turn']}: TTFT, TPOT (ms), hit rate", ", ".join(shown))


def _front_end(own: Summary) -> Iterator[Figure]:
    yield Figure("API servers, tokenizer", f"{own['api_servers']}, {own['tokenizer_mode']}")
    for statistic in ("mean", "median", "p99"):
        yield Figure(f"{statistic.capitalize()} time", own[f"{statistic}_ms"], "ms")


def _steps(summary: Summary) -> Iterator[Figure]:
    yield from _tagged(summary, "mean_decode_batch")
    if summary["mean_active_experts_per_step"] is not None:  # a dense model has none
        of = ("mean_active_experts_per_step", "mean_active_experts_per_token")
        yield from _tagged(summary, *of, "p99_active_experts_per_step")
    if summary["expert_parallel_size"] > 1:
        yield Figure("Expert placement", summary["expert_placement"])
        yield from _tagged(summary, "mean_busiest_rank_experts_per_step")


def _drafts(summary: Summary, own: Summary) -> Iterator[Figure | str]:
    n, accepted = (own[f"spec_decode_num_{of}"] for of in ("drafts", "accepted_tokens"))
    tokens = own["spec_decode_num_draft_tokens"]
    yield Figure("Acceptance rate", 100.0 * accepted / tokens if tokens else None, "%")
    yield from _tagged(summary, "acceptance_length")
    yield from (Figure("Drafts", n), Figure("Draft tokens", tokens))
    yield Figure("Accepted tokens", accepted)
    by_position = own["spec_decode_num_accepted_tokens_per_pos"]
    for position, passed in enumerate(by_position if n else ()):
        yield Figure(f"  Position {position}", 100.0 * passed / n, "%")
    yield from _tagged(summary, "tokens_per_step", "verify_experts_over_plain", "draft_time_share")
    yield f"acceptance: {own['acceptance_source']}"
    yield f"experts of rejected drafts: {own['rejected_drafts_experts']}"


def _tiers(_: Summary, own: Summary) -> Iterator[Figure]:
    rates = (f"{name} {rate:.1%}" for name, rate in own["hit_rate"].items())
    yield Figure("Hit rate by tier", ", ".join(rates))
    for name, tier in own["tiers"].items():
        moved = (f"{tier[f'{of}_gb']:.2f}" for of in ("stored", "loaded", "evicted"))
        yield Figure(f"{name}: stored, loaded, evicted", ", ".join(moved), "GB")
    yield Figure("Mean wait for loads", own["mean_load_wait_ms"], "ms")
    yield Figure("Prefill saved by loads", own["prefill_seconds_saved"], "s")


def _group(_: Summary, own: Summary) -> Iterator[Figure]:
    engines = f"{own['data_parallel_size']}, {own['all2all_backend']}"
    yield Figure("Engines a group, all-to-all", engines)
    if "ffn_ranks" in own:
        yield Figure("FFN GPUs, micro-batches", f"{own['ffn_ranks']}, {own['micro_batches']}")
        for side in ("attention", "FFN"):
            idle_ms = own[f"mean_{side.lower()}_idle_ms"]
            yield Figure(f"Mean idle time of {side} GPUs", idle_ms, "ms")
    for part in ("step", "moe", "dispatch", "combine", "idle"):
        yield Figure(f"Mean {part} time", own[f"mean_{part}_ms"], "ms")
    if own.get("mean_replica_choice_ms"):
        yield Figure("Mean replica choice time", own["mean_replica_choice_ms"], "ms")
    yield Figure("Token-expert pairs, busiest / mean rank", own["busiest_rank_pairs_over_mean"])


def _streaming(_: Summary, own: Summary) -> Iterator[Figure]:
    yield Figure("Gather of a layer", own["gather_ms"], "ms")
    yield Figure("Copy of a layer from the host", own["host_copy_ms"], "ms")
    yield Figure("Share of step time waited", own["wait_share"])


def _faults(_: Summary, own: Summary) -> Iterator[Figure | str]:
    for event in own["events"]:
        name = event["event"]
        # Without an SLO no request is good: what completes counts.
        kind = "throughput" if event["goodput_during"] is None else "goodput"
        for when in ("before", "during", "after"):
            value = event[f"{kind}_{when}"]
            yield Figure(f"{kind.capitalize()} {when}", value, "req/s", name)
        if kind == "goodput":
            for when in ("before", "during", "after"):
                yield Figure(f"Attainment {when}", event[f"attainment_{when}"], "", name)
        yield Figure("Time to recover", event["time_to_recover_s"], "s", name)
    yield Figure("Requests sent again", own["retried"])
    yield Figure("Requests lost with their worker", own["worker_lost"])
    yield Figure("Requests that gave up", own["cancelled"])


def _scaling(_: Summary, own: Summary) -> Iterator[Figure]:
    yield Figure("Autoscaler", own["autoscale"])
    for pool, workers in own["mean_workers"].items():
        yield Figure(f"Mean {pool} workers that serve", workers)
    for name, hours in own["gpu_hours_by_state"].items():
        yield Figure(f"GPU-hours {name}", hours)
    if own["minutes_below_95"] is not None:  # without an SLO no request is good
        yield Figure("GPU-hours a 1,000 good requests", own["gpu_hours_per_1000_good"])
        if own["cost_per_1000_good"] is not None:
            yield Figure("Cost of 1,000 good requests", own["cost_per_1000_good"], "$")
        minutes = f"{own['minutes_below_95']} of {own['minutes']}"
        yield Figure("Minutes below 95% attainment", minutes)
    events = "starts", "stops", "switches", "reversals"
    yield Figure(", ".join(events).capitalize(), ", ".join(str(own[name]) for name in events))


def _cost(summary: Summary, alone: bool) -> Iterator[Figure]:
    yield from _tagged(summary, "preemptions", "gpus")
    if not alone:
        yield from _tagged(summary, "gpu_hours_per_million_output_tokens")
    if summary["cost_per_million_output_tokens"] is not None:
        yield from _tagged(summary, "cost_per_million_output_tokens")


def _band(summary: Summary, band: Summary, alone: bool) -> Iterator[Figure | str]:
    shown = {"mean_ttft_ms": "ttft"} if alone else {
        "mean_ttft_ms": "ttft", "mean_tpot_ms": "tpot", "output_throughput": "throughput",
    }  # fmt: skip
    for tag, metric in shown.items():
        if metric in band and summary[tag]:
            low, high = interval(band, metric, summary[tag])
            yield Figure(heading(tag), f"{low:.4g} to {high:.4g}", unit(tag))
    yield from in_words(band)


def _basis(summary: Summary) -> Iterator[Figure | str]:
    for known, parts in parts_by_provenance(summary.get("provenance", {})).items():
        yield f"Step times, {known} ({IN_WORDS[known]}): {', '.join(parts)}"
    if handover := summary.get("handover"):  # other topologies have none
        presets = (summary["kv_transfer"], handover)
        yield Figure("KV transfer, hand-over", ", ".join(text.split(":")[0] for text in presets))
    yield from summary.get("latency_notes", ())
    trace = summary["trace"]
    if trace["name"] is not None:  # a dense model has none
        yield Figure("Routing trace", f"{trace['name']} ({trace['provenance']})")
        yield trace["rests_on"]
        yield trace["layers"]
    if beyond := trace.get("prompt_tokens_beyond_recorded_share"):
        yield f"{100 * beyond:.0f}% of the prompt tokens repeat recorded ones: prompts are longer"
