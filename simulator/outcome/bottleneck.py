"""What limits a cluster: where requests wait, what keeps them there, and how busy that is.

Engines note at each step how many requests wait, and why the next one was not admitted
(`state.STEP`), so that a limit is named only where it kept requests waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Bools, Floats, Ints, Records
from eldr_sim.simulator.control.record import DRAINING, READY, RunRecord
from eldr_sim.simulator.outcome.sums import exact_sum, exact_sums, in_parts
from eldr_sim.simulator.outcome.worker_hours import worker_seconds
from eldr_sim.simulator.plane.state import (
    AFTER_WINDOW,
    COMPLETED,
    NO_BLOCKS,
    NO_SEAT,
    NO_TOKENS,
    OPEN,
    OUTCOMES,
    OVERLOADED,
    PUT_OFF,
)

if TYPE_CHECKING:
    from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec

#: By the time that ends it: what a request does until then. It waits in those marked.
PHASES: dict[str, tuple[str, bool]] = {
    "sent_s": ("client's limit", True), "tokenized_s": ("front end", True),
    "load_start_s": ("prefill queue", True), "prefill_start_s": ("KV load", True),
    "prefill_end_s": ("prefill", False), "transfer_start_s": ("decode admission", True),
    "transfer_end_s": ("KV transfer", True), "decode_start_s": ("decode queue", True),
    "first_token_s": ("first decode step", False), "finish_s": ("decode", False),
}  # fmt: skip
#: Places that not every run has, and when a request of one without them passes them.
WITHOUT = {"tokenized_s": "sent_s", "load_start_s": "prefill_start_s"}
_IN_LINE = (OPEN, COMPLETED, AFTER_WINDOW, OVERLOADED)
#: Outcomes of requests that were served, or waited for it when the run ended. The others were
#: refused, gave up or lost their worker: they wait for nothing from then on.
IN_LINE = tuple(OUTCOMES[code] for code in _IN_LINE)
#: Before the first token; a TTFT counts from when the client has sent the request.
TTFT_PHASES = tuple(name for name, _ in PHASES.values() if name not in ("client's limit", "decode"))
_SMALL = 0.1  # of a mean TTFT: a shorter wait is no queue
#: A larger token budget is worth a name where a budget twice as large saves this share of the time.
_WORTH = 0.15
_NO_FASTER = "larger steps would compute no more tokens a second"
#: A prompt is long beside others if it has this many times the tokens of the median one.
_LONG = 4.0
_STEPS = 3.0  # within which a request joins where there is room: it comes during one, and vLLM
#               schedules one ahead
#: Engines see at least this share of a wait for them; else requests wait before they get there.
_SEEN = 0.25
#: Tokens, and the blocks of prefill workers, limit where they keep requests waiting for this share
#: of the time, even if something else does for longer.
_TOO, _BACK = 0.3, 0.23


def phases_of(
    times: Mapping[str, Floats], until_s: float, in_line: Bools | None = None
) -> dict[str, Floats]:
    """Return how long each request spent in each phase, s; they sum to its end less its arrival.

    ``times``: ``arrival_s`` and the keys of `PHASES`, [N]; negative or NaN where a request never
    came so far; ``until_s``: end of unfinished ones; ``in_line``, [N]: of which that is so: all, or
    outcomes `IN_LINE`."""
    finish = times["finish_s"]
    ended = np.nan_to_num(finish, nan=-1.0) >= 0.0
    if in_line is not None:
        ended |= ~in_line
    here = times["arrival_s"]
    times = {key: times[own] for key, own in WITHOUT.items() if own in times} | dict(times)
    spent = {}
    waiting_in = np.full(len(here), -1)
    names = [name for name, _ in PHASES.values()]
    last = np.zeros(len(here), np.int64)  # place of the last known time, counted from 1
    for place, key in enumerate(PHASES, start=1):
        has_value = np.nan_to_num(times[key], nan=-1.0) >= 0.0 if key in times else None
        if has_value is None:
            spent[names[place - 1]] = np.zeros(len(here))
            continue
        at = np.where(has_value, times[key], here)
        spent[names[place - 1]] = at - here
        here, last = at, np.where(has_value, place, last)
    waiting_in[~ended] = np.minimum(last, len(names) - 1)[~ended]
    for place, name in enumerate(names):
        left = np.maximum(until_s - here, 0.0)  # a step may give its token later
        spent[name] = spent[name] + np.where(waiting_in == place, left, 0.0)
    return spent


def load_growth(
    arrival_s: Floats, finish_s: Floats, window: tuple[float, float]
) -> dict[str, float] | None:
    """Count arrivals and ends in the window, ``[N]`` times in s, behind the 90th percentile of
    the lives that ended. None where no request ended (negative or NaN), or the window is over
    before."""
    ended = np.nan_to_num(finish_s, nan=-1.0) >= 0.0
    if not ended.any():
        return None
    life = float(np.quantile((finish_s - arrival_s)[ended], 0.9))
    start, end = max(window[0], float(arrival_s[0]) + life), window[1]
    end = min(end, float(arrival_s[-1]))  # when nobody comes any more the cluster empties
    if start >= end:
        return None
    came = int(((arrival_s > start) & (arrival_s <= end)).sum())
    left = int((ended & (finish_s > start) & (finish_s <= end)).sum())
    return {"from_s": start, "to_s": end, "arrived": came, "ended": left}


def is_overload(growth: Mapping[str, float] | None) -> bool:
    """Say whether more come than end: by a tenth, and by more than three standard deviations."""
    if growth is None:
        return False
    grown = growth["arrived"] - growth["ended"]
    # Arrivals of a Poisson process have their number for a variance, and so has what ends.
    noise = 3.0 * math.sqrt(growth["arrived"] + growth["ended"])
    return grown > max(0.1 * growth["arrived"], noise)


class _Waits(NamedTuple):
    """What kept requests waiting in the engines of a role, from the window's begin on."""

    role: str  #: ``prefill`` or ``decode``
    engine: EngineSpec
    #: ``[codes]``: seconds that requests waited, by why the next was not admitted.
    by_cause: Floats
    alone: float  #: share of the wait for tokens of the budget while one prompt took all of it
    step_s: float  #: mean duration of a step,
    full_s: float  #: and of those while requests waited for tokens of the budget


def limits_of(record: RunRecord, spec: ClusterSpec) -> dict[str, Any]:
    """Return the figures ``limits`` of a summary: phases, utilisation, and the bottleneck.

    ``utilisation``: means over the measured window, 0 to 1: worker-time in steps, running requests
    (of ``max_num_seqs``), KV blocks' tokens of the decode batch (shared ones count for each, up to
    all there are). ``kv_transfers_per_worker``: in progress on a decode worker, mean. Phases are of
    requests that were not refused, did not give up and did not lose their worker."""
    requests = record.requests
    start, end = record.window[0], min(record.window[1], record.end_s)
    mine = requests["measured"] & np.isin(requests["outcome"], _IN_LINE)
    measured = requests[mine]
    known = set(requests.dtype.names or ()) - ({"tokenized_s"} if spec.front_end is None else set())
    times = {name: measured[name] for name in (*PHASES, "arrival_s") if name in known}
    times["load_start_s"] = record.load_start_s[mine]
    spent = phases_of(times, record.end_s)
    mean_ms = {
        name: 1e3 * math.fsum(values.tolist()) / max(1, len(measured))
        for name, values in spent.items()
        if values.any()
    }
    use: dict[str, float] = {}
    batch, transfers = 0.0, None
    there = _there(record, spec, start, end)
    decodes = np.array([pool.decodes for pool in spec.pools])
    contexts = requests["prompt_len"] + requests["output_len"].astype(np.int64)
    beside = spec.windows.reached(contexts, spec.block_size) + spec.windows.state
    windows = spec.block_size * float(np.mean(beside)) if len(requests) else 0.0
    for role, steps, seconds in (
        ("prefill", record.prefill_steps, there * ~decodes),
        ("decode", record.decode_steps, there * decodes),
    ):
        if not seconds.any():
            continue
        of = None if role == "prefill" else windows
        sums = exact_sums(_use(spec, part, start, end, of) for part in in_parts(steps))
        use[f"{role}_busy"] = min(1.0, sums[0] / float(seconds.sum()))
        if role == "decode":
            batch = sums[1] / sums[0] if sums[0] else 0.0
            seats = seconds @ [pool.engine.max_num_seqs for pool in spec.pools]
            use["decode_seats"] = min(1.0, sums[1] / float(seats))
            room = seconds @ [pool.engine.n_blocks for pool in spec.pools] * spec.block_size
            use["decode_kv"] = min(1.0, sums[2] / float(room))
    moved = requests[requests["transfer_start_s"] >= 0.0]
    if len(moved) and spec.n_decode and end > start:
        done = np.where(moved["transfer_end_s"] >= 0.0, moved["transfer_end_s"], record.end_s)
        time = np.clip(done, start, end) - np.clip(moved["transfer_start_s"], start, end)
        transfers = exact_sum(time) / float((there * decodes).sum())

    decoders = [pool.engine for pool in spec.pools if pool.decodes]

    def waits(role: str) -> _Waits | None:
        if role == "prefill" and len(record.prefill_steps):
            return _waits(role, record.prefill_steps, spec.prefill, start, record.end_s)
        return _waits("decode", record.decode_steps, decoders[0], start, record.end_s)

    lengths = measured["prompt_len"]
    link_shared = link_holds = False
    if transfers is not None and len(measured):
        tokens = float(np.mean(lengths))
        held = use.get("decode_kv", 0.0) * decoders[0].n_blocks * spec.block_size
        took_ms = mean_ms.get("KV transfer", 0.0)
        link_shared = took_ms > 2e3 * _alone_s(spec, decoders[0], tokens)
        longer = took_ms > mean_ms.get("prefill", 0.0)
        link_holds = link_shared and longer and transfers * tokens > held
    ways = _tokenizing_ms(spent, lengths), 1e3 * spec.handover_s, spec.reserves_early, link_holds
    name, why, phase = _bottleneck(mean_ms, use, transfers or 0.0, batch, waits, lengths, *ways)
    if link_shared and phase == "prefill queue" and name != "link":
        why += f"; then {transfers:.1f} transfers share a decode worker's link, and more would wait"
    if name.endswith("batch") and len(measured) and not windows:
        prefills = name == "prefill batch" or not decoders
        engine = spec.prefill if prefills else decoders[0]
        tokens = float(np.mean(lengths if prefills else contexts[mine]))
        most = int(engine.n_blocks * spec.block_size // tokens)
        if most <= engine.max_num_seqs:
            why += f"; then KV blocks, which hold {most} requests of the mean length"
            why += ", and more would wait"
    limits: dict[str, Any] = {"bottleneck": name, "because": why, "waits_in": phase}
    limits |= {"mean_phase_ms": mean_ms, "utilisation": use}
    return limits if transfers is None else limits | {"kv_transfers_per_worker": transfers}


def _alone_s(spec: ClusterSpec, engine: EngineSpec, tokens: float) -> float:
    """Return how long the KV cache of these tokens takes over a link that nothing else uses."""
    shard = engine.parallelism.shard(engine.step_time.model)
    descriptors = tokens / spec.block_size * shard.n_kv_tensors
    rate = min(spec.transfer.bandwidth, spec.transfer.ingress)
    moved_s = tokens * shard.kv_bytes_per_token / rate
    return spec.transfer.setup_s + descriptors * spec.transfer.descriptor_s + moved_s


def _tokenizing_ms(spent: Mapping[str, Floats], prompt_len: Ints) -> float:
    """Return the mean time that prompts would take in an idle front end: the least time of a token
    for all."""
    if not len(prompt_len):
        return 0.0
    token_s = float(np.min(spent["front end"] / prompt_len))
    return 1e3 * token_s * float(np.mean(prompt_len))


def _waits(
    role: str, steps: Records, engine: EngineSpec, start: float, end: float
) -> _Waits | None:
    """Return what kept requests waiting from each step of some engines to its next one; None where
    that was not noted."""
    if (steps["stopped"] < 0).any():
        return None
    steps = steps[np.lexsort((steps["start"], steps["worker"]))]
    time = np.clip(steps["end"], start, end) - np.clip(steps["start"], start, end)
    until = np.append(steps["start"][1:], end)
    until[:-1][steps["worker"][1:] != steps["worker"][:-1]] = end
    waited = np.clip(until, start, end) - np.clip(steps["start"], start, end)
    waited = waited * steps["waiting"]
    by_cause: Floats = np.zeros(PUT_OFF + 1)
    np.add.at(by_cause, steps["stopped"], waited)
    full = (steps["stopped"] == NO_TOKENS) & (steps["waiting"] > 0)
    total, alone = exact_sum(waited[full]), exact_sum(waited[full & (steps["chunks"] <= 1)])
    step_s = exact_sum(time) / max(1, int((time > 0.0).sum()))
    full_s = exact_sum(time[full]) / max(1, int(full.sum()))
    return _Waits(role, engine, by_cause, alone / total if total else 0.0, step_s, full_s)


def _use(
    spec: ClusterSpec, steps: Records, start: float, end: float, windows: float | None
) -> tuple[Floats, ...]:
    """Return the seconds of steps in the window; of decode steps also times their sequences, times
    the tokens in KV blocks, and all. ``windows``: those of sliding windows that a sequence has."""
    time = np.clip(steps["end"], start, end) - np.clip(steps["start"], start, end)
    if windows is None:
        return (time,)
    held = steps["context"] + steps["sequences"] * windows
    most = spec.of_decoders(lambda engine: engine.n_blocks) * spec.block_size
    held = np.minimum(held, most[steps["worker"]])  # blocks that prompts share count twice
    return time, time * steps["sequences"], time * held, steps["end"] - steps["start"]


def _there(record: RunRecord, spec: ClusterSpec, start: float, end: float) -> Floats:
    """Return the seconds that each pool's engines serve or drain in the window, ``[pools]``."""
    sizes = np.array([pool.engine.worker_size for pool in spec.pools])
    workers = [pool.n // size for pool, size in zip(spec.pools, sizes.tolist(), strict=True)]
    spent = worker_seconds(record, workers, start, max(start, end))
    return np.asarray(spent[:, [READY, DRAINING]].sum(axis=1) * sizes)


def _bottleneck(
    mean_ms: Mapping[str, float],
    use: Mapping[str, float],
    transfers: float,
    batch: float,
    waits: Callable[[str], _Waits | None],
    prompt_len: Ints,
    tokenizing_ms: float,
    handover_ms: float,
    reserves_early: bool,
    link_holds: bool,
) -> tuple[str, str, str | None]:
    """Return what requests wait for longest, why it is that, and the phase in which they wait.

    The last is None where there is no queue. ``transfers``: in progress on a decode worker;
    ``batch``: mean of decode steps; ``waits``: of the engines of a role; ``prompt_len``, [N]: of
    the requests; ``tokenizing_ms``: their mean time in an idle front end; ``handover_ms``: what
    the hand-over to a decode worker takes; ``reserves_early``: prompts have decode blocks first;
    ``link_holds``: most decode blocks are of requests that wait for a shared link."""
    ttft = math.fsum(mean_ms.get(name, 0.0) for name in TTFT_PHASES)
    if mean_ms.get("front end", 0.0) < 2.0 * tokenizing_ms:  # as long as in an idle front end
        names = {"front end": "tokenization"}
        mean_ms = {names.get(name, name): value for name, value in mean_ms.items()}
    long = _waits_of(mean_ms)
    if transfers < 1.0:  # a transfer that has the link to itself waits for none
        long.pop("KV transfer", None)
    phase = max(long, key=long.__getitem__, default="")
    if not phase or long[phase] < _SMALL * ttft:
        return _no_queue(mean_ms, batch)
    wait = f"a request waits {long[phase]:,.{0 if long[phase] >= 100 else 1}f} ms on average"
    if phase == "client's limit":
        return "client", f"{wait} at the client, which limits the requests in flight", phase
    if phase == "front end":
        return "front end", f"{wait} for API servers and their tokenizers", phase
    if phase == "KV load":
        return "KV tiers", f"{wait} for KV blocks from tiers", phase
    if phase == "KV transfer":
        why = f"{wait} for its KV cache; {transfers:.2f} arrive at a worker at once"
        return "link", why, phase
    if phase == "decode admission" and long[phase] < 2.0 * handover_ms:
        return "hand-over", f"{wait} for the hand-over to a decode worker", phase
    found = waits("prefill" if phase == "prefill queue" else "decode")
    if found is None:
        return phase, f"{wait} in engines, which do not note why (the SimPy reference)", phase
    if reserves_early and phase == "prefill queue":  # which may wait for decode blocks instead
        other = waits("decode")
        assert other is not None
        if exact_sum(found.by_cause[1:]) < _SMALL * exact_sum(other.by_cause):
            found = other
    stopped = found.by_cause[1:]
    queued = exact_sum(stopped)
    if min(long[phase], 1e3 * queued / len(prompt_len)) < _SMALL * ttft:
        if long[phase] < _STEPS * 1e3 * found.step_s:
            return _no_queue(mean_ms, batch)
        if queued + float(found.by_cause[0]) < _SEEN * 1e-3 * long[phase] * len(prompt_len):
            why = f"{wait} for a worker to take it: the router holds it, or none is ready"
            return "router", why, phase
        return _no_queue(mean_ms, batch)
    code = 1 + int(np.argmax(stopped))
    if stopped[NO_TOKENS - 1] > _TOO * queued:  # with another place a request would wait for them
        code = int(NO_TOKENS)
    if found.role == "prefill" and stopped[NO_BLOCKS - 1] > _BACK * queued:
        code = int(NO_BLOCKS)  # which decode workers are slow to fetch from
    part = f"{stopped[code - 1] / queued:.0%} of the queueing"
    apart = f"{found.role} " if {"prefill_busy", "decode_busy"} <= use.keys() else ""
    budget = found.engine.max_num_batched_tokens
    if code == NO_SEAT:
        most = found.engine.max_num_seqs
        seats = f"all {most} places of the batch (max_num_seqs) are taken"
        tokens = int(min(budget, most * float(np.mean(prompt_len))))
        if found.role == "prefill" and not _larger_steps_pay(found.engine, tokens, found.step_s):
            why = f"{wait}, {part} while {seats}"
            return "prompt computation", f"{why}; {_NO_FASTER}", phase
        return f"{apart}batch", f"{wait}, {part} while {seats}", phase
    if code == NO_BLOCKS and link_holds:  # more blocks add transfers
        why = f"{wait}, {part} for free KV blocks, which slow transfers hold"
        return "link", f"{why}; {transfers:.2f} arrive at a worker at once", phase
    if code == NO_BLOCKS:
        return f"{apart}KV", f"{wait}, {part} for free KV blocks", phase
    if code == PUT_OFF:
        why = f"{wait}, {part} while the engine's rule puts prompts off"
        return "prompt batching", why, phase
    full = f"{wait}, {part} while the step's {budget:,} tokens (max_num_batched_tokens) are taken"
    long_ones = prompt_len > max(budget, _LONG * np.median(prompt_len))
    if found.alone >= 0.5 and 2 * prompt_len[long_ones].sum() > prompt_len.sum():
        why = f"{full}, {found.alone:.0%} of that by one prompt alone"
        why += f": chunks of prompts of up to {np.max(prompt_len):,} tokens go before all others"
        return "head-of-line prompts", why, phase
    if _larger_steps_pay(found.engine, budget, found.full_s) and long[phase] > 2e3 * found.full_s:
        return "token budget", f"{full}; larger steps would compute more tokens a second", phase
    return "prompt computation", f"{full}; {_NO_FASTER}", phase


def _waits_of(mean_ms: Mapping[str, float]) -> dict[str, float]:
    return {name: mean_ms[name] for name, waits in PHASES.values() if waits and name in mean_ms}


def _larger_steps_pay(engine: EngineSpec, tokens: int, step_s: float) -> bool:
    """Say whether steps twice as large would compute many more tokens a second.

    Two steps become one, which saves what a step takes whatever its tokens are. ``tokens``: of a
    step now; ``step_s``: what it takes."""
    steps = engine.step_time
    tokens = min(tokens, steps.max_model_len, len(steps.cost.mixed_moe_s) - 1)
    if tokens < 2:
        return True
    whole, half = (steps.prefill_s([n], [0]) for n in (tokens, tokens // 2))
    fixed_s = whole - (whole - half) * tokens / (tokens - tokens // 2)
    return fixed_s > _WORTH * 2.0 * step_s


def _no_queue(mean_ms: Mapping[str, float], batch: float) -> tuple[str, str, None]:
    """Say that requests are served at once, and what takes their time."""
    total = math.fsum(mean_ms.values())
    if not total:
        return "none", "no request was served", None
    waiting = math.fsum(_waits_of(mean_ms).values())
    computing = math.fsum(mean_ms.get(name, 0.0) for name in ("first decode step", "decode"))
    uses = {
        f"decoding, in batches of {batch:.1f}": computing,
        "computing its prompt": mean_ms.get("prefill", 0.0),
        "tokenizing its prompt": mean_ms.get("tokenization", 0.0),
    }
    what = max(uses, key=uses.__getitem__)
    share = f"{uses[what] / total:.1%} of a request's time is {what}"
    return "no queue", f"{share}; it waits for {waiting / total:.1%} of its time", None
