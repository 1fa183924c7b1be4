"""The front end: what API servers do with a request before a router sees it, compiled.

API servers take requests in turn; one's event loop reads them one after the other, and tokenises
them by the engine's version (`vllm/utils/async_utils.py`, `vllm/renderers/params.py`, `base.py`):

- ``microbatch_sequential`` (vLLM 0.15 to May 2026): one thread collects prompts, up to 32 or 2 ms
  from the first one, tokenises them one after the other, and hands all on together.
- ``microbatch_parallel`` (vLLM 0.10 to 0.14): the same, but the batch is spread over CPU cores.
- ``thread_pool`` (from June 2026): ``threads`` threads, a prompt each; vLLM's default is one."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints, Records
from eldr_sim.kernel_profiles.kernels.front_end import FrontEndLatency
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import leave, schedule
from eldr_sim.simulator.plane.kv.kv_manager import Engines
from eldr_sim.simulator.plane.state import COLLECTED, OPEN, PENDING_ROUTE, READ, TOKENIZED

Mode = Literal["microbatch_sequential", "microbatch_parallel", "thread_pool"]
SEQUENTIAL, PARALLEL, POOL = map(np.int64, range(3))
_MODES: dict[Mode, np.int64] = {
    "microbatch_sequential": SEQUENTIAL,
    "microbatch_parallel": PARALLEL,
    "thread_pool": POOL,
}
_IDLE, _COLLECTING, _BUSY = map(np.int64, range(3))

_SETTINGS = np.dtype(
    [
        ("mode", np.int64),
        ("threads", np.int64),
        ("most", np.int64),  # prompts of a batch
        ("wait_s", np.float64),  # from the first prompt of a batch to its start at the latest
    ]
)
#: An API server.
_SERVER = np.dtype(
    [
        ("loop_free_s", np.float64),  # when its event loop has read what it was sent
        ("head", np.int64),  # of the prompts that wait for the tokeniser, linked by REQUEST.next
        ("tail", np.int64),
        ("n_queued", np.int64),
        ("state", np.int64),
        ("round", np.int64),  # of collecting: only the end of this one counts
        ("batch", np.int64),  # first of those that are tokenised together,
        ("n_batch", np.int64),  # and how many
        ("n_busy", np.int64),  # threads
    ]
)


@dataclass(frozen=True)
class FrontEndSpec:
    """The API servers of a cluster; batches and waits are vLLM's ``AsyncMicrobatchTokenizer``."""

    latency: FrontEndLatency
    mode: Mode
    n_servers: int
    threads: int = 1
    most: int = 32
    wait_s: float = 0.002


class FrontEnd(NamedTuple):
    """What the loop knows of the API servers; the last three are seconds of each request."""

    settings: Records  #: ``[1]``
    servers: Records
    event_loop_s: Floats
    http_s: Floats
    tokenize_s: Floats


def most_at_once(spec: FrontEndSpec | None) -> int:
    """Return the most requests that leave the front end at one event."""
    return 0 if spec is None else spec.most


def make_front_end(spec: FrontEndSpec | None, prompt_len: Ints) -> FrontEnd | None:
    """Return idle API servers for requests with these prompt tokens; None without a spec."""
    if spec is None:
        return None
    settings, servers = np.zeros(1, _SETTINGS), np.zeros(spec.n_servers, _SERVER)
    settings["mode"], settings["threads"] = _MODES[spec.mode], spec.threads
    settings["most"], settings["wait_s"] = spec.most, spec.wait_s
    time_s = spec.latency.time_s
    return FrontEnd(
        settings,
        servers,
        time_s("event_loop", prompt_len),
        time_s("http", prompt_len),
        time_s("tokenize", prompt_len),
    )


def no_front_end() -> FrontEnd:
    """Return what stands for a cluster without API servers."""
    none = np.zeros(0)
    return FrontEnd(np.zeros(0, _SETTINGS), np.zeros(0, _SERVER), none, none, none)


@compiled()
def send(clock: Any, events: Any, front: FrontEnd, request: int) -> None:
    """Let the event loop of the next server in turn read a request."""
    server = front.servers[request % front.servers.shape[0]]
    server.loop_free_s = max(clock[0].now, server.loop_free_s) + front.event_loop_s[request]
    schedule(clock, events, server.loop_free_s + front.http_s[request], READ, request)


@compiled()
def on_read(clock: Any, events: Any, engines: Engines, front: FrontEnd, request: int) -> None:
    """Put a request that has been read behind the others that wait for the tokeniser."""
    number = request % front.servers.shape[0]
    server, settings, requests = front.servers[number], front.settings[0], engines.requests
    requests[request].next = -1
    if server.n_queued == 0:
        server.head = request
    else:
        requests[server.tail].next = request
    server.tail = request
    server.n_queued += 1
    if settings.mode == POOL:
        if server.n_busy < settings.threads:
            _begin_one(clock, events, engines, front, number)
    elif server.state != _BUSY and server.n_queued >= settings.most:
        _begin_batch(clock, events, engines, front, number)
    elif server.state == _IDLE:
        _collect(clock, events, front, number)


@compiled()
def on_collected(clock: Any, events: Any, engines: Engines, front: FrontEnd, subject: int) -> None:
    """Begin the batch that has been collected, unless it was full before."""
    n = front.servers.shape[0]
    server = front.servers[subject % n]
    if server.state == _COLLECTING and server.round == subject // n:
        _begin_batch(clock, events, engines, front, subject % n)


@compiled()
def on_tokenized(clock: Any, events: Any, engines: Engines, front: FrontEnd, subject: int) -> None:
    """Hand on what has been tokenised, and go on: a server's batch, or one request of a pool."""
    settings, requests = front.settings[0], engines.requests
    if settings.mode == POOL:
        number = subject % front.servers.shape[0]
        _hand_on(clock, engines, subject)
        front.servers[number].n_busy -= 1
        if front.servers[number].n_queued > 0:
            _begin_one(clock, events, engines, front, number)
        return
    server = front.servers[subject]
    request = server.batch
    for _ in range(server.n_batch):
        _hand_on(clock, engines, request)
        request = requests[request].next
    server.state = _IDLE
    if server.n_queued >= settings.most:
        _begin_batch(clock, events, engines, front, subject)
    elif server.n_queued > 0:
        _collect(clock, events, front, subject)


@compiled()
def _hand_on(clock: Any, engines: Engines, request: int) -> None:
    """Let a router see a prompt, unless its client has given up while servers had it."""
    if engines.requests[request].outcome == OPEN:
        engines.requests[request].tokenized_s = clock[0].now
        leave(clock, engines, PENDING_ROUTE, request)


@compiled()
def _begin_one(clock: Any, events: Any, engines: Engines, front: FrontEnd, number: int) -> None:
    """Let a thread of a server take its next prompt."""
    server = front.servers[number]
    request = server.head
    server.head = engines.requests[request].next
    server.n_queued -= 1
    server.n_busy += 1
    schedule(clock, events, clock[0].now + front.tokenize_s[request], TOKENIZED, request)


@compiled()
def _collect(clock: Any, events: Any, front: FrontEnd, number: int) -> None:
    """Wait for more prompts, but not long."""
    server = front.servers[number]
    server.state = _COLLECTING
    server.round += 1
    subject = number + front.servers.shape[0] * server.round
    schedule(clock, events, clock[0].now + front.settings[0].wait_s, COLLECTED, subject)


@compiled()
def _begin_batch(clock: Any, events: Any, engines: Engines, front: FrontEnd, number: int) -> None:
    """Tokenise the prompts that have been collected."""
    server, settings = front.servers[number], front.settings[0]
    server.state = _BUSY
    server.batch, server.n_batch = server.head, min(server.n_queued, settings.most)
    together, longest, request = 0.0, 0.0, server.head
    for _ in range(server.n_batch):
        together += front.tokenize_s[request]
        longest = max(longest, front.tokenize_s[request])
        request = engines.requests[request].next
    server.head = request
    server.n_queued -= server.n_batch
    seconds = together
    if settings.mode == PARALLEL:
        seconds = max(longest, together / settings.threads)
    schedule(clock, events, clock[0].now + seconds, TOKENIZED, number)
