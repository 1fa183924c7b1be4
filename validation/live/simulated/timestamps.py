"""Timestamps of requests, live or simulated, and the components of their latency."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats
from eldr_sim.validation.live.calibration.engine_calibration import CalibrationInfo
from eldr_sim.validation.live.live_run import LiveRun

COMPONENTS = ("queue", "prefill", "transfer", "decode", "host")


@dataclass(frozen=True)
class RequestTimestamps:
    """Timestamps of all requests, s: arrays of shape [requests], NaN where one is missing."""

    sent_s: Floats  #: post by the client
    queued_s: Floats  #: arrival in the queue of the engine that computes the prompt
    #: Start of the prompt's first step; end of its last step.
    prefill_start_s: Floats
    prefill_end_s: Floats
    #: Arrival in the decode engine's queue; ``prefill_end_s`` on a co-located engine.
    handed_s: Floats
    #: Start of the first decode step; ``prefill_end_s`` on a co-located engine.
    decode_start_s: Floats
    #: ``first_step_s``, ``last_step_s``: end of the step that yields the first and the last token.
    first_step_s: Floats
    last_step_s: Floats
    token_s: list[Floats]  #: arrival of each token at the client: an array per request

    @cached_property
    def first_token_s(self) -> Floats:
        """Arrival of the first token at the client."""
        return np.array([times[0] if len(times) else np.nan for times in self.token_s])

    @cached_property
    def last_token_s(self) -> Floats:
        """Arrival of the last token at the client."""
        return np.array([times[-1] if len(times) else np.nan for times in self.token_s])

    @property
    def ttft_s(self) -> Floats:
        """Time from the post to the first token."""
        return self.first_token_s - self.sent_s

    @property
    def e2el_s(self) -> Floats:
        """Time from the post to the last token."""
        return self.last_token_s - self.sent_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time per token after the first; NaN for requests of one token."""
        gaps = np.array([len(times) - 1 if len(times) > 1 else np.nan for times in self.token_s])
        return np.asarray((self.last_token_s - self.first_token_s) / gaps, np.float64)

    def gaps_s(self, which: NDArray[np.intp]) -> Floats:
        """Return the gaps between consecutive tokens of some requests, concatenated."""
        return np.concatenate([np.empty(0), *(np.diff(self.token_s[i]) for i in which)])

    def components(self, of: str) -> dict[str, Floats]:
        """Split ``ttft`` or ``e2el`` into :data:`COMPONENTS`, s."""
        first = of == "ttft"
        end = self.first_step_s if first else self.last_step_s
        token = self.first_token_s if first else self.last_token_s
        return {
            "queue": self.prefill_start_s - self.queued_s,
            "prefill": self.prefill_end_s - self.prefill_start_s,
            "transfer": self.decode_start_s - self.handed_s,
            "decode": end - self.decode_start_s,
            "host": self.queued_s - self.sent_s + self.handed_s - self.prefill_end_s + token - end,
        }


def live_timestamps(run: LiveRun, calibration: CalibrationInfo) -> RequestTimestamps:
    """Read the timestamps of a run's requests; NaN without all tokens. Arrival in an engine's
    queue, not observed, is the post plus calibrated ingress: the decode engine's where prompts came
    first."""
    requests, roles = run.requests, {engine.name: engine.role for engine in run.info.engines}
    n = requests.num_rows
    prompt, output = (requests[f"{k}_len"].to_numpy() for k in ("prompt", "output"))
    sent = requests["sent_s"].to_numpy()
    routed = requests["routed_s"].to_numpy().astype(np.float64)
    ingress = calibration.ingress_s.of(prompt)
    colocated = not any(role == "prefill" for role in roles.values())

    prefill_start, prefill_end = np.full(n, np.inf), np.full(n, np.nan)
    decode_start, first, last = np.full(n, np.inf), np.full(n, np.nan), np.full(n, np.nan)
    for step in run.steps.to_pylist():
        prefills = roles[step["engine"]] == "prefill"
        start, end = step["start_s"], step["end_s"]
        members = (step[name] for name in ("request", "position", "tokens"))
        for request, position, tokens in zip(*members, strict=True):
            done = position + tokens
            if prefills or colocated:
                prefill_start[request] = min(prefill_start[request], start)
                if done >= prompt[request] and np.isnan(prefill_end[request]):
                    prefill_end[request] = end
            if not prefills:
                decode_start[request] = min(decode_start[request], start)
                if done >= prompt[request] and np.isnan(first[request]):
                    first[request] = end
                if done >= prompt[request] + output[request] - 1 and np.isnan(last[request]):
                    last[request] = end
    if run.info.prefilled:
        prefill_start = prefill_end = sent + ingress
    tokens = [np.array(times or [], np.float64) for times in requests["token_s"].to_pylist()]
    whole = np.array([len(times) for times in tokens]) == output
    handed = prefill_end if colocated or run.info.prefilled else routed + ingress
    whole &= np.isfinite(prefill_start) & np.isfinite(handed) & np.isfinite(last)
    gone = np.where(whole, 0.0, np.nan)
    return RequestTimestamps(
        sent + gone,
        sent + ingress + gone,
        np.where(whole, prefill_start, np.nan),
        prefill_end + gone,
        handed + gone,
        np.where(whole, prefill_end if colocated else decode_start, np.nan),
        first + gone,
        last + gone,
        tokens,
    )
