"""Where the command ``eldr-sim`` starts: Ctrl-C while it is imported is one line, too."""

import gc
import os
import sys
import threading

from eldr_sim.phases import HARMLESS

_SILENT_S = 1.0
_working: threading.Timer | None = None


def main() -> None:
    """Import the command line and run it; a terminal shows a message after a second."""
    global _working
    # Matrices are small: more threads only wait for each other, for minutes on a busy machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for some takes time
    gc.set_threshold(200_000)  # cycles are few; to look for them was a tenth of a short run
    if sys.stderr is not None and sys.stderr.isatty():
        _working = threading.Timer(_SILENT_S, sys.stderr.write, ["working...\r"])
        _working.daemon, _working.name = True, f"{HARMLESS}working"
        _working.start()
    try:
        try:
            from eldr_sim.cli.main import main as run
        except KeyboardInterrupt:
            sys.stderr.write("Interrupted: nothing was written.\n")
            sys.exit(130)
        run()
    finally:
        gc.freeze()  # nor are they looked for at the end
        show_nothing_more()


def show_nothing_more() -> None:
    """Leave the terminal to whoever shows what is done."""
    if _working is not None:
        _working.cancel()
