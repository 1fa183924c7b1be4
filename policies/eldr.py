"""ELDR: expert-locality-aware decode routing by the locality band (Sec. 4.3.2)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.policies.base import Loads, PolicyContext, RequestInfo
from eldr_sim.policies.shortlist import Shortlist, ShortlistBy
from eldr_sim.policies.signature import Floats, score_of
from eldr_sim.traces.gate_scores import PromptScore


class EldrPolicy:
    """The least loaded worker among those whose centroid is nearly the most similar.

    With ``s_k`` the cosine similarity between the request's signature and the centroid of worker
    ``k``, and ``s*`` the highest of them, the band holds the workers with ``s_k >= s* - tau``. The
    one with the fewest in-flight requests is chosen. The paper leaves ties of load open: the most
    similar of the tied workers is taken, so that an idle cluster routes by locality alone.

    Under ``gate-logit`` similarities may be negative, and a tau of 1 need not reach every worker.

    A request without a signature, or whose signature is zero (none of its experts tells requests
    apart), says nothing of locality and joins the shortest queue of all workers.
    """

    name = "eldr"
    decision: ClassVar[str] = "decode"
    reads_signature: ClassVar[bool] = True
    shortlist_by: ClassVar[ShortlistBy] = "signature"

    def __init__(self, context: PolicyContext) -> None:
        artifact = context.require_artifact(self.name)
        if artifact.n_decoders != context.n_workers:
            problem = f"made for {artifact.n_decoders} decode workers, not {context.n_workers}"
            raise InputError("artifact", problem, "a fit at this number of workers")
        self._artifact = artifact
        self._tau = context.tau
        self._everyone = Shortlist(range(context.n_workers))
        self._shortlists: dict[int, Shortlist] = {}

    @property
    def signature_score(self) -> PromptScore:
        """What the policy takes as a request's signature: ``count``, ``prob`` or ``logit``."""
        return score_of(self._artifact.transform)

    def similarities(self, signature: NDArray[Any]) -> Floats:
        """Return the cosine similarity, shape [K], of a signature to each centroid.

        Parameters
        ----------
        signature
            Shape [L, E]: prefill counts or summed gate scores, as ``signature_score`` says; the
            artifact's transform and layer mask are applied here.
        """
        unit = self._artifact.signatures(signature[None])[0]
        # Rounded unit vectors may exceed length 1 by 1e-7; tau = 1 must still mean every worker.
        return np.asarray(np.minimum(self._artifact.centroids @ unit, 1.0))

    def band(self, request: RequestInfo) -> list[int]:
        """Return the workers in the request's locality band, the most similar one first.

        Empty where the request says nothing of locality. Equal similarities keep the order of the
        workers.
        """
        if request.signature is None:
            return []
        similar = self.similarities(request.signature)
        order = np.argsort(-similar, kind="stable")
        inside = similar[order] >= similar[order[0]] - self._tau
        band: list[int] = order[inside].tolist() if similar.any() else []
        return band

    def shortlist(self, request: RequestInfo) -> Shortlist:
        """Return the workers of the locality band, or all where there is none.

        Remembered for every ``signature_id`` while the policy lives.
        """
        known = request.signature_id
        if known is not None and known in self._shortlists:
            return self._shortlists[known]
        band = self.band(request)
        found = Shortlist(band, in_turn=False) if band else self._everyone
        if known is not None:
            self._shortlists[known] = found
        return found

    def select(self, request: RequestInfo, loads: Loads) -> int:
        """Return the least loaded worker of the locality band."""
        return self.shortlist(request).pick(loads)
