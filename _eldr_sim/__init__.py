"""eldr-sim: a discrete-event simulator of language-model serving with per-token expert routing.

Routing is drawn from a model's recording by default; ``trace=`` replays a recording.

The commands are functions, and their options are keywords (docs/python.md)::

    import eldr_sim as es

    result = es.run(policy="eldr", topology="8P16D", request_rate=80)

A name is imported when it is first used, so that ``import eldr_sim`` stays light."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from eldr_sim.cli.api import Simulation, run
    from eldr_sim.cli.api_many import compare, plan, what_if
    from eldr_sim.planning.runs.sweep import sweep
    from eldr_sim.reports.page import write_report
    from eldr_sim.simulator.setup.config.run_config import RunConfig

__all__ = [
    "RunConfig", "Simulation", "__version__", "compare", "plan", "run", "sweep", "what_if",
    "write_report",
]  # fmt: skip

_HOME = {
    **dict.fromkeys(("Simulation", "run"), "eldr_sim.cli.api"),
    **dict.fromkeys(("compare", "plan", "what_if"), "eldr_sim.cli.api_many"),
    "RunConfig": "eldr_sim.simulator.setup.config.run_config",
    "sweep": "eldr_sim.planning.runs.sweep",
    "write_report": "eldr_sim.reports.page",
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
