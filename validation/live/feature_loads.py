"""Loads that exercise a feature of an engine: shared prefixes, long prompts, conversations."""

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from eldr_sim.traces.requests.arrivals import draw_arrivals
from eldr_sim.traces.streams import stream
from eldr_sim.validation.live.live_run import LoadInfo
from eldr_sim.validation.live.load import Load, LoadRequest, make_load

FeatureLoad = Literal[
    "single prompts", "shared prefixes", "long prompts", "closed loop", "conversations",
    "steady prompts", "crowded loop",
]  # fmt: skip
#: Tokens of the system prompt that all requests of a domain share.
PREFIX = 400
#: Turns of a conversation, and the median of the time to think between them, s.
TURNS, THINK_S = 3, 1.0
#: Of closed loops: requests in flight, and of each slot in all. Long prompts are so few that open
#: arrivals would meet by chance, or not.
CLOSED: dict[FeatureLoad, tuple[int, int]] = {
    "closed loop": (8, 6), "long prompts": (3, 6), "crowded loop": (14, 3),
}  # fmt: skip
#: The steady load of equal prompts takes so many times the duration of the others.
STEADY = 3


class Lengths(NamedTuple):
    """Tokens of a load's requests, in the mean."""

    prompt: int  #: all that is computed where nothing is cached
    output: int
    own: int  #: of the prompt, less what it shares with others


def lengths_of(name: FeatureLoad, prompt_len: int, output_len: int) -> Lengths:
    """Return the lengths of a load, given those of the campaign."""
    if name == "shared prefixes":
        return Lengths(PREFIX + prompt_len, output_len // 2, prompt_len)
    if name == "long prompts":
        return Lengths(1200, output_len // 2, 1200)
    if name == "conversations":
        output = output_len // 2
        mean = prompt_len + (TURNS - 1) / 2 * (prompt_len + output)
        return Lengths(round(mean), output, prompt_len)
    return Lengths(prompt_len, output_len, prompt_len)


def feature_load(
    name: FeatureLoad,
    slices: dict[str, tuple[int, int]],
    *,
    rate: float,
    duration_s: float,
    lengths: Lengths,
    seed: int,
    repeat: int,
    prefix: str,
) -> tuple[Load, int | None]:
    """Make a load; return it and how many requests may be in flight, None for any number.

    ``slices``: of the vocabulary, by domain; ``rate``: requests/s; ``repeat``: repeats are alike
    but for the first token of each prompt, so that none finds another's blocks; ``prefix``: of the
    requests' names.
    """
    slots, per_slot = CLOSED.get(name, (0, 0))
    stretches = STEADY if name == "steady prompts" else 1
    n = slots * per_slot or max(8, round(rate * duration_s * stretches))
    info = LoadInfo(name=name, request_rate=1e6 if slots else rate, burstiness=1.0,
                    lengths="recorded" if name == "single prompts" else "fixed",
                    num_requests=n, seed=seed)  # fmt: skip
    own, output = lengths.own, lengths.output
    load = make_load(
        info, slices, prompt_len=own, output_len=output, prompt_range=(4, 4 * own),
        output_range=(2, 3 * output), prefix=prefix,
    )  # fmt: skip
    if name == "shared prefixes":
        load = _with_prefixes(load, slices, seed)
    elif name == "conversations":
        load = _in_turns(load, rate, seed)
    requests = tuple(
        r if r.parent >= 0 else replace(r, prompt=[slices[r.domain][0] + repeat, *r.prompt[1:]])
        for r in load.requests
    )
    return Load(load.info, requests), slots or None


def _with_prefixes(load: Load, slices: dict[str, tuple[int, int]], seed: int) -> Load:
    """Put the system prompt of its domain before each prompt."""
    shared = {
        name: stream(seed, f"live prefix:{name}").integers(*ids, size=PREFIX).tolist()
        for name, ids in slices.items()
    }
    requests = tuple(replace(r, prompt=shared[r.domain] + r.prompt) for r in load.requests)
    return Load(load.info, requests)


def _in_turns(load: Load, rate: float, seed: int) -> Load:
    """Let every so-manieth request begin a conversation, with which the next ones go on."""
    n = len(load.requests) // TURNS
    begin = draw_arrivals(rate / TURNS, 1.0, None, n, seed)
    think = stream(seed, "live thinking").lognormal(np.log(THINK_S), 0.5, size=n * TURNS)
    requests: list[LoadRequest] = []
    for i, request in enumerate(load.requests[: n * TURNS]):
        first = requests[-1] if i % TURNS else request
        requests.append(
            replace(
                request,
                domain=first.domain,
                send_s=float(begin[i // TURNS]),
                parent=i - 1 if i % TURNS else -1,
                gap_s=float(think[i]) if i % TURNS else 0.0,
            )
        )
    info = load.info.model_copy(update={"num_requests": len(requests)})
    return Load(info, tuple(requests))
