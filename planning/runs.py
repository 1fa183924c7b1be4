"""The runs of a question: each configuration is simulated once, many side by side.

A search is a generator: it yields the configurations whose summaries it wants next and is sent
those summaries. :meth:`Runs.together` carries many searches on at the same time, so that their
runs fill the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias, TypeVar

from eldr_sim.errors import InputError
from eldr_sim.planning.runner import Point, check_backend, config_key, run_points
from eldr_sim.simulator.config import RunConfig

T = TypeVar("T")
Summary: TypeAlias = Mapping[str, Any]
Task: TypeAlias = Generator[Sequence[RunConfig], Sequence[Summary], T]


class Runs:
    """Summaries by configuration; what has been run is not run again.

    Parameters
    ----------
    jobs
        Processes, see :func:`~eldr_sim.planning.runner.run_points`.
    progress
        Called after every run with the numbers of runs done and asked for so far.
    """

    def __init__(
        self, jobs: int | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        check_backend(jobs)
        self.jobs = jobs
        self.progress = progress
        self._made: dict[str, tuple[RunConfig, Summary]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def made(self) -> list[tuple[RunConfig, Summary]]:
        """Return every configuration that was run, with its summary."""
        return list(self._made.values())

    def summaries(self, configs: Sequence[RunConfig]) -> list[Summary]:
        """Return the summaries of configurations, in order; run those that have not been run.

        Raises
        ------
        InputError
            If a run fails; the others are given up.
        """
        keys = [config_key(config) for config in configs]
        new = {k: c for k, c in zip(keys, configs, strict=True) if k not in self._made}
        found: dict[str, Summary] = {}
        points = [Point(key, config) for key, config in new.items()]
        with closing(run_points(points, self.jobs)) as outcomes:
            for outcome in outcomes:
                if outcome.summary is None:
                    failed = new[outcome.key]
                    where = f"{failed.policy} on {failed.topology}"
                    raise InputError("run", f"{where}: {outcome.reason}")
                found[outcome.key] = outcome.summary
                if self.progress is not None:
                    self.progress(len(self) + len(found), len(self) + len(new))
        # In the order in which they were asked for, not in that in which they ended.
        self._made |= {key: (config, found[key]) for key, config in new.items()}
        return [self._made[key][1] for key in keys]

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
            self.summaries([config for configs in asked.values() for config in configs])
            for index, configs in list(asked.items()):
                resume(index, self.summaries(configs))
        return [results[index] for index in range(len(tasks))]
