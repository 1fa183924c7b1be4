"""The engines behind the router: pools, each with a policy, and their health; what the router
counts."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.policies.base import RequestInfo, RouterPolicy
from eldr_sim.serving.bodies import one_token_body
from eldr_sim.serving.http import Registry
from eldr_sim.serving.router.config import ProxyConfig
from eldr_sim.serving.router.decisions import Router
from eldr_sim.serving.router.engine import Engine
from eldr_sim.serving.router.kv_events import CachedPrefixes, EventWatch, require_zmq
from eldr_sim.serving.router.signals import SignalWatch
from eldr_sim.serving.router.tasks import Supervisor, silent_if_broken
from eldr_sim.serving.router.upstream import EngineFailure, Post, ask

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
        fate = "KV caches that no engine will fetch: freed, or left to the end of their lease."
        self.releases = made(counter, "kv_releases", fate, ["outcome"])
        self.sent = made(counter, "engine_requests", "Requests sent.", ["pool", "engine"])
        self.ejections = made(counter, "engine_ejections", "Ejections.", ["pool", "engine"])
        self._up = made(gauge, "engine_up", "Whether an engine gets requests.", ["pool", "engine"])
        self._load = made(gauge, "engine_load", "Requests in flight.", ["pool", "engine"])
        text = "KV blocks that the engine's events say it holds."
        self._blocks = made(gauge, "engine_cached_blocks", text, ["pool", "engine"])
        self._held = made(gauge, "held_requests", "Requests that the policy holds.", ["pool"])
        text = "Metrics or KV events of an engine that could not be read."
        self.watch_errors = made(counter, "watch_errors", text, ["pool", "engine", "source"])
        text = "Background tasks that ended unexpectedly and were started again."
        self.task_failures = made(counter, "task_failures", text, ["task"])
        text = "Time until the first token that passed in the router, not with engines or held."
        added = made(histogram, "added_latency_seconds", text, buckets=_ADDED_S)
        text = "Time until the first token of a streamed answer, or all of another."
        first = made(histogram, "time_to_first_token_seconds", text, buckets=_FIRST_TOKEN_S)
        self.added_s, self.first_token_s = added.observe, first.observe

    def engine(self, pool: str, url: str, up: Callable[[], bool], load: Callable[[], int]) -> None:
        """Read what is known of an engine at each scrape."""
        self._up.labels(pool, url).set_function(lambda: float(up()))
        self._load.labels(pool, url).set_function(lambda: float(load()))

    def cached(self, pool: str, url: str, blocks: Callable[[], int]) -> None:
        """Read what an engine's events say of its cache at each scrape."""
        self._blocks.labels(pool, url).set_function(lambda: float(blocks()))

    def held(self, pool: str, held: Callable[[], int]) -> None:
        """Read how many requests a pool's policy holds at each scrape."""
        self._held.labels(pool).set_function(lambda: float(held()))


class Pool:
    """Engines ``prefill`` or ``decode``, and the policy that chooses. ``notify``: called when one
    is ejected or returns; ``kv_events``: where they publish their caches."""

    def __init__(
        self,
        name: str,
        urls: list[str],
        policy: RouterPolicy,
        counters: Counters,
        notify: Callable[[str], None],
        kv_events: Sequence[str] = (),
    ) -> None:
        self.name = name
        prefixes = _prefixes(policy, len(urls), kv_events)
        self.router = Router(policy, len(urls), prefixes)
        self.engines = [
            Engine(url, f"{name} engine {i}", partial(self._changed, i), self._is_last)
            for i, url in enumerate(urls)
        ]
        self.reads_signals = policy.needs.signals
        self._notify = notify
        self._sent = [counters.sent.labels(name, url) for url in urls]
        self._ejected = [counters.ejections.labels(name, url) for url in urls]
        counters.held(name, lambda: self.router.n_held)
        for i, url in enumerate(urls):
            counters.engine(name, url, partial(self._up, i), partial(self._load, i))
            if prefixes is not None:
                counters.cached(name, url, partial(prefixes.blocks_of, i))
            self.router.set_health(i, False)

    async def place(self, info: RequestInfo, without: Collection[int]) -> int:
        """Return the index of the policy's engine, counting the request there until
        ``router.complete``. Raises NoEngine if none is up but for ``without``."""
        index = await self.router.route(info, without)
        self._sent[index].inc()
        return index

    def least_loaded(self, without: Collection[int]) -> Engine | None:
        """Return the engine with the fewest requests; None if none is up."""
        usable = self.router.usable(without)
        loads = self.router.workers.loads
        return self.engines[min(usable, key=lambda i: int(loads[i]))] if usable else None

    def _up(self, index: int) -> bool:
        return self.engines[index].up

    def _load(self, index: int) -> int:
        return int(self.router.workers.loads[index])

    def _is_last(self) -> bool:
        return len(self.router.usable()) <= 1

    def _changed(self, index: int, engine: Engine) -> None:
        if not engine.up and self.router.workers.healthy[index]:
            self._ejected[index].inc()
        self.router.set_health(index, engine.up)
        said = "is up" if engine.up else f"is down: {engine.problem}"
        self._notify(f"{engine.name} ({engine.url}) {said}")


def _prefixes(
    policy: RouterPolicy, n_engines: int, kv_events: Sequence[str]
) -> CachedPrefixes | None:
    """Return what will be known of the engines' caches; None where the policy reads nothing of it.
    Raises InputError if the policy needs events that nobody publishes, or the other way round."""
    allowed = "an endpoint of --kv-events-config for each engine that computes prompts"
    if not policy.needs.matched:
        if kv_events:
            raise InputError("kv_events", f"policy {policy.name!r} reads no caches", "none")
        return None
    if len(kv_events) != n_engines:
        reads = f"{policy.name!r} reads the caches of all"
        problem = f"{len(kv_events)} of {n_engines} engines; {reads}"
        raise InputError("kv_events", problem, allowed)
    require_zmq()
    return CachedPrefixes(n_engines)


class Fleet:
    """All engines behind the router; ``prefill``: None where the decode engines compute prompts."""

    def __init__(
        self,
        config: ProxyConfig,
        decode_policy: RouterPolicy,
        prefill_policy: RouterPolicy | None,
        counters: Counters,
        notify: Callable[[str], None],
    ) -> None:
        self.config, self.counters, notify = config, counters, silent_if_broken(notify)
        told, events = (counters, notify), config.kv_events  # those of who computes prompts
        alone = events if prefill_policy is None else ()
        self.decode = Pool("decode", config.decode_urls, decode_policy, *told, alone)
        self.prefill: Pool | None = None
        if prefill_policy is not None:
            self.prefill = Pool("prefill", config.prefill_urls, prefill_policy, *told, events)
        self.session: Any = None
        self._notify = notify
        self._tasks = Supervisor(lambda name: counters.task_failures.labels(name).inc(), notify)

    @property
    def pools(self) -> list[Pool]:
        """Prefill engines first."""
        return [pool for pool in (self.prefill, self.decode) if pool is not None]

    @property
    def serves(self) -> bool:
        """Whether a request would find the engines that it needs."""
        return all(pool.router.usable() for pool in self.pools)

    async def run(self, session: Any) -> AsyncIterator[None]:
        """Watch the engines while the router runs; all have been asked once when this yields."""
        self.session = session
        config = self.config
        engines = [engine for pool in self.pools for engine in pool.engines]
        timeout_s = config.health_timeout_s
        await asyncio.gather(*(engine.probe(session, timeout_s, first=True) for engine in engines))
        for engine in engines:
            watch = partial(engine.watch, session, config.health_interval_s, timeout_s)
            self._tasks.keep(f"health of {engine.name}", watch)
        for pool in self.pools:
            if pool.reads_signals:
                self._watch_signals(pool)
            if pool.router.prefixes is not None:
                self._watch_caches(pool, pool.router.prefixes)
        try:
            yield
        finally:
            await self._tasks.close()

    def _watch_signals(self, pool: Pool) -> None:
        urls = [engine.url for engine in pool.engines]
        problems = [self._problems(pool, engine, "metrics") for engine in pool.engines]
        interval_s = self.config.signal_interval_ms / 1e3
        watch = SignalWatch(pool.router, urls, interval_s, lambda i, text: problems[i](text))
        for index, engine in enumerate(pool.engines):
            read = partial(watch.read, self.session, index)
            self._tasks.keep(f"metrics of {engine.name}", read)
        self._tasks.keep(f"metrics of {pool.name} engines", watch.publish)

    def _watch_caches(self, pool: Pool, prefixes: CachedPrefixes) -> None:
        for index, engine in enumerate(pool.engines):
            problem = self._problems(pool, engine, "kv_events")
            watch = EventWatch(prefixes, index, self.config.kv_events[index], problem)
            self._tasks.keep(f"KV events of {engine.name}", watch.listen)

    def _problems(self, pool: Pool, engine: Engine, source: str) -> Callable[[str | None], None]:
        """Return a function that counts what cannot be read of an engine, and logs the first of
        several problems in a row and the end of them."""
        count = self.counters.watch_errors.labels(pool.name, engine.url, source)
        wrong = False

        def note(problem: str | None) -> None:
            nonlocal wrong
            if problem is not None:
                count.inc()
                if not wrong:
                    self._notify(f"{engine.name} ({engine.url}) {source}: {problem}")
            elif wrong:
                self._notify(f"{engine.name} ({engine.url}) {source}: can be read again")
            wrong = problem is not None

        return note

    def release(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str], without: Collection[int]
    ) -> None:
        """Free the KV cache that a prefill engine holds for a request that ends elsewhere.

        vLLM has no call for it: a request for one token to a decode engine, in the background,
        fetches it. Else vLLM takes it back when its lease (``kv_lease_duration``, 30 s) ends.
        ``body``: with the cache's ``kv_transfer_params``; ``without``: decode engines to leave
        out."""
        engine = self.decode.least_loaded(without)
        if engine is None:
            self.counters.releases.labels("left").inc()
            return
        data = json.dumps(one_token_body(body, body["kv_transfer_params"])).encode()
        self._tasks.once("release of a KV cache", self._fetch(engine, Post(path, data, headers)))

    async def _fetch(self, engine: Engine, post: Post) -> None:
        status, limit_s = 0, self.config.first_token_timeout_s
        with suppress(EngineFailure):
            status = (await ask(self.session, engine, post, self.config, limit_s)).status
        self.counters.releases.labels("freed" if status == 200 else "left").inc()
