"""Calibration sets: the requests on which a routing policy is fitted before it serves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Bools, Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.texts import resolve_domain_mix
from eldr_sim.traces.routing.coactivation import Tokens, coactivation
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import GateScores, PromptScore, of_kind, select
from eldr_sim.traces.routing.structure import transitions


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Requests of the calibration split, never served: what an offline fit may see."""

    #: uint16 or uint32 ``[n, layers, experts]``: ``c_r(l, e)`` of ELDR Sec. 4.2; None: decode-only.
    counts: NDArray[np.uint16] | NDArray[np.uint32] | None
    #: float32 ``[n, layers, experts]``: ``p_i(l, e)`` of ELDR Sec. 4.2.1.
    decode_activation: NDArray[np.float32]
    domain: NDArray[np.int16]  #: int16 ``[n]``, index into `domains`
    domains: list[str]  #: domain names of the trace
    #: int64 ``[n]``, indices into the trace that holds the calibration split.
    requests: Ints
    trace_checksum: str  #: checksum of the trace's experts, to tell what a fit was made on
    gate_scores: GateScores | None = None  #: the trace's gate scores, or None where it carries none
    #: The trace that the requests are of, for what is counted when first asked for; or None.
    trace: RoutingTrace | None = field(default=None, repr=False)
    pieces: int = 1  #: pieces that each recorded request was cut into, as there were too few

    def coactivation(self, tokens: Tokens = "all") -> Ints:
        """Return how many tokens chose each pair of experts (`coactivation.coactivation`), counted
        once.

        Raises InputError if no trace is known, or it does not record these tokens."""
        return _counted(coactivation, self, tokens)

    def transitions(self, tokens: Tokens = "all") -> Ints:
        """Return `structure.transitions`, counted once; raises InputError as `coactivation`."""
        return _counted(transitions, self, tokens)

    def scores(self, kind: PromptScore) -> Array:
        """Return `counts`, or summed gate scores ``prob`` or ``logit``; raises InputError."""
        if kind != "count":
            return select(self.gate_scores, self.requests, kind)
        if self.counts is None:
            problem = "the trace has no experts of prompt tokens, which signatures need"
            allowed = "a trace with prompt rows, or a policy without signatures"
            raise InputError("trace", problem, allowed)
        return self.counts


def calibration_requests(
    trace: RoutingTrace,
    workload: str,
    domain_mix: Mapping[str, float] | None = None,
    score: PromptScore = "count",
) -> Ints:
    """Return the requests that `calibration_set` picks, in order; raises InputError as it does."""
    shares, _ = resolve_domain_mix(trace.texts, workload, domain_mix)
    trace = trace.for_calibration
    pools = {name: trace.requests_of([name], calibration=True) for name in shares}
    if score != "count":
        covered, _ = of_kind(trace.gate_scores, score)
        pools = {name: np.intersect1d(pool, covered) for name, pool in pools.items()}
    empty = [name for name, pool in pools.items() if not len(pool)]
    if empty and (score != "count" or len(empty) == len(pools)):
        which = "" if score == "count" else f" with gate scores ({score})"
        problem = f"{trace.path.name} has no calibration request{which} of domain {empty[0]!r}"
        raise InputError("trace", problem)
    pools = {name: pool for name, pool in pools.items() if len(pool)}
    # 1e-9 keeps a quotient that should be whole from falling one short.
    total = min(int(len(pool) / shares[name] + 1e-9) for name, pool in pools.items())
    taken = {
        name: min(len(pool), max(1, int(total * shares[name] + 0.5)))
        for name, pool in pools.items()
    }
    return np.sort(np.concatenate([pool[: taken[name]] for name, pool in pools.items()]))


def calibration_set(
    trace: RoutingTrace,
    *,
    workload: str,
    domain_mix: Mapping[str, float] | None = None,
    score: PromptScore = "count",
    at_least: int = 1,
) -> CalibrationSet:
    """Pick calibration requests in proportion to a workload's domain mix.

    Of N requests, domain d gives the first ``round(N share_d)``, at least one, with the largest N
    that no domain runs out of. A domain without calibration requests is left out: a router in
    production meets such domains, too.

    Args:
        trace: a recorded or drawn trace.
        workload: a named workload, ``trace``, or a log.
        domain_mix: weights of domains; None: those of the workload.
        score: pick only requests with this gate score.
        at_least: if there are fewer requests, each is cut into the smallest number of equal pieces
            that reaches this number. A piece is a run of a request's tokens, divided into prompt
            and answer as the request is.

    Returns:
        Requests of the calibration split that an offline fit may use.

    Raises:
        InputError: the mix is invalid, no domain of it has a calibration request, or one lacks the
            gate scores.
    """
    requests = calibration_requests(trace, workload, domain_mix, score)
    trace = trace.for_calibration
    pieces = -(-at_least // len(requests)) if trace.has_prompts and score == "count" else 1
    if pieces > 1 and int(trace.recorded_rows(requests)[1].min()) >= 2 * pieces:
        trace, requests = _cut(trace, requests, pieces), np.arange(len(requests) * pieces)
    else:
        pieces = 1
    return CalibrationSet(
        counts=trace.prompt_counts(requests) if trace.has_prompts else None,
        decode_activation=trace.decode_activation(requests),
        domain=trace.domain[requests],
        domains=list(trace.domains),
        requests=requests,
        trace_checksum=trace.manifest.checksum,
        gate_scores=trace.gate_scores,
        trace=trace,
        pieces=pieces,
    )


def _cut(trace: RoutingTrace, requests: Ints, pieces: int) -> RoutingTrace:
    """Return a trace of equal pieces of some requests, all of the calibration split."""
    first, rows = trace.recorded_rows(requests)
    starts = rows[:, None] * np.arange(pieces + 1) // pieces
    length = np.diff(starts, axis=1).ravel()
    share = np.repeat(trace.prompt_len[requests] / rows, pieces)
    prompt_len = np.clip(np.rint(length * share), 1, length - 1).astype(np.int32)
    return replace(
        trace,
        domain=np.repeat(trace.domain[requests], pieces),
        prompt_len=prompt_len,
        output_len=(length - prompt_len).astype(np.int32),
        first_row=(first[:, None] + starts[:, :-1]).ravel(),
        session=np.repeat(trace.session[requests], pieces),
        is_calibration=np.ones(len(length), np.bool_),
        gate_scores=None,
    )


@lru_cache(maxsize=16)
def _counted(
    count: Callable[[RoutingTrace, Ints, Tokens], Ints], calibration: CalibrationSet, tokens: Tokens
) -> Ints:
    if calibration.trace is None:
        raise InputError("calibration", "there is no trace to count pairs of experts in", "a trace")
    found = count(calibration.trace, calibration.requests, tokens)
    found.flags.writeable = False
    return found


def check_fraction(fraction: float) -> None:
    """Raise InputError if the calibration split's share is not between 0 and 1."""
    if not 0 < fraction < 1:
        raise InputError("calibration_fraction", f"got {fraction}", "a number between 0 and 1")


def split_calibration(domain: Sequence[str], fraction: float) -> Bools:
    """Return which requests of a new trace are its calibration split, bool ``[requests]``: the
    first ``fraction`` of each domain, at least one of two, so that neighbours mostly fall on one
    side."""
    labels = np.array(domain)
    calibration = np.zeros(len(labels), dtype=bool)
    for name in np.unique(labels):
        mine = np.flatnonzero(labels == name)
        take = int(len(mine) * fraction + 0.5)
        if len(mine) > 1:
            take = min(max(take, 1), len(mine) - 1)
        calibration[mine[:take]] = True
    return calibration
