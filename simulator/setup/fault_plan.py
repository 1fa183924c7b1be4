"""What goes wrong in a run: workers that die, hang, slow down, drain or join, and slower links.

A `FaultPlan` is an input of `CompiledCluster`; `fault_spellings` makes it from a configuration,
`fault_processes` carries it out."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from eldr_sim.arrays import Bools, Floats
from eldr_sim.errors import InputError

Kind = Literal["fail", "hang", "slow", "drain", "join", "link"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: What becomes of the requests of a worker that died: they go on elsewhere with the tokens that
#: they have; those that have none begin anew and the others fail; all fail.
Retry = Literal["migrate", "before_first_token", "never"]


@dataclass(frozen=True)
class Fault:
    """Something that happens to a worker."""

    #: ``fail``: it loses all it has, and with an end a new one takes its place then. ``hang``: it
    #: stands still, and goes on. ``slow``: its steps take ``factor`` times as long. ``drain``:
    #: routers send it nothing new. ``join``: it is not there before the end. ``link``: its link for
    #: KV transfers has ``factor`` of its bandwidth.
    kind: Kind
    #: ``pool``, ``worker``: the pool's name, and the worker's number there. All engines of a worker
    #: that share experts share its fate.
    pool: str
    worker: int
    #: ``at_s``, ``for_s``: when, s, and for how long; ``inf``: to the end of the run.
    at_s: float
    for_s: float = math.inf
    factor: float = 1.0  #: of ``slow`` and ``link``
    #: Of ``hang``: whether routers, once they know of it, send prompts that it has not begun to
    #: other workers, as ``FaultPlan.retry`` allows.
    resend: bool = False
    colocated: bool = False  #: whether the cluster is ``xC``, whose workers are ``worker:N``

    @property
    def where(self) -> str:
        """The worker as users write it: ``decode:3``, ``worker:3`` of ``xC``."""
        together = self.colocated and self.pool == "decode"
        return f"{'worker' if together else self.pool}:{self.worker}"

    @property
    def end_s(self) -> float:
        """When it is over, s."""
        return self.at_s + self.for_s

    def __str__(self) -> str:
        factor = f" x{self.factor:g}" if self.kind in ("slow", "link") else ""
        until = "" if math.isinf(self.for_s) else f"+{self.for_s:g}s"
        return f"{self.kind} {self.where}{factor} @{self.at_s:g}s{until}"


@dataclass(frozen=True)
class FaultPlan:
    """All that goes wrong in a run, and what routers do about it."""

    faults: tuple[Fault, ...] = ()  #: what happens to workers
    #: float64 ``[requests]``: when each client gives up, s, if its request comes when it is to;
    #: later ones give up later. ``inf``: never. None: nobody does.
    cancel_s: Floats | None = None
    #: How long after a worker has died, hangs or is back the routers know it.
    health_delay_s: float = 0.0
    #: ``retry``, ``max_retries``: what becomes of requests whose worker died, and how often.
    retry: Retry = "before_first_token"
    max_retries: int = 5
    #: bool ``[requests]``: whether a client stays if it has its first token by ``cancel_s``. None:
    #: nobody does.
    patient: Bools | None = None
    #: How long after a request has failed with its worker its user sends it again, as a new one, s.
    #: None: never.
    user_retry_s: float | None = None


def check_overlaps(faults: tuple[Fault, ...]) -> None:
    """Raise InputError where two things that do not mix happen to a worker at once."""

    def of(fault: Fault) -> tuple[str, int, str]:
        return fault.pool, fault.worker, fault.kind if fault.kind in ("slow", "link") else ""

    def start(fault: Fault) -> float:
        return 0.0 if fault.kind == "join" else fault.at_s

    for one, other in pairwise(sorted(faults, key=lambda fault: (of(fault), start(fault)))):
        if of(one) == of(other) and start(other) <= one.end_s:
            raise InputError("events", f"{one} and {other} overlap", "one after the other")
