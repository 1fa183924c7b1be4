"""A simulated cluster in the wall clock's time, ``(wall - start) * speed``. It advances to now when
a request comes, else when its next event is due. A step's end is known when it begins: tokens are
handed out at their own time; what they are late is the event loop's doing (`Core.lag`)."""

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json, read_text
from eldr_sim.serving.log import RequestLog
from eldr_sim.serving.simulated.handover import Role
from eldr_sim.simulator.plane.kv.kv_cache import forget_blocks
from eldr_sim.simulator.plane.state import COMPLETED, OUTCOMES
from eldr_sim.simulator.run import Result
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config
from eldr_sim.simulator.simulation import Simulation

#: The cluster advances no more often than this, s of the wall clock.
_TICK_S = 0.0005
#: How many times as long a step takes that stands for the work of another server.
_IN_NO_TIME = 1e-9
#: Tokens of prompt and answer of a request that is run beforehand: everything is compiled then.
_WARM = 100, 3


class Stream:
    """A request in flight. ``reason``: why its answer ends, as OpenAI says; ``tokens``: numbers of
    tokens as they are due, at last a text of `state.OUTCOMES`; ``times_s``: simulated time of
    each; ``letters``: characters of the answer, where a stop string cuts it; ``adapter``: of LoRA;
    ``blocks``: numbers of its prefix blocks."""

    def __init__(
        self, number: int, prompt_len: int, output_len: int, reason: str, blocks: list[int]
    ) -> None:
        self.number, self.prompt_len, self.output_len = number, prompt_len, output_len
        self.reason, self.blocks = reason, blocks
        self.letters: int | None = None
        self.adapter: str | None = None
        self.tokens: asyncio.Queue[int | str] = asyncio.Queue()
        self.times_s: list[tuple[int, float]] = []
        self.known = self.given = 0

    def give(self, total: int, at_s: float) -> None:
        """Hand out the tokens up to this number."""
        if total > self.given:
            self.tokens.put_nowait(total - self.given)
            self.times_s.append((total - self.given, at_s))
            self.given = total


class Core:
    """A cluster that serves; raises InputError if it cannot serve requests of any length.
    ``config``: also of answers' lengths and routing; ``speed``: simulated seconds a second;
    ``log``: see `replay`; ``lag``: called with what tokens are late, s of the wall clock;
    ``on_blocks``: called with a worker, and the blocks that its prefix cache has got and lost;
    ``role``: of the one worker that it stands for, see `handover`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        speed: float = 1.0,
        log: RequestLog | None = None,
        lag: Callable[[float], None] = lambda _s: None,
        on_blocks: Callable[[int, Sequence[int], Sequence[int]], None] | None = None,
        role: Role | None = None,
    ) -> None:
        if not config.cluster.generates and role is None:
            raise InputError(
                "topology", f"{config.cluster.topology} generates nothing", "xPyD or xC"
            )
        warm = Simulation(config, arrivals=False, prefixes=True)
        warm.cluster.submit(*_WARM)  # what cannot be sent so is refused here
        warm.advance(60.0)
        self.config, self.speed, self.lag = config, speed, lag
        self.simulation = Simulation(config, arrivals=False, prefixes=True, on_blocks=on_blocks)
        self.cluster = self.simulation.cluster
        self.role = role
        engines = self.cluster.cluster.arrays.engines
        of_role = engines.pool_of == ("prefill", "decode").index(role) if role else slice(None)
        #: Numbers of the engines that it stands for.
        self.numbers = np.arange(len(engines.workers))[of_role].tolist()
        if role == "decode":
            engines.workers["slowdown"][engines.pool_of == 0] = _IN_NO_TIME
        self.open: dict[int, Stream] = {}
        self.ended: Callable[[Stream, str], None] = lambda _stream, _outcome: None
        self.failure: asyncio.Future[None] | None = None
        self._log, self._start = log, math.nan
        self._timer: asyncio.TimerHandle | None = None
        self._write(config=config.model_dump(mode="json"), speed=speed)

    def start(self) -> None:
        """Let time begin, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.failure = self.failure or self._loop.create_future()
        self._start = self._loop.time()
        self._tick()

    @property
    def now_s(self) -> float:
        """Simulated time, s."""
        return (self._loop.time() - self._start) * self.speed

    @property
    def waiting(self) -> int:
        """Requests that no engine has begun to compute."""
        numbers = np.fromiter(self.open, np.int64)
        begun = "decode_start_s" if self.role == "decode" else "prefill_start_s"
        return int((self.cluster.requests[begun][numbers] < 0.0).sum())

    def engines(self) -> list[tuple[int, int, float]]:
        """Return the figures of `Control.engines` for the engines that it stands for."""
        engines = self.cluster.engines()
        return [engines[number] for number in self.numbers]

    def kv_blocks(self) -> list[int]:
        """Return the KV blocks of each engine that it stands for."""
        blocks = self.cluster.kv_blocks()
        return [blocks[number] for number in self.numbers]

    def submit(
        self,
        prompt_len: int,
        least: int = 1,
        most: int | None = None,
        prefix: Callable[[int], Sequence[Hashable]] = lambda _output_len: (),
        stop: Callable[[int], tuple[int, int | None]] = lambda output_len: (output_len, None),
    ) -> Stream:
        """Let a request arrive now; its answer is as long as the workload's next, within ``least``
        and ``most``. ``prefix``: names of its blocks, see `Control.request`; ``stop``: what a stop
        string leaves of an answer, see `asked.stopped`."""
        self._advance()
        drawn = max(least, min(self.cluster.coming()[1], most or 1 << 30))
        output_len, letters = stop(drawn)
        names = prefix(output_len)
        number = self.cluster.submit(prompt_len, output_len, names)
        entry: dict[str, Any] = {"prompt_len": prompt_len, "output_len": output_len}
        blocks: list[int] = []
        if len(names):
            workload = self.cluster.cluster.workload
            first, end = workload.prefix_indptr[number : number + 2].tolist()
            blocks = entry["prefix"] = workload.prefix_hash[first:end].tolist()
        reason = "length" if output_len == most and letters is None else "stop"
        stream = self.open[number] = Stream(number, prompt_len, output_len, reason, blocks)
        stream.letters = letters
        self._write(t=self.simulation.env.now, **entry)
        self._soon()
        return stream

    def forget(self) -> None:
        """Let the prefix caches of all workers be empty."""
        self._advance()
        arrays = self.cluster.cluster.arrays.engines
        for worker in range(len(arrays.workers)):
            forget_blocks(arrays.kv, worker)
        self.cluster.cluster.policy_calls.hear()

    def set_speed(self, speed: float) -> None:
        """Let simulated time pass at another speed from now on."""
        self._advance()
        now_s = self.now_s
        self.speed = speed
        self._start = self._loop.time() - now_s / speed
        self._soon()

    def cached_tokens(self, stream: Stream) -> int:
        """Return the tokens of a request's prompt that were found in a prefix cache."""
        return max(0, int(self.cluster.requests["cached_tokens"][stream.number]))

    def cancel(self, stream: Stream) -> None:
        """Let a client give up, unless its request has ended."""
        if self.open.pop(stream.number, None) is not None:
            self._advance()
            self.cluster.cancel(stream.number)
            self._write(t=self.simulation.env.now, cancel=stream.number)
            self.ended(stream, "cancelled")
            self._soon()

    def _soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """Advance to now, and come again when the next thing is due."""
        try:
            self._advance()
        except BaseException as error:
            assert self.failure is not None
            if not self.failure.done():
                self.failure.set_exception(error)
            return
        due = self.simulation.next_s
        self._timer = None
        if due < math.inf:
            wait = max(_TICK_S, (due - self.now_s) / self.speed)
            self._timer = self._loop.call_later(wait, self._tick)

    def _advance(self) -> None:
        if self.now_s > self.simulation.env.now:
            self.simulation.advance(self.now_s)
        for due, numbers, totals in self.cluster.generating():
            new = []
            for number, total in zip(numbers.tolist(), totals.tolist(), strict=True):
                stream = self.open.get(number)
                if stream is not None and total > stream.known:
                    stream.known = total
                    new.append((stream, total))
            if new:
                self._loop.call_at(self._wall(due), self._hand_out, new, due)
        numbers = np.fromiter(self.open, np.int64)
        for number in numbers[self.cluster.requests["outcome"][numbers] > 0].tolist():
            record = self.cluster.requests[number]
            stream, at = self.open.pop(number), float(record["finish_s"])
            at = at if at >= 0.0 else float(self.simulation.env.now)
            self._loop.call_at(self._wall(at), self._end, stream, int(record["outcome"]), at)
        self.cluster.cluster.policy_calls.hear()

    def _wall(self, at_s: float) -> float:
        return self._start + at_s / self.speed

    def _hand_out(self, new: list[tuple[Stream, int]], at_s: float) -> None:
        self.lag(self._loop.time() - self._wall(at_s))
        for stream, total in new:
            stream.give(total, at_s)

    def _end(self, stream: Stream, outcome: int, at_s: float) -> None:
        if outcome == COMPLETED:
            stream.give(stream.output_len, at_s)
        stream.tokens.put_nowait(OUTCOMES[outcome])
        self.ended(stream, OUTCOMES[outcome])

    def _write(self, **entry: Any) -> None:
        if self._log is not None:
            self._log.write(entry)


def replay(path: str | Path) -> Result:
    """Run what a server has logged again, without waiting: the last start of it, where a log has
    several. Raises InputError if it is no such log."""
    lines = read_text(path, "replay", limit=1 << 32).splitlines()
    entries = [parse_json(line, "replay", f"{path}, line {n}") for n, line in enumerate(lines, 1)]
    heads = [n for n, entry in enumerate(entries) if isinstance(entry, dict) and "config" in entry]
    if not heads or heads[0] > 0:
        raise InputError("replay", f"{path} is not a log of eldr-sim serve")
    entries, skipped = entries[heads[-1] :], heads[-1]
    simulation = Simulation(make_config(entries[0]["config"]), arrivals=False, prefixes=True)
    cluster = simulation.cluster
    for line, entry in enumerate(entries[1:], skipped + 2):
        try:
            at = float(entry["t"])
            if at > simulation.env.now:
                simulation.advance(at)
            if "cancel" in entry:
                cluster.cancel(int(entry["cancel"]))
            else:
                prefix = [int(number) for number in entry.get("prefix", ())]
                cluster.submit(int(entry["prompt_len"]), int(entry["output_len"]), prefix)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError("replay", f"{path}, line {line}: {error}") from None
    return simulation.run()
