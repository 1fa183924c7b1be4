"""eldr-sim: a discrete-event simulator of MoE serving that replays real expert routing.

What the commands do is here under the same names (docs/python_api.py walks through it)::

    from eldr_sim import RunConfig, simulate

    result = simulate(RunConfig(policy="eldr", topology="8P16D", request_rate=80))

A name is imported when it is first used, so that ``import eldr_sim`` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from eldr_sim.planning.compare.policies import compare
    from eldr_sim.planning.compare.what_if import what_if
    from eldr_sim.planning.runs.sweep import sweep
    from eldr_sim.planning.search.plan import plan
    from eldr_sim.planning.slo import Objective
    from eldr_sim.reports.page import write_report
    from eldr_sim.simulator.results import write_result
    from eldr_sim.simulator.run import simulate
    from eldr_sim.simulator.setup.config import RunConfig
    from eldr_sim.simulator.simulation import Simulation

__all__ = [
    "Objective",
    "RunConfig",
    "Simulation",
    "__version__",
    "compare",
    "plan",
    "simulate",
    "sweep",
    "what_if",
    "write_report",
    "write_result",
]

_HOME = {
    "Objective": "eldr_sim.planning.slo",
    "RunConfig": "eldr_sim.simulator.setup.config",
    "Simulation": "eldr_sim.simulator.simulation",
    "compare": "eldr_sim.planning.compare.policies",
    "plan": "eldr_sim.planning.search.plan",
    "simulate": "eldr_sim.simulator.run",
    "sweep": "eldr_sim.planning.runs.sweep",
    "what_if": "eldr_sim.planning.compare.what_if",
    "write_report": "eldr_sim.reports.page",
    "write_result": "eldr_sim.simulator.results",
}


def __getattr__(name: str) -> Any:
    """Import a name of the API (PEP 562)."""
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("eldr-sim")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'eldr_sim' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
