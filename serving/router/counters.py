"""What the router counts, in Prometheus' text format."""

from collections.abc import Callable, Iterable
from typing import Any

from eldr_sim.serving.http import Registry

OUTCOMES = {
    "ok": "a whole answer",
    "refused": "a status of 400 to 499, from the router or an engine",
    "failed": "a status of 500 or 502: engines have failed",
    "unavailable": "503: no engine is up",
    "timed_out": "504: no token in time",
    "broken_off": "an answer that ended in its middle",
    "client_left": "the client has closed its connection, or does not take its answer",
}
"""How a request may end."""

_ADDED_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PREFIX = "eldr_router_"


class Counters(Registry):
    """The router's metrics; raises InputError if prometheus-client is not installed."""

    def __init__(self) -> None:
        super().__init__("router")

        def made(kind: Any, name: str, text: str, labels: Iterable[str] = (), **more: Any) -> Any:
            return kind(_PREFIX + name, text, tuple(labels), registry=self.registry, **more)

        counter, gauge = self.library.Counter, self.library.Gauge
        histogram = self.library.Histogram
        self.requests = made(counter, "requests", "Requests by their end.", ["path", "outcome"])
        self.retries = made(counter, "retries", "Requests that went to another engine.", ["pool"])
        fate = "KV caches that nobody will fetch: freed, or left to the end of their lease."
        self.releases = made(counter, "kv_releases", fate, ["outcome"])
        self.sent = made(counter, "engine_requests", "Requests sent.", ["pool", "engine"])
        self.ejections = made(counter, "engine_ejections", "Ejections.", ["pool", "engine"])
        self._up = made(gauge, "engine_up", "Whether an engine gets requests.", ["pool", "engine"])
        self._load = made(gauge, "engine_load", "Requests in flight.", ["pool", "engine"])
        text = "KV blocks that the engine's events say it holds."
        self._blocks = made(gauge, "engine_cached_blocks", text, ["pool", "engine"])
        self._held = made(gauge, "held_requests", "Requests that the policy holds.", ["pool"])
        text = "Time until the first token that passed in the router, not with engines or held."
        added = made(histogram, "added_latency_seconds", text, buckets=_ADDED_S)
        text = "Time until the first token of a streamed answer, or all of another."
        first = made(histogram, "time_to_first_token_seconds", text, buckets=_FIRST_TOKEN_S)
        self.added_s, self.first_token_s = added.observe, first.observe

    def engine(self, pool: str, url: str, up: Callable[[], bool], load: Callable[[], int]) -> None:
        """Read what is known of an engine whenever somebody asks."""
        self._up.labels(pool, url).set_function(lambda: float(up()))
        self._load.labels(pool, url).set_function(lambda: float(load()))

    def cached(self, pool: str, url: str, blocks: Callable[[], int]) -> None:
        """Read what an engine's events say of its cache whenever somebody asks."""
        self._blocks.labels(pool, url).set_function(lambda: float(blocks()))

    def held(self, pool: str, held: Callable[[], int]) -> None:
        """Read how many requests a pool's policy holds whenever somebody asks."""
        self._held.labels(pool).set_function(lambda: float(held()))
