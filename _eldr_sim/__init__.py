"""eldr-sim: a discrete-event simulator of language-model serving with per-token expert routing.

Routing is drawn from a model's recording by default; ``trace=`` replays a recording.

The commands are functions, and their options are keywords (docs/python.md)::

    import eldr_sim as es

    result = es.run(policy="eldr", topology="8P16D", request_rate=80)

A name is imported when it is first used, so that ``import eldr_sim`` stays light."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from eldr_sim.cli.api import run
    from eldr_sim.cli.api_many import compare, plan, what_if
    from eldr_sim.cli.api_simulation import Simulation
    from eldr_sim.planning.runs.sweep import sweep
    from eldr_sim.reports.page import write_report
    from eldr_sim.simulator.setup.config.run_config import RunConfig

__all__ = [
    "RunConfig", "Simulation", "__version__", "compare", "plan", "run", "sweep", "what_if",
    "write_report",
]  # fmt: skip

#: Variables of the environment while modules are imported, where they are not set: no search for
#: plugins of pydantic, of which our models have none; idle threads of NumPy's BLAS sleep instead of
#: waiting busily for 2^26 cycles (OpenBLAS's default).
_MEANWHILE = {"PYDANTIC_DISABLE_PLUGINS": "__all__", "OPENBLAS_THREAD_TIMEOUT": "4"}
_HOME = {
    "Simulation": "eldr_sim.cli.api_simulation",
    "run": "eldr_sim.cli.api",
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
        with _at_once():
            value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'eldr_sim' has no attribute {name!r}")
    globals()[name] = value
    return value


@contextmanager
def _at_once() -> Iterator[None]:
    """Import modules without what only takes time: `_MEANWHILE`, and the search for garbage, of
    which they leave none. Where Python has not looked through all objects yet, those that are there
    are its modules and ours, and no longer looked at: each look was a twentieth of a short run, and
    there are four at the end."""
    is_young, is_on = gc.get_stats()[2]["collections"] == 0, gc.isenabled()
    ours = {name: value for name, value in _MEANWHILE.items() if name not in os.environ}
    os.environ |= ours
    gc.disable()
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
        if is_young:
            gc.freeze()
        if is_on:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
