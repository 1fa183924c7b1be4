"""A run that shares its clock with a user's processes, as ``es.Simulation``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eldr_sim.cli import run as run_command
from eldr_sim.cli.api import Config, Run, options_of
from eldr_sim.cli.run_options import config_from_options
from eldr_sim.simulator import simulation
from eldr_sim.simulator.run import Backend
from eldr_sim.simulator.setup.config.run_config import RunConfig


class Simulation(simulation.Simulation):
    """One run that shares its clock with SimPy processes (docs/python.md).

    ``env`` is the `simpy.Environment` of the run; ``cluster`` sends requests and starts, stops and
    disturbs workers.

    Args:
        config: what ``options`` override; None: the defaults.
        arrivals: whether the configuration's load arrives; without it all requests come from
            processes, and those after the warm-up are measured.
        prefixes: whether requests bring the prefix blocks of their prompts
            (``request(prefix=[...])``); only without ``arrivals``.
        absent: workers of the topology that are missing until they are started:
            ``("decode:4",)``.
        backend: ``compiled``, ``simpy`` (the model as SimPy processes), ``vllm`` or ``sglang``.
        workers: for ``simpy``, classes in place of a pool's workers.
        options: options of ``eldr-sim run``, as of `run`.

    Raises:
        InputError: something does not exist or does not fit together.

    Examples
    --------
    >>> sim = es.Simulation(topology="2P4D", policy="jsq", arrivals=False)
    >>> def user():
    ...     ended = yield sim.cluster.request(prompt_len=500, output_len=100)
    ...     print(ended.ttft_s)
    >>> sim.env.process(user())
    >>> sim.run(until=60)
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        arrivals: bool = True,
        prefixes: bool = False,
        absent: Sequence[str] = (),
        backend: Backend = "compiled",
        workers: Mapping[str, type[Any]] | None = None,
        **options: Any,
    ) -> None:
        made = config
        if options or not isinstance(made, RunConfig):
            made = config_from_options(options_of(run_command.run, config, options))
        how: dict[str, Any] = {"prefixes": prefixes, "absent": absent}
        super().__init__(made, arrivals=arrivals, backend=backend, workers=workers, **how)

    def run(self, until: float | None = None) -> Run:
        """Advance the run and return its result so far, with open requests as unserved.

        Args:
            until: simulated time, s; None: to the end of the measured requests or, without
                arrivals, until no event is left.

        Returns:
            The run up to that time: ``summary``, ``frame``, ``steps_frame``.

        Raises:
            InputError: ``until`` is not after the time now.
            ProcessError: a process failed; the error names it.
        """
        return Run._of(super().run(until))
