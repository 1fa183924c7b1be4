"""What every room tells a user, in a line: bad input, and what goes on but not as it should."""

from importlib import import_module
from typing import Any

PLOT = "pip install 'eldr-sim[plot]'"  #: how what draws pictures and pages is installed


class InputError(ValueError):
    """Bad input: one line, exit code 2. ``field``: option, config field, file or column;
    ``problem``: what was wrong, with the value; ``allowed``: what would do, left out when empty."""

    def __init__(self, field: str, problem: str, allowed: str = "") -> None:
        self.field = field
        self.problem = problem
        self.allowed = allowed
        super().__init__(f"{field}: {problem}" + (f" (allowed: {allowed})" if allowed else ""))


def needed(package: str, field: str, allowed: str = "pip install 'eldr-sim[live]'") -> Any:
    """Import an optional package, or a module of one.

    Args:
        package: dotted name of the module.
        field: the option or feature that needs it.
        allowed: the command that installs it.

    Returns:
        The imported module.

    Raises:
        InputError: the package is not installed.
    """
    top = package.partition(".")[0]
    try:
        import_module(top)  # a module of it may be loaded although it cannot be imported
        return import_module(package)
    except ModuleNotFoundError:
        name = top.replace("_", "-")
        raise InputError(field, f"{name} is not installed", allowed) from None


class EldrSimWarning(UserWarning):
    """What a user should know and may mend; the command line prints it as one line."""


class StalledError(RuntimeError):
    """A run that gets no further although requests are open: a fault of a policy, of a SimPy
    process or of eldr-sim, not of the input; one line, exit code 1."""


class ProcessError(RuntimeError):
    """A SimPy process of a simulation has failed: names it, the time and what it raised. ``name``:
    of the process: its generator's; ``time_s``: simulated time, s; ``error``: what it raised."""

    def __init__(self, name: str, time_s: float, error: Exception) -> None:
        self.name, self.time_s = name, time_s
        what = f"{type(error).__name__}: {error}"
        super().__init__(f"process {name!r} failed at {time_s:g} s of simulated time: {what}")
