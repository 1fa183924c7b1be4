"""Where the command ``eldr-sim`` starts: Ctrl-C while it is imported is one line, too."""

import sys


def main() -> None:
    """Import the command line and run it."""
    try:
        from eldr_sim.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted: nothing was written.\n")
        sys.exit(130)
    run()
