"""Runs shared by searches: each configuration is simulated once, many in parallel.

A search yields the configurations it needs next and is sent their summaries;
:meth:`RunCache.together` advances many in rounds, so that their runs fill the processes."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias, TypeVar

from eldr_sim.compiling import tell_of_compiling
from eldr_sim.errors import InputError
from eldr_sim.phases import report_phase
from eldr_sim.planning.runs.journal import Journal
from eldr_sim.planning.runs.runner import Point, check_backend, config_key, run_points
from eldr_sim.simulator.setup.config.run_config import RunConfig

T = TypeVar("T")
Summary: TypeAlias = Mapping[str, Any]
Search: TypeAlias = Generator[Sequence[RunConfig], Sequence[Summary], T]


class RunCache:
    """Summaries by configuration; no configuration is run twice.

    ``jobs``: see `run_points`; ``progress``: called after every run with the runs done and asked
    for, or expected; ``journal``: keeps the runs that have ended, and knows those of an earlier
    search."""

    def __init__(
        self,
        jobs: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        check_backend(jobs)
        self.jobs = jobs
        self.progress = progress
        self.journal = journal
        #: How many runs a search is likely to take, if it knows; for the estimate of its time.
        self.expected = 0
        self._made: dict[str, tuple[RunConfig, Summary]] = {}
        self._reporting = False

    def report_start(self) -> None:
        """Say on the terminal that a search begins, and what ends it."""
        kept = "nothing is written" if self.journal is None else "--resume goes on with its runs"
        report_phase(f"preparing; no limit of time is set, Ctrl-C ends it and {kept}")
        tell_of_compiling()
        self._reporting = True

    def __len__(self) -> int:
        return len(self._made)

    def made(self) -> list[tuple[RunConfig, Summary]]:
        """Return every simulated configuration with its summary."""
        return list(self._made.values())

    def summaries(self, configs: Sequence[RunConfig]) -> list[Summary]:
        """Return the summaries of configurations, in order; raises InputError if one fails."""
        keys = [config_key(config) for config in configs]
        new = {k: c for k, c in zip(keys, configs, strict=True) if k not in self._made}
        by_key: dict[str, Summary] = {}
        known = {} if self.journal is None else self.journal.outcomes
        for key in new.keys() & known.keys():
            if (summary := known[key].summary) is not None:
                by_key[key] = summary
        points = [Point(key, config) for key, config in new.items() if key not in by_key]
        if points and self._reporting:
            self._reporting = False
            about = f", about {self.expected} runs" if self.expected else ""
            report_phase(f"simulating{about}")
        with closing(run_points(points, self.jobs)) as outcomes:
            for outcome in outcomes:
                if outcome.summary is None:
                    failed = new[outcome.key]
                    where = f"{failed.policies.policy} on {failed.cluster.topology}"
                    raise InputError("run", f"{where}: {outcome.reason}")
                by_key[outcome.key] = outcome.summary
                if self.journal is not None:
                    self.journal.add(outcome)
                if self.progress is not None:
                    asked = max(len(self) + len(new), self.expected)
                    self.progress(len(self) + len(by_key), asked)
        # In the order asked for, not in the order of completion.
        self._made |= {key: (config, by_key[key]) for key, config in new.items()}
        return [self._made[key][1] for key in keys]

    def together(self, searches: Sequence[Search[T]]) -> list[T]:
        """Advance all searches in rounds to their ends, and return their results."""
        return self.ended(side_by_side(searches))

    def ended(self, search: Search[T]) -> T:
        """Advance a search to its end, and return its result."""
        found = None
        while True:
            try:
                asked = next(search) if found is None else search.send(found)
            except StopIteration as end:
                result: T = end.value
                return result
            found = self.summaries(asked)


def side_by_side(searches: Sequence[Search[T]]) -> Search[list[T]]:
    """Make one search of several: it asks for what all of them need next."""
    results: dict[int, T] = {}
    asked: dict[int, Sequence[RunConfig]] = {}

    def resume(index: int, summaries: list[Summary] | None) -> None:
        search = searches[index]
        try:
            asked[index] = next(search) if summaries is None else search.send(summaries)
        except StopIteration as end:
            results[index] = end.value
            asked.pop(index, None)

    for index in range(len(searches)):
        resume(index, None)
    while asked:
        found = iter((yield [config for configs in asked.values() for config in configs]))
        for index, configs in list(asked.items()):
            resume(index, [next(found) for _ in configs])
    return [results[index] for index in range(len(searches))]
