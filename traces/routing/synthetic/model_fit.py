"""Fitting a `RoutingModel` to a trace.

Kinds are clusters of its tokens (`token_kinds`), topics its requests, drift directions are found
beforehand (`drift_factors`). The rest is matched by simulation: draw a twin of the trace (the same
topics and lengths), count both alike, correct every parameter by its own statistic, and repeat:
``kinds`` by the share of a kind's tokens that chose an expert; ``topics`` by that of each part of a
request, as far as it lasts (`_Between`); ``phase`` by that of prompts and of generated tokens;
``reuse`` by the share of a token's experts that the token before chose; ``drift_sd`` by how that
falls from 2 to 16 tokens apart, and from 16 to 64. What a single request adds comes last, by
the share of the variance beyond 16 components."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.kinds import Progress, no_progress
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.spectrum import principal_components
from eldr_sim.traces.routing.synthetic.drift_factors import drift_factors
from eldr_sim.traces.routing.synthetic.model import RoutingModel
from eldr_sim.traces.routing.synthetic.moments import Requests
from eldr_sim.traces.routing.synthetic.sampler import sample_kinds_and_experts
from eldr_sim.traces.routing.synthetic.token_kinds import count_groups, token_kinds

TOPICS = 256  #: most requests to fit, the same share of every domain; each makes a topic
KINDS = 64  #: most kinds of tokens
TOKENS = 1 << 17  #: tokens to fit; of longer requests those next to the prompt's end are taken
PARTS = 4  #: parts of a topic: requests of a cluster turn alike on the way
#: Standard deviation of what a request adds of its own to log weights, as of six halves of
#: gpt-oss-20b's recording: for recordings of fewer long requests than `MANY`, which cannot say.
OWN = 0.33
MANY = 64
LONG = 64  #: fewest tokens of a request whose parts are compared, as in `request_spectrum`
#: Twins to draw. Later corrections are smaller, so that the noise of the twins averages out.
ROUNDS = 10

#: Tokens of the whole trace that are added to a group's when its shares are taken.
_PRIOR_TOKENS = 4.0
#: The same for a request's: real passages leave many experts wholly unused.
_TOPIC_PRIOR_TOKENS = 1.0
_EDGE = 0.5  #: least eigenvalue of a direction in which requests differ, in those of chance
_COMPONENTS = 48  #: most of these directions
_LEFT_OUT = 0.15  #: share of the usual tokens below which a request leaves an expert out
_LAGS = (1, 2, 16, 64)


def requests_of(trace: RoutingTrace) -> Requests:
    """Return where all requests of a trace lie."""
    return Requests(
        domain=trace.domain.astype(np.int64),
        first_row=trace.first_row.astype(np.int64),
        prompt_len=trace.prompt_len.astype(np.int64),
        output_len=trace.output_len.astype(np.int64),
    )


def _thinned(requests: Requests, most: int) -> Requests:
    """Return at most so many of the requests, the same share of every domain."""
    n = len(requests.domain)
    if n <= most:
        return requests
    rank = np.empty(n)
    for d in np.unique(requests.domain):
        mine = np.flatnonzero(requests.domain == d)
        rank[mine] = (np.random.default_rng(0).permutation(len(mine)) + 0.5) / len(mine)
    # A domain of few requests keeps one.
    kept = np.sort(np.argsort(rank, kind="stable")[:most])
    lacking = np.setdiff1d(requests.domain, requests.domain[kept])
    extra = [int(np.flatnonzero(requests.domain == d)[0]) for d in lacking]
    kept = np.sort(np.concatenate([kept, np.array(extra, np.int64)]))
    return Requests(*(getattr(requests, f.name)[kept] for f in fields(Requests)))


@dataclass(frozen=True, eq=False)
class _Real:
    """The tokens that a model is fitted to, and their statistics."""

    ids: NDArray[np.uint16]
    prompt_len: Ints
    output_len: Ints
    domain: Ints
    kind: Ints
    n_experts: int

    @property
    def request(self) -> Ints:
        return np.repeat(np.arange(len(self.domain)), self.prompt_len + self.output_len)

    @property
    def part(self) -> Ints:
        """Which part of its request a token is of."""
        length = self.prompt_len + self.output_len
        place = np.arange(len(self.ids)) - np.repeat(np.cumsum(length) - length, length)
        return np.asarray(place * PARTS // length.repeat(length), dtype=np.int64)

    @property
    def long(self) -> Ints:
        """Requests with parts long enough to be counted; all where those are too few."""
        length = self.prompt_len + self.output_len
        found = np.flatnonzero(length >= LONG)
        return found if len(found) >= 8 else np.arange(len(length))

    @property
    def phase(self) -> Ints:
        lengths = np.stack([self.prompt_len, self.output_len], axis=1).ravel()
        return np.tile(np.arange(2), len(self.domain)).repeat(lengths)

    def counts(self, ids: Array, group: Ints, groups: int) -> Floats:
        return count_groups(ids, group, groups, self.n_experts)


def fit_routing_model(
    trace: RoutingTrace,
    *,
    seed: int = 0,
    rounds: int | None = None,
    progress: Progress = no_progress,
) -> RoutingModel:
    """Fit a generative model to requests of a trace, of both splits, by ``rounds`` twins; ``seed``:
    of clusters and twins. Raises InputError if a domain has no request, or the trace no prompt
    rows."""
    trace.require_prompts("synthetic models")
    absent = np.setdiff1d(np.arange(len(trace.domains)), trace.domain)
    if len(absent):
        name = trace.domains[int(absent[0])]
        raise InputError("trace", f"domain {name!r} has no request", "one or more")
    rounds = ROUNDS if rounds is None else rounds
    real = _real(trace, seed)
    two_phases = trace.manifest.prompt_share is None
    model = _first_guess(trace, real)
    aims = _Statistics.of(real, real.ids, real.kind)
    between = _Between.of(aims)
    lasting = np.ones(1 + len(between.directions))
    for turn in range(rounds):
        progress(turn / rounds)
        kind, ids = _twin(model, real, seed + 1 + turn)
        drawn = _Statistics.of(real, ids, kind)
        step = min(1.0, 3 / (turn + 1))
        lasting = between.corrected(lasting, drawn, step)
        aim = replace(aims, topics=between.aim(aims.topics, lasting))
        model = _corrected(model, aim, drawn, step, two_phases)
    progress(1.0)
    return replace(model, own=_own(model, real, aims, seed + 1 + rounds))


def _real(trace: RoutingTrace, seed: int) -> _Real:
    requests = _thinned(requests_of(trace), TOPICS)
    most = TOKENS // (2 * len(requests.domain))
    prompt = np.minimum(requests.prompt_len, most)
    output = np.minimum(requests.output_len, most)
    first = requests.first_row + requests.prompt_len - prompt
    rows = np.concatenate(
        [
            np.arange(a, a + n)
            for a, n in zip(first.tolist(), (prompt + output).tolist(), strict=True)
        ]
    )
    ids = np.ascontiguousarray(trace.experts[rows], dtype=np.uint16)
    kind = token_kinds(ids, trace.n_experts, KINDS, seed)
    return _Real(ids, prompt, output, requests.domain, kind, trace.n_experts)


def _own(model: RoutingModel, real: _Real, aims: "_Statistics", seed: int) -> Floats:
    """Return ``own``: from what two twins, without and with `OWN`, have in few components."""
    if len(real.long) < MANY:
        return np.array(OWN)
    tried = [replace(model, own=np.array(own)) for own in (0.0, OWN)]
    twins = [
        _Statistics.of(real, twin[1], twin[0]) for m in tried for twin in [_twin(m, real, seed)]
    ]
    want, without, with_own = (_in_few(each.pairs) for each in (aims, *twins))
    # What it adds to the variance grows with its square.
    share = (without - want) / max(without - with_own, 1e-3)
    return np.array(OWN * math.sqrt(min(max(share, 0.0), 2.0)))


def _in_few(pairs: Floats) -> float:
    """Return the share of 16 components in what neighbouring parts of requests have in common."""
    about = pairs - pairs.mean(axis=2, keepdims=True)
    values, _ = principal_components(about.reshape(2, -1, *pairs.shape[3:]))
    return float(values[:16].sum() / values.sum())


def _twin(model: RoutingModel, real: _Real, seed: int) -> tuple[Ints, Array]:
    every = np.arange(len(real.domain))
    return sample_kinds_and_experts(model, every, real.prompt_len, real.output_len, seed)


def _log_weight(share: Floats) -> Floats:
    """Return the log weights at which experts are chosen by given shares of the tokens: an
    exponential race over a unit of time picks expert e with chance ``1 - exp(-w_e)``."""
    return np.asarray(np.log(-np.log1p(-np.clip(share, 1e-5, 0.97))))


def _slope(share: Floats) -> Floats:
    """Return the derivative of the probability ``1 - exp(-w)`` by log w, at a probability."""
    return np.asarray(-np.log1p(-share) * (1 - share))


@dataclass(frozen=True, eq=False)
class _Statistics:
    """What corrections compare: shares ``[groups, layers, experts]``, those of ``topics`` part by
    part, the same of long requests' neighbouring parts, ``pairs [2, PARTS - 1, requests, layers,
    experts]``, and reuse by distance."""

    kinds: Floats
    topics: Floats
    pairs: Floats
    phase: Floats
    reuse: Floats

    @classmethod
    def of(cls, real: _Real, ids: Array, kind: Ints) -> "_Statistics":
        """Measure the real tokens or a twin's; groups of equal size, that of the real tokens."""
        ids = np.ascontiguousarray(ids, dtype=np.uint16)
        total = real.counts(real.ids, np.zeros(len(real.ids), np.int64), 1) / len(real.ids)
        n_kinds = int(real.kind.max()) + 1

        def shares(group: Ints, like: Ints, n: int, prior: float) -> Floats:
            size = np.bincount(like, minlength=n)[:, None, None]
            scale = size / np.maximum(np.bincount(group, minlength=n), 1)[:, None, None]
            counts = real.counts(ids, group, n) * scale + prior * total
            return np.asarray(counts / (size + prior))

        reuse = np.zeros((len(_LAGS), ids.shape[1]))
        for i, lag in enumerate(_LAGS):
            pairs = _shared(ids, real.request, lag, reuse[i])
            reuse[i] = reuse[i] / (pairs * ids.shape[2]) if pairs else np.nan
        request, n_requests = real.request, len(real.domain)
        part, parts = PARTS * request + real.part, PARTS * n_requests
        shape = (n_requests, PARTS, ids.shape[1], real.n_experts)
        size = np.maximum(np.bincount(part, minlength=parts), 1)[:, None, None]
        plain = (real.counts(ids, part, parts) / size).reshape(shape)[real.long].swapaxes(0, 1)
        return cls(
            pairs=np.stack([plain[:-1], plain[1:]]),
            kinds=shares(kind, real.kind, n_kinds, _PRIOR_TOKENS),
            topics=shares(part, part, parts, _TOPIC_PRIOR_TOKENS).reshape(shape),
            phase=shares(real.phase, real.phase, 2, _PRIOR_TOKENS),
            reuse=reuse,
        )


def _first_guess(trace: RoutingTrace, real: _Real) -> RoutingModel:
    statistics = _Statistics.of(real, real.ids, real.kind)
    n_kinds, request, kind = len(statistics.kinds), real.request, real.kind
    in_request = np.zeros((len(real.domain), n_kinds))
    np.add.at(in_request, (request, kind), 1)
    size = in_request.sum(axis=1, keepdims=True)
    base = in_request.sum(axis=0) / size.sum()
    topic_kinds = (in_request + 2 * _PRIOR_TOKENS * base) / (size + 2 * _PRIOR_TOKENS)
    follows = request[1:] == request[:-1]
    succeeded = np.zeros((n_kinds, n_kinds))
    np.add.at(succeeded, (kind[:-1][follows], kind[1:][follows]), 1)
    by_chance = np.einsum("ra,rb->ab", topic_kinds * (size - 1), topic_kinds)
    expected = np.tensordot(in_request / size, statistics.kinds, 1)
    kinds = _log_weight(statistics.kinds).transpose(1, 0, 2)
    of_domain = np.eye(len(trace.domains))[real.domain].T
    about = trace.manifest
    return RoutingModel(
        top_k=trace.top_k,
        domains=list(trace.domains),
        kinds=kinds,
        succession=(succeeded + 2) / (by_chance + 2),
        phase=np.zeros((2, trace.n_layers, trace.n_experts)),
        topics=_log_weight(statistics.topics) - _log_weight(expected)[:, None],
        topic_kinds=topic_kinds,
        topic_tokens=real.prompt_len + real.output_len,
        domain_topics=of_domain / of_domain.sum(axis=1, keepdims=True),
        loadings=drift_factors(real.ids, kind, statistics.kinds, real.prompt_len + real.output_len),
        drift_sd=np.array([0.9, 0.6]),
        drift_tokens=np.array([6.0, 64.0]),
        reuse=np.full(trace.n_layers, 0.5),
        own=np.zeros(()),
        prompt_only=np.zeros(()),
        facts={
            "model": about.model,
            "source": f"fitted to {len(real.ids):,} recorded tokens of {about.model} "
            f"({trace.path.name.replace('_', '-')}, {about.provenance}, checksum "
            f"{about.checksum[:12]})",
            "prompt_len": round(float(trace.prompt_len.mean())),
            "output_len": round(float(trace.output_len.mean())),
        },
    )


def _corrected(
    model: RoutingModel, aims: _Statistics, drawn: _Statistics, step: float, two_phases: bool
) -> RoutingModel:
    """Move every parameter by the difference in its own statistic."""

    def gap(want: Floats, have: Floats) -> Floats:
        # Newton's step, linear in what was drawn: a rare expert's logarithm is too low on average.
        share = np.clip(want, 1e-5, 0.97)
        return np.clip((share - np.clip(have, 1e-5, 0.97)) / _slope(share), -2.0, 1.0)

    kinds = model.kinds + step * gap(aims.kinds, drawn.kinds).transpose(1, 0, 2)
    topics = model.topics + 0.7 * step * gap(aims.topics, drawn.topics)
    phase = model.phase
    if two_phases:
        phase = phase + 0.7 * step * gap(aims.phase, drawn.phase)
        phase = phase - phase.mean(axis=0)
    return replace(
        model,
        kinds=kinds,
        topics=topics - topics.mean(axis=0),
        phase=phase,
        reuse=np.clip(
            model.reuse + step * (_odds(aims.reuse[0]) - _odds(drawn.reuse[0])), -3.0, 8.0
        ),
        drift_sd=model.drift_sd * _drift_ratio(aims.reuse, drawn.reuse) ** (0.5 * step),
    )


@dataclass(frozen=True, eq=False)
class _Between:
    """What requests differ by, and how much of it lasts for a whole request: principal components
    of the covariance of neighbouring parts, which share no chance or drift, with a factor on each,
    corrected until twins vary as much."""

    mean: Floats  #: ``[PARTS, layers, experts]``: mean share over requests
    directions: Floats  #: ``[components, layers, experts]``, unit vectors
    variance: Floats  #: ``[1 + components]``: variance beyond the directions, and along each

    @classmethod
    def of(cls, statistics: _Statistics) -> "_Between":
        """Find the directions of the real requests, as far as they stand out of the noise."""
        mean = statistics.topics.mean(axis=0)
        pairs = statistics.pairs - statistics.pairs.mean(axis=2, keepdims=True)
        values, vectors = principal_components(pairs.reshape(2, -1, *mean.shape[1:]))
        # Chance is as often below zero as above it.
        edge = max(_EDGE * -float(values.min(initial=0.0)), 1e-9 * float(values.max(initial=0.0)))
        kept = np.flatnonzero(values > edge)[:_COMPONENTS]
        directions = vectors[kept].reshape(-1, *mean.shape[1:])
        return cls(mean, directions, _variances(statistics.pairs, directions))

    def corrected(self, lasting: Floats, drawn: _Statistics, step: float) -> Floats:
        """Correct the factors by the variances of a twin.

        In short requests both parts drift alike, in separate directions: what twins vary
        beyond the real directions is taken from those, so that all in all they vary as much."""
        have = _variances(drawn.pairs, self.directions)
        want = self.variance.copy()
        if len(want) > 1:
            want[1:] *= np.clip((want.sum() - have[0]) / want[1:].sum(), 0.25, 1.5)
        ratio = np.clip(np.maximum(want, 1e-6) / np.maximum(have, 1e-6), 0.25, 4.0)
        return np.asarray(np.clip(lasting * ratio ** (0.7 * step), 0.05, 1.5))

    def aim(self, topics: Floats, lasting: Floats) -> Floats:
        """Return the shares that last; an expert that a request leaves out, it leaves out."""
        about = topics - self.mean
        score = np.tensordot(about, self.directions, ((2, 3), (1, 2)))
        beyond = about - np.tensordot(score, self.directions, 1)
        share = self.mean + np.tensordot(score * lasting[1:], self.directions, 1)
        share = np.maximum(share + lasting[0] * beyond, 0.02 * self.mean)
        share = np.where(topics < _LEFT_OUT * self.mean, np.minimum(share, topics), share)
        total = topics.sum(axis=-1, keepdims=True)
        return np.asarray(share * total / share.sum(axis=-1, keepdims=True))


def _variances(pairs: Floats, directions: Floats) -> Floats:
    """Return the variance between requests beyond the directions, and along each."""
    about = pairs - pairs.mean(axis=2, keepdims=True)
    freedom = pairs.shape[1] * max(pairs.shape[2] - 1, 1)
    total = np.einsum("prle,prle->", about[0], about[1]) / freedom
    score = np.tensordot(about, directions, ((3, 4), (1, 2)))
    along = np.einsum("prd,prd->d", score[0], score[1]) / freedom
    return np.concatenate([[total - along.sum()], along])


def _drift_ratio(want: Floats, have: Floats) -> Floats:
    """Return by what to change the drift's variances: the fall of reuse with distance."""
    ratios = [
        np.nanmean(want[i] - want[i + 1]) / max(np.nanmean(have[i] - have[i + 1]), 1e-3)
        if np.isfinite(want[i + 1]).any()
        else 1.0
        for i in (1, 2)
    ]
    return np.asarray(np.clip(np.array(ratios), 0.25, 2.0))


def _odds(share: Floats) -> Floats:
    share = np.clip(share, 1e-4, 1 - 1e-4)
    return np.asarray(np.log(share / (1 - share)))


@njit()
def _shared(ids: Array, request: Ints, lag: int, out: Floats) -> int:
    """Add up, by layer, experts that a token shares with that so far before; return the pairs."""
    pairs = 0
    for t in range(lag, len(ids)):
        if request[t] != request[t - lag]:
            continue
        pairs += 1
        for layer in range(ids.shape[1]):
            for slot in range(ids.shape[2]):
                for other in range(ids.shape[2]):
                    if ids[t, layer, slot] == ids[t - lag, layer, other]:
                        out[layer] += 1
    return pairs
