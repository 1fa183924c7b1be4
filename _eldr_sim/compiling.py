"""How far the first run on a machine has come with compiling the simulator."""

from eldr_sim.jit import is_cold
from eldr_sim.phases import has_listener, report_phase

_EVENT = "numba:compile"
#: A default run compiles 274 functions, at an even pace (0.1 s of a processor each), and the last
#: of them, the loop that holds the others, takes as long as 50.
_FUNCTIONS, _LAST = 324, "advance"


def tell_of_compiling() -> None:
    """Report that the simulator is compiled now, if it is, and the share that is done.

    Processes that compile by themselves report no share."""
    if has_listener() and is_cold():
        what = "compiling the simulator, once on this machine: a minute or two"
        report_phase(what)
        _tell_shares(what)


def _tell_shares(what: str) -> None:
    from numba.core import event

    class Share(event.Listener):
        """Reports the share of the functions that are compiled, until the last one is."""

        def __init__(self) -> None:
            self._done = 0

        def on_start(self, _event: event.Event) -> None:
            """Do nothing."""

        def on_end(self, event_: event.Event) -> None:
            """Report the share; a run that needs more functions stays just below the whole."""
            self._done += 1
            if event_.data["dispatcher"].py_func.__name__ == _LAST:
                event.unregister(_EVENT, self)
                report_phase(what, 1.0)
            else:
                report_phase(what, min(self._done / _FUNCTIONS, 0.99))

    event.register(_EVENT, Share())
