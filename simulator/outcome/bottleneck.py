"""What limits a cluster: where requests wait, and how busy what they wait for is."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from eldr_sim.arrays import Bools, Floats, Records
from eldr_sim.simulator.control.record import DRAINING, READY, RunRecord
from eldr_sim.simulator.outcome.sums import exact_sum, exact_sums, in_parts
from eldr_sim.simulator.outcome.worker_hours import worker_seconds
from eldr_sim.simulator.plane.state import AFTER_WINDOW, COMPLETED, OPEN, OUTCOMES, OVERLOADED
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec

#: By the time that ends it: what a request does until then. It waits in those marked.
PHASES: dict[str, tuple[str, bool]] = {
    "sent_s": ("client's limit", True),
    "tokenized_s": ("front end", True),
    "load_start_s": ("prefill queue", True),
    "prefill_start_s": ("KV load", True),
    "prefill_end_s": ("prefill", False),
    "transfer_start_s": ("decode admission", True),
    "transfer_end_s": ("KV transfer", True),
    "decode_start_s": ("decode queue", True),
    "first_token_s": ("first decode step", False),
    "finish_s": ("decode", False),
}
#: Places that not every run has, and when a request of one without them passes them.
WITHOUT = {"tokenized_s": "sent_s", "load_start_s": "prefill_start_s"}
_IN_LINE = (OPEN, COMPLETED, AFTER_WINDOW, OVERLOADED)
#: Outcomes of requests that were served, or waited for it when the run ended. The others were
#: refused, gave up or lost their worker: they wait for nothing from then on.
IN_LINE = tuple(OUTCOMES[code] for code in _IN_LINE)
#: Before the first token; a TTFT counts from when the client has sent the request.
TTFT_PHASES = tuple(name for name, _ in PHASES.values() if name not in ("client's limit", "decode"))
_STEPS = 3.0  # within which a request joins where there is room: it comes during one, and vLLM
#               schedules one ahead
_SMALL = 0.1  # of a mean TTFT: no wait that is worth a name


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
        known = np.nan_to_num(times[key], nan=-1.0) >= 0.0 if key in times else None
        if known is None:
            spent[names[place - 1]] = np.zeros(len(here))
            continue
        at = np.where(known, times[key], here)
        spent[names[place - 1]] = at - here
        here, last = at, np.where(known, place, last)
    waiting_in[~ended] = np.minimum(last, len(names) - 1)[~ended]
    for place, name in enumerate(names):
        left = np.maximum(until_s - here, 0.0)  # a step may give its token later
        spent[name] = spent[name] + np.where(waiting_in == place, left, 0.0)
    return spent


def load_growth(
    arrival_s: Floats, finish_s: Floats, window: tuple[float, float]
) -> dict[str, float] | None:
    """Count who came and who ended in the window, ``[N]`` times in s, behind the 90th percentile of
    the lives that ended. None where nobody ended (negative or NaN), or the window is over
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


def limits_of(record: RunRecord, spec: ClusterSpec) -> dict[str, Any]:
    """Return the figures ``limits`` of a summary: phases, utilisation, and the bottleneck.

    ``utilisation``: means over the measured window: worker-time in steps, running requests (of
    ``max_num_seqs``), KV blocks' tokens of the decode batch (shared ones count for each, up to all
    there are); ``kv_transfers``: in progress on a decode worker. Phases are of requests that were
    not refused, did not give up and did not lose their worker."""
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
    step_ms = 0.0
    there = _there(record, spec, start, end)
    decodes = np.array([pool.decodes for pool in spec.pools])
    windows = spec.block_size * float(np.mean(requests["window_blocks"])) if len(requests) else 0.0
    for role, steps, seconds in (
        ("prefill", record.prefill_steps, there * ~decodes),
        ("decode", record.decode_steps, there * decodes),
    ):
        if not seconds.any():
            continue
        of = None if role == "prefill" else windows
        sums = exact_sums(_use(spec, part, start, end, of) for part in in_parts(steps))
        use[f"{role}_busy"] = sums[0] / float(seconds.sum())
        if role == "decode":
            step_ms = 1e3 * sums[3] / max(1, len(steps))
            seats = seconds @ [pool.engine.max_num_seqs for pool in spec.pools]
            use["decode_seats"] = sums[1] / float(seats)
            room = seconds @ [pool.engine.n_blocks for pool in spec.pools] * spec.block_size
            use["decode_kv"] = sums[2] / float(room)
    moved = requests[requests["transfer_start_s"] >= 0.0]
    if len(moved) and spec.n_decode and end > start:
        done = np.where(moved["transfer_end_s"] >= 0.0, moved["transfer_end_s"], record.end_s)
        time = np.clip(done, start, end) - np.clip(moved["transfer_start_s"], start, end)
        use["kv_transfers"] = _share(time, (there * decodes).sum())
    name, why = _bottleneck(mean_ms, use, step_ms)
    return {"bottleneck": name, "because": why, "mean_phase_ms": mean_ms, "utilisation": use}


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


def _share(values: Floats, whole: float) -> float:
    return exact_sum(values) / whole


def _bottleneck(
    mean_ms: Mapping[str, float], use: Mapping[str, float], step_ms: float
) -> tuple[str, str]:
    """Return what requests wait for longest, and why it is that."""
    ttft = math.fsum(mean_ms.get(name, 0.0) for name in TTFT_PHASES)
    waits = {name: mean_ms[name] for name, waits in PHASES.values() if waits and name in mean_ms}
    if use.get("kv_transfers", 0.0) < 1.0:  # a transfer that has the link to itself waits for none
        waits.pop("KV transfer", None)
    phase = max(waits, key=waits.__getitem__, default="")
    if not phase or waits[phase] < _SMALL * ttft:
        if use.get("decode_busy", 0.0) == 0.0:
            return "none", "no request waits"
        return "decode steps", (
            f"no request waits for a tenth of its TTFT; decode workers compute for "
            f"{use['decode_busy']:.0%} of the time"
        )
    wait = f"a request waits {waits[phase]:,.{0 if waits[phase] >= 100 else 1}f} ms on average"
    if phase == "client's limit":
        return "client", f"{wait} at the client, which limits the number in flight"
    if phase == "front end":
        return "front end", f"{wait} for API servers and their tokenizers"
    if phase == "prefill queue" and "prefill_busy" in use:
        return "prefill queue", f"{wait}; prefill workers are busy for {use['prefill_busy']:.0%}"
    if phase == "KV load":
        return "KV tiers", f"{wait} for KV blocks from tiers"
    if phase == "KV transfer":
        return (
            "link",
            f"{wait} for its KV cache; {use['kv_transfers']:.2f} come to a worker at once",
        )
    seats, blocks = use.get("decode_seats", 0.0), use.get("decode_kv", 0.0)
    full = f"the batch fills {seats:.0%} of max_num_seqs and {blocks:.0%} of the KV cache"
    if waits[phase] < _STEPS * step_ms:
        return "decode steps", f"{wait} for a step that it can join; {full}"
    return ("decode KV" if blocks >= seats else "decode batch"), f"{wait} to be let in; {full}"
