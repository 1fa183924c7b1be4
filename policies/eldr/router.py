"""ELDR: expert-locality-aware decode routing by the locality band (Sec. 4.3.2).

The defaults are what its authors measured (casys-kaist/ELDR, published cells of October 2026). The
paper's text knows no online refit: ``eldr:refit_s=0``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from eldr_sim.arrays import Array, Bools, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.policies.base import LOADS, Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import SignatureParameters
from eldr_sim.policies.compiled import HOLD, UNPREPARED, CompiledDecisions, least_loaded
from eldr_sim.policies.eldr.artifact import RoutingArtifact
from eldr_sim.policies.eldr.online import OnlineCentroids, Served, note
from eldr_sim.policies.eldr.signature import (
    FitOptions,
    LayerMask,
    Method,
    Transform,
    parse_layer_mask,
    score_of,
)
from eldr_sim.policies.rule import Rule


def _layer_mask(value: Any) -> Any:
    try:
        return None if value is None else parse_layer_mask(value)
    except InputError as error:
        allowed = {"them": error.allowed}
        raise PydanticCustomError("layer_mask", "allowed are {them}", allowed) from None


class EldrParameters(SignatureParameters):
    """Parameters of ELDR's router."""

    tau: float = Field(default=0.1, ge=0, le=1)
    """Width of the locality band in cosine similarity; the default is the paper's."""
    artifact: str | None = None
    """Routing artifact of ``eldr-sim fit``, a file; fitted on the fly when not given."""
    signature: Transform | None = None
    """What a signature holds of a prompt's experts; ``count-idf``, or what the artifact was fitted
    with, when not given."""
    layer_mask: Annotated[LayerMask | None, BeforeValidator(_layer_mask)] = None
    """Layers of the signature: ``greedy`` (chosen by rho), ``all``, or numbers such as ``0,3,5``;
    ``greedy``, or the artifact's, when not given."""
    clustering: Method | None = None
    """How calibration signatures make one centroid a decode worker: Hungarian-balanced K-means or
    ``vanilla``; ``balanced``, or the artifact's, when not given."""
    seedings: int | None = Field(default=None, ge=1, le=1000)
    """Starts of the fit's clustering, of which the best is kept; 1, or the artifact's."""
    rounds: int | None = Field(default=None, ge=1, le=10_000)
    """Most rounds of a clustering, the fit's or a refit's; 50, or the artifact's."""
    mask_pairs: int | None = Field(default=None, ge=3, le=10_000_000)
    """Pairs of calibration requests, drawn with replacement, that the greedy layers are chosen on;
    30,000, or the artifact's."""
    refit_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How often the centroids are refitted to what is served, s; 0 never, as in the paper's
    text."""
    window_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """What a refit looks back on, s; the first comes after that time."""
    min_band: int = Field(default=1, ge=1, le=2)
    """Workers that the band holds at least: 1, or 2, the most similar two where it would hold one
    (an older version of the authors' rule; not with a tau of 0)."""
    ties: Literal["lowest", "similar"] = "lowest"
    """Worker among the least loaded in the band: the lowest index, or the most similar.
    The paper leaves it open."""
    unit: Literal["group", "engine"] = "group"
    """What has a centroid: engines that share experts, together, or each engine by itself, so that
    the tokens of each are alike."""


class EldrPolicy(RouterPolicy):
    """The least loaded worker among those with nearly the most similar centroid.

    With ``s_k`` the cosine similarity between the request's signature and the centroid of worker
    ``k``, and ``s*`` the highest, the band holds the workers with ``s_k >= s* - tau``; of these the
    one with the fewest in-flight requests is chosen, the first of them (``ties``). A request
    without a signature, or a zero one, joins the shortest queue of all. Under ``gate-logit``
    similarities may be negative.

    Workers that share experts (`PolicyContext.group_size`) share a centroid unless each ``engine``
    is to have its own; engines of a group that has the band to itself take turns. Centroids follow
    the requests that are served (``refit_s``, see `online`), so the policy is called for each;
    without refits it works from rules."""

    name = "eldr"
    decision = "decode"
    needs = Needs(experts=True, signature="count", columns=LOADS)
    artifact: RoutingArtifact
    Parameters = EldrParameters

    def __init__(self, context: PolicyContext, parameters: EldrParameters | None = None) -> None:
        self.parameters = parameters or EldrParameters()
        if self.parameters.unit == "engine":
            context = replace(context, group_size=1)
        artifact = _artifact(self.parameters, context)
        if artifact.n_decoders != context.n_groups:
            problem = f"made for {artifact.n_decoders} decode workers, not {context.n_groups}"
            raise InputError("artifact", problem, "a fit at this number of workers")
        self.artifact = artifact
        self.needs = self.needs._replace(signature=score_of(artifact.transform))
        own = self.parameters
        self._online: OnlineCentroids | None = None
        if own.refit_s:
            self._online = OnlineCentroids(
                artifact.centroids, own.refit_s, own.window_s, artifact.clustering, artifact.rounds
            )
        self.rule_by = None if own.refit_s else "signature"
        self._tau = own.tau
        self._members = context.members
        self._groups = [Rule(context.members([group])) for group in range(context.n_groups)]
        self._compiled = context.group_size == 1 and (own.min_band == 1 or own.tau == 0)
        everyone = Rule(range(context.n_workers))
        self._everyone = everyone if context.n_groups > 1 else self._groups[0]
        self._rules: dict[int | None, Rule] = {}

    def similarities(self, signatures: Array) -> Floats:
        """Return the cosine similarity, [n, K], of signatures [n, L, E] (as ``needs.signature``
        says) to each centroid of the fit."""
        return _similarities(self.artifact.signatures(signatures), self.artifact.centroids)

    def bands(self, signatures: Array) -> list[list[int]]:
        """Return the workers, or groups, in the locality band of each signature, the most similar
        first; none where it says nothing of locality. ``signatures`` as for `similarities`."""
        return [self._band(row) for row in self.similarities(signatures).tolist()]

    def _band(self, similar: list[float]) -> list[int]:
        if not any(similar):
            return []
        order = sorted(range(len(similar)), key=lambda k: -similar[k])
        edge = similar[order[0]] - self._tau
        size = sum(one >= edge for one in similar)
        return order[: max(size, self.parameters.min_band if self._tau > 0 else 1)]

    def rules(self, requests: Sequence[RequestInfo]) -> Sequence[Rule]:
        """Return the workers of each request's locality band, all where there is none."""
        asked = [r for r in requests if self._rules.get(r.signature_id) is None]
        signatures = [r.signature for r in asked if r.signature is not None]
        bands = iter(self.bands(np.stack(signatures)) if signatures else [])
        new: dict[int, Rule] = {}
        for request in asked:
            band = [] if request.signature is None else next(bands)
            rule = self._rule(band)
            new[request.request_id] = rule
            if request.signature_id is not None:
                self._rules[request.signature_id] = rule
        return [new.get(r.request_id) or self._rules[r.signature_id] for r in requests]

    def _rule(self, band: list[int]) -> Rule:
        if not band:
            return self._everyone
        if len(band) == 1:
            return self._groups[band[0]]
        if self.parameters.ties == "lowest":
            band = sorted(band)
        return Rule(self._members(band), in_turn=False)

    def compiled(self, workers: Workers, n_kinds: int) -> CompiledDecisions | None:
        """Return compiled code that does what `select` does, where centroids are refitted."""
        if self._online is None or not self._compiled:
            return None
        return _Compiled(self, self._online, workers, n_kinds)

    def near(self, request: RequestInfo, now_s: float) -> Floats | None:
        """Return the cosine similarity, [K], of a request to the centroids as they are now; None
        where its signature says nothing of locality. It counts as served at ``now_s`` in the refits
        to come; times do not fall."""
        counts, online = request.signature, self._online
        if online is not None:
            online.advance(now_s)
        if counts is None:
            return None
        if online is None:
            similar = self.similarities(counts[None])[0]
            return similar if similar.any() else None
        rows, _ = online.add(
            [request.signature_id], lambda _: self.artifact.signatures(counts[None])
        )
        served, row = online.served, int(rows[0])
        found: Floats = served.similar[int(served.n[0])]
        if not _compare(served.points[row], served.centroids, found):
            return None
        note(served, row, now_s)
        return found

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the least loaded worker of the locality band."""
        if self._online is None:
            return self.rules([request])[0].pick(workers)
        similar = self.near(request, workers.now_s)
        if similar is None:
            return self._everyone.pick(workers)
        if self._compiled:
            last = self.parameters.ties == "similar"
            found: int = _least(similar, self._tau, last, workers.loads, workers.healthy)
            if found >= 0:
                return found
        return self._rule(self._band(similar.tolist())).pick(workers)


class _State(NamedTuple):
    """What the compiled decisions work on."""

    served: Served
    loads: Ints
    healthy: Bools
    row_of: Ints  #: ``[kinds]``: the rows of their signatures; -1: unknown
    turn: Ints  #: ``[1]``: who comes first where locality says nothing
    tau: float
    by_similarity: bool  #: among equals in the band


class _Compiled:
    """The policy as `CompiledDecisions`."""

    def __init__(
        self, policy: EldrPolicy, online: OnlineCentroids, workers: Workers, n_kinds: int
    ) -> None:
        self._policy, self._online = policy, online
        own = workers.loads, workers.healthy, np.full(n_kinds, -1), np.zeros(1, np.int64)
        ties = policy.parameters.ties == "similar"
        self.books = _State(online.served, *own, policy.parameters.tau, ties)
        self.choose, self.forget = _choose, None

    def prepare(self, kinds: Sequence[int], requests: Sequence[RequestInfo], now_s: float) -> None:
        """Refit if it is time, and know the requests' signatures."""
        online, row_of = self._online, self.books.row_of
        online.advance(now_s)

        def made(which: list[int]) -> Floats:
            counts = [requests[i].signature for i in which]
            return self._policy.artifact.signatures(np.stack(cast("list[Array]", counts)))

        rows, moved = online.add([request.signature_id for request in requests], made)
        if moved is not None:
            known = row_of >= 0
            row_of[known] = moved[row_of[known]]
        row_of[kinds] = rows
        self.books = self.books._replace(served=online.served)


@njit()
def _choose(books: _State, kind: int, _tokens: int, now_s: float) -> int:
    """Return the worker that `EldrPolicy.select` does."""
    served, loads, healthy = books.served, books.loads, books.healthy
    turn, n, row = least_loaded(loads, healthy, books.turn[0]), served.n[0], books.row_of[kind]
    if turn < 0:
        return HOLD
    if row < 0 or now_s >= served.due_s[0] or n == served.times.shape[0]:
        return UNPREPARED
    similar = served.similar[n]
    if not _compare(served.points[row], served.centroids, similar):
        books.turn[0] = (turn + 1) % loads.shape[0]
        return int(turn)
    note(served, row, now_s)
    found = _least(similar, books.tau, books.by_similarity, loads, healthy)
    return int(found if found >= 0 else least_loaded(loads, healthy, 0))


def _similarities(units: Floats, centroids: Floats) -> Floats:
    similar = np.empty((len(units), len(centroids)))
    for unit, row in zip(units, similar, strict=True):
        _compare(unit, centroids, row)
    return similar


# Sums of products of unit vectors are exact (`signature`): reassociated, no bit changes.
@njit(fastmath={"reassoc", "contract"})
def _compare(unit: Array, centroids: Array, similar: Floats) -> bool:
    """Write the cosine similarity to each centroid; return whether any is not zero."""
    changed, last = False, len(centroids) - 1
    for first in range(0, last + 1, 2):  # of two at once
        one, other, p, q = centroids[first], centroids[min(first + 1, last)], 0.0, 0.0
        for d in range(len(unit)):
            x = np.float64(unit[d])
            p += x * np.float64(one[d])
            q += x * np.float64(other[d])
        # Rounded unit vectors may exceed length 1 by 1e-7; tau = 1 must still mean every worker.
        similar[first], similar[min(first + 1, last)] = min(p, 1.0), min(q, 1.0)
        changed |= p != 0.0 or q != 0.0
    return changed


@njit()
def _least(similar: Floats, tau: float, by_similarity: bool, loads: Any, healthy: Any) -> int:
    """Return the worker that `Rule.pick` chooses of a band; -1 where none of it is healthy."""
    best, edge = -1, similar.max() - tau
    for w in range(len(similar)):
        if healthy[w] and similar[w] >= edge:
            more = best < 0 or loads[w] < loads[best]
            if more or (by_similarity and loads[w] == loads[best] and similar[w] > similar[best]):
                best = w
    return best


def _artifact(parameters: EldrParameters, context: PolicyContext) -> RoutingArtifact:
    """Return the artifact that the parameters name, that the context holds, or a new fit."""
    given = {
        "transform": parameters.signature,
        "layer_mask": parameters.layer_mask,
        "clustering": parameters.clustering,
        **{name: getattr(parameters, name) for name in ("seedings", "rounds", "mask_pairs")},
    }
    artifact = context.artifact
    if parameters.artifact is not None:
        artifact = RoutingArtifact.load(Path(parameters.artifact))
    if artifact is None:
        raise InputError("policy", "'eldr' needs a routing artifact, and none was given")
    if isinstance(artifact, RoutingArtifact):
        artifact.check_made_with(**given)
        return artifact
    options = FitOptions(**{name: value for name, value in given.items() if value is not None})
    return artifact(options, context.n_groups)
