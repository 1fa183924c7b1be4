"""Searches that ask for runs as they go, side by side: each run is made once.

A search is a generator: it yields the configurations whose summaries it wants next and is sent
those summaries. :meth:`Runs.together` carries many searches on at the same time, so that their
runs fill the processes of one evaluator, and remembers every summary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from eldr_sim.errors import InputError
from eldr_sim.planning.runner import Point, run_points
from eldr_sim.simulator.config import RunConfig
from eldr_sim.simulator.run import simulate_summary

T = TypeVar("T")
Summary: TypeAlias = Mapping[str, Any]
#: Runs configurations and returns their summaries in the same order.
Evaluator: TypeAlias = Callable[[Sequence[RunConfig]], Sequence[Summary]]
Task: TypeAlias = Generator[Sequence[RunConfig], Sequence[Summary], T]


def run_here(configs: Sequence[RunConfig]) -> list[Summary]:
    """Run configurations one after the other in this process."""
    summaries: list[Summary] = []
    for config in configs:
        summaries.append(simulate_summary(config))
        gc.collect()  # what a run leaves behind is cyclic and large
    return summaries


def on_processes(jobs: int | None = None) -> Evaluator:
    """Return an evaluator that makes runs side by side on processes of this machine.

    Parameters
    ----------
    jobs
        Processes; one a CPU when not given.
    """

    def evaluate(configs: Sequence[RunConfig]) -> list[Summary]:
        points = [Point(str(index), config) for index, config in enumerate(configs)]
        made: dict[str, Summary] = {}
        for outcome in run_points(points, jobs):
            if outcome.summary is None:
                config = configs[int(outcome.key)]
                raise InputError("run", f"{config.policy} on {config.topology}: {outcome.reason}")
            made[outcome.key] = outcome.summary
        return [made[point.key] for point in points]

    return run_here if jobs == 1 else evaluate


class Runs:
    """The runs of a question: made by an evaluator, kept by configuration.

    Parameters
    ----------
    evaluate
        Makes runs; free to make those of one call side by side.
    progress
        Called after every call of ``evaluate`` with the number of runs so far.
    """

    def __init__(self, evaluate: Evaluator, progress: Callable[[int], None] | None = None) -> None:
        self.evaluate = evaluate
        self.progress = progress
        self._made: dict[str, tuple[RunConfig, Summary]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def made(self) -> list[tuple[RunConfig, Summary]]:
        """Return every run and its summary."""
        return list(self._made.values())

    def summary(self, config: RunConfig) -> Summary:
        """Return the summary of a run that has been made."""
        return self._made[_key(config)][1]

    def make(self, configs: Sequence[RunConfig]) -> None:
        """Make those of the runs that have not been made."""
        new = {_key(config): config for config in configs}
        new = {key: config for key, config in new.items() if key not in self._made}
        if new:
            summaries = self.evaluate(list(new.values()))
            self._made.update(zip(new, zip(new.values(), summaries, strict=True), strict=True))
            if self.progress is not None:
                self.progress(len(self))

    def together(self, tasks: Sequence[Task[T]]) -> list[T]:
        """Carry all tasks on to their ends, round by round, and return what they return."""
        results: dict[int, T] = {}
        asked: dict[int, Sequence[RunConfig]] = {}

        def resume(index: int, answer: list[Summary] | None) -> None:
            task = tasks[index]
            try:
                asked[index] = next(task) if answer is None else task.send(answer)
            except StopIteration as end:
                results[index] = end.value
                asked.pop(index, None)

        for index in range(len(tasks)):
            resume(index, None)
        while asked:
            self.make([config for configs in asked.values() for config in configs])
            for index, configs in list(asked.items()):
                resume(index, [self.summary(config) for config in configs])
        return [results[index] for index in range(len(tasks))]


def _key(config: RunConfig) -> str:
    return config.model_dump_json()
