"""Calibration sets: the requests on which a routing policy is fitted before it serves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.texts import resolve_domain_mix
from eldr_sim.traces.routing.coactivation import Tokens, coactivation
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import GateScores, PromptScore, of_kind, select
from eldr_sim.traces.routing.structure import transitions


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Requests of the calibration split, never served: what an offline fit may see."""

    #: uint16 or uint32 ``[n, layers, experts]``: how often the prompt tokens chose each expert,
    #: ``c_r(l, e)`` of ELDR Sec. 4.2; None where the trace is decode-only.
    counts: NDArray[np.uint16] | NDArray[np.uint32] | None
    #: float32 ``[n, layers, experts]``: fraction of decode steps that chose each expert, ``p_i(l,
    #: e)`` of ELDR Sec. 4.2.1.
    decode_activation: NDArray[np.float32]
    domain: NDArray[np.int16]  #: int16 ``[n]``, index into `domains`
    domains: list[str]  #: domain names of the trace
    #: int64 ``[n]``, indices into the trace that holds the calibration split.
    requests: NDArray[np.int64]
    trace_checksum: str  #: checksum of the trace's experts, to tell what a fit was made on
    gate_scores: GateScores | None = None  #: the trace's gate scores, or None where it carries none
    #: The trace that the requests are of, for what is counted when first asked for; or None.
    trace: RoutingTrace | None = field(default=None, repr=False)

    def coactivation(self, tokens: Tokens = "all") -> NDArray[np.int64]:
        """Return how many tokens chose each pair of experts, ``[layers, experts, experts]``.

        Counted once; see :func:`~eldr_sim.traces.routing.coactivation.coactivation`.

        Raises InputError if no trace is known, or it does not record these tokens.
        """
        return _counted(coactivation, self, tokens)

    def transitions(self, tokens: Tokens = "all") -> NDArray[np.int64]:
        """Return how many tokens chose each pair of neighbouring layers' experts.

        Counted once; see `traces.routing.structure.transitions`; raises InputError as
        `coactivation`.
        """
        return _counted(transitions, self, tokens)

    def scores(self, kind: PromptScore) -> NDArray[Any]:
        """Return `counts`, or the summed gate scores ``prob`` or ``logit`` of the requests.

        Raises InputError if the trace does not carry the gate's scores of all of the requests, or
        no prompts.
        """
        if kind != "count":
            return select(self.gate_scores, self.requests, kind)
        if self.counts is None:
            problem = "it is decode-only: no experts of prompt tokens, which signatures are made of"
            allowed = "a trace with prompt rows, or a policy without signatures"
            raise InputError("trace", problem, allowed)
        return self.counts


def calibration_set(
    trace: RoutingTrace,
    *,
    workload: str,
    domain_mix: Mapping[str, float] | None = None,
    score: PromptScore = "count",
) -> CalibrationSet:
    """Pick calibration requests in proportion to a workload's domain mix, each once.

    Of N requests, domain d gives the first ``round(N share_d)`` in trace order, at least one, with
    the largest N at which no domain runs out.

    Raises InputError if the mix is not valid, a domain in it has no calibration request (with the
    score), or the trace carries no such score at all.

    ``workload``, ``domain_mix``: as for `Load`; ``score``: with ``prob`` or ``logit``, only
    requests that have this gate score are picked: a trace may carry it for a part of the split.
    """
    shares, _ = resolve_domain_mix(trace.texts, workload, domain_mix)
    trace = trace.for_calibration
    pools = {name: trace.requests_of([name], calibration=True) for name in shares}
    if score != "count":
        covered, _ = of_kind(trace.gate_scores, score)
        pools = {name: np.intersect1d(pool, covered) for name, pool in pools.items()}
    empty = [name for name, pool in pools.items() if not len(pool)]
    if empty:
        which = "" if score == "count" else f" with gate scores ({score})"
        problem = f"{trace.path.name} has no calibration request{which} of domain {empty[0]!r}"
        raise InputError("trace", problem)
    # 1e-9 keeps a quotient that should be whole from falling one short.
    total = min(int(len(pool) / shares[name] + 1e-9) for name, pool in pools.items())
    taken = {
        name: min(len(pool), max(1, int(total * shares[name] + 0.5)))
        for name, pool in pools.items()
    }
    requests = np.concatenate([pool[: taken[name]] for name, pool in pools.items()])
    requests.sort()
    return CalibrationSet(
        counts=trace.prompt_counts(requests) if trace.has_prompts else None,
        decode_activation=trace.decode_activation(requests),
        domain=trace.domain[requests],
        domains=list(trace.domains),
        requests=requests,
        trace_checksum=trace.manifest.checksum,
        gate_scores=trace.gate_scores,
        trace=trace,
    )


@lru_cache(maxsize=16)
def _counted(
    count: Callable[[RoutingTrace, NDArray[np.int64], Tokens], NDArray[np.int64]],
    calibration: CalibrationSet,
    tokens: Tokens,
) -> NDArray[np.int64]:
    if calibration.trace is None:
        raise InputError("calibration", "no trace to count pairs of experts in", "a trace")
    found = count(calibration.trace, calibration.requests, tokens)
    found.flags.writeable = False
    return found


def check_fraction(fraction: float) -> None:
    """Raise InputError if the calibration split's share is not between 0 and 1."""
    if not 0 < fraction < 1:
        raise InputError("calibration_fraction", f"got {fraction}", "a number between 0 and 1")


def split_calibration(domain: Sequence[str], fraction: float) -> NDArray[np.bool_]:
    """Return which requests of a new trace become its calibration split, bool ``[requests]``.

    The first ``fraction`` of each domain, so that neighbours, which may be cut from one document,
    mostly fall on one side. Each split gets at least one request of a domain that has two.
    """
    labels = np.array(domain)
    calibration = np.zeros(len(labels), dtype=bool)
    for name in np.unique(labels):
        mine = np.flatnonzero(labels == name)
        take = int(len(mine) * fraction + 0.5)
        if len(mine) > 1:
            take = min(max(take, 1), len(mine) - 1)
        calibration[mine[:take]] = True
    return calibration
