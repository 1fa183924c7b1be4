"""Set-ups of a live validation: engines, their cores, and the proxy in front of them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eldr_sim.errors import InputError
from eldr_sim.validation.live.engines.servers import (
    EngineOptions,
    EngineProcess,
    answers,
    free_port,
)

Role = Literal["prefill", "decode", "colocated"]

SETUPS: dict[str, tuple[tuple[str, Role], ...]] = {
    "colocated": (("engine0", "colocated"),),
    "1P1D": (("prefill0", "prefill"), ("decode0", "decode")),
    "1P2D": (("prefill0", "prefill"), ("decode0", "decode"), ("decode1", "decode")),
}
"""Engines by the name of the set-up: name and role, prefill engines first."""
_ENGINES = SETUPS | {"2C": (("engine0", "colocated"), ("engine1", "colocated"))}

#: Cores on a machine without GPUs, by set-up and engine: (compute thread, all other threads). A
#: lone engine has a core for its model. Of several engines each shares a core with its own front
#: end, which works while the model waits. Client and proxy share the first core; with two decode
#: engines the proxy is on the second.
_CORES = {
    "colocated": {"engine0": (1, 0)},
    "1P1D": {"prefill0": (0, 0), "decode0": (1, 1)},
    "1P2D": {"prefill0": (0, 0), "decode0": (0, 0), "decode1": (1, 1)},
    "2C": {"engine0": (0, 0), "engine1": (1, 1)},
}
_PROXY_CORES = {"1P2D": 1, "2C": 1}
_PROXY_LIMIT_S = 60.0
_ANSWER_LIMIT_S = 900.0


@dataclass(frozen=True)
class Endpoint:
    """A running engine."""

    #: ``name``, ``role``: as in the set-up.
    name: str
    role: Role
    url: str  #: base URL
    log: Path  #: folder that ``ELDR_SIM_TIMING`` and ``ELDR_SIM_CAPTURE`` name in its environment


@dataclass(frozen=True)
class Setup:
    """A running set-up."""

    name: str  #: name such as ``1P1D``
    endpoints: tuple[Endpoint, ...]  #: engines, prefill engines first
    folder: Path  #: folder for the logs of proxies
    #: Core of client and proxy on a machine without GPUs; None does not pin them.
    client_core: int | None = None
    #: The engines that were started here, in the order of `endpoints`.
    engines: list[EngineProcess] = field(default_factory=list, repr=False)

    @property
    def prefill(self) -> list[Endpoint]:
        """Engines that compute prompts only."""
        return [e for e in self.endpoints if e.role == "prefill"]

    @property
    def decode(self) -> list[Endpoint]:
        """Decode or co-located engines."""
        return [e for e in self.endpoints if e.role != "prefill"]

    @property
    def prefilled(self) -> bool:
        """Whether prompts are computed before a run: prefill would share a decode engine's core."""
        return self.client_core is not None and bool(self.prefill) and len(self.decode) > 1

    def check_alive(self) -> None:
        """Raise InputError if an engine started here has ended."""
        for engine in self.engines:
            engine.check_alive()


@contextmanager
def started_setup(name: str, options: EngineOptions, folder: Path, *, gpu: bool) -> Iterator[Setup]:
    """Start the engines of a set-up, and stop them in the end. ``gpu``: on GPUs, as
    CUDA_VISIBLE_DEVICES has them, else on cores. Raises InputError if one does not start."""
    engines, size = [], options.tensor_parallel_size
    for i, (label, role) in enumerate(_ENGINES[name]):
        cores: tuple[int | None, int | None] = (None, None) if gpu else _CORES[name][label]
        devices = tuple(range(i * size, (i + 1) * size)) if gpu else ()
        engines.append(EngineProcess(options, label, role, folder / label, *cores, devices))
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait()
        points = tuple(Endpoint(e.name, e.role, e.url, e.log) for e in engines)
        yield Setup(name, points, folder, None if gpu else 0, engines)


def existing_setup(
    folder: Path, prefill: Sequence[tuple[str, Path]], decode: Sequence[tuple[str, Path]]
) -> Setup:
    """Return a set-up of engines that run here: URL and log folder of each; without ``prefill``
    co-located. ``folder``: for proxies' logs."""
    named: tuple[str, Role] = ("decode", "decode") if prefill else ("engine", "colocated")
    points = [Endpoint(f"prefill{i}", "prefill", *place) for i, place in enumerate(prefill)]
    points += [Endpoint(f"{named[0]}{i}", named[1], *place) for i, place in enumerate(decode)]
    name = f"{len(prefill)}P{len(decode)}D" if prefill else f"{len(decode)}C"
    return Setup("colocated" if name == "1C" else name, tuple(points), folder)


@contextmanager
def start_proxy(
    setup: Setup,
    policy: str,
    log: Path,
    artifact: Path | None = None,
    seed: int = 0,
    **changes: Any,
) -> Iterator[str]:
    """Run the proxy before a set-up and yield its URL; a lone engine's own. ``changes``: of a
    `ProxyConfig` that ends where an engine fails. InputError if it does not start."""
    if len(setup.endpoints) == 1:
        yield setup.endpoints[0].url
        return
    port = free_port()
    config = {
        "port": port,
        "prefill_urls": [] if setup.prefilled else [e.url for e in setup.prefill],
        "decode_urls": [e.url for e in setup.decode],
        "prefilled": setup.prefilled,
        "policy": policy if artifact is None else f"{policy}:artifact={artifact}",
        "seed": seed,
        "capture": [str(e.log) for e in setup.prefill],
        "log": str(log),
        # A run in which an engine fails is none: the client, which waits shorter, is to see it.
        "retries": 0,
        "first_token_timeout_s": _ANSWER_LIMIT_S,
        "token_timeout_s": _ANSWER_LIMIT_S,
        "health_timeout_s": _PROXY_LIMIT_S,
    } | changes
    file = log.with_suffix(".config.json")
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    output = log.with_suffix(".txt")
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "eldr_sim.serving.router.proxy", str(file)],
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
        )
    try:
        if setup.client_core is not None:
            core = _PROXY_CORES.get(setup.name, setup.client_core)
            os.sched_setaffinity(process.pid, {core})
        url = f"http://127.0.0.1:{port}"
        if not answers(url, process, _PROXY_LIMIT_S):
            lines = output.read_text(encoding="utf-8").splitlines() or ["no output"]
            raise InputError("proxy", f"did not start: {lines[-1]}")
        yield url
    finally:
        process.terminate()
        process.wait()
