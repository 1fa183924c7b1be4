"""The runs of a command that takes long, kept beside its output until that is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eldr_sim.outputs import written

if TYPE_CHECKING:  # the simulator takes long to import
    from eldr_sim.planning.runs.journal import Journal


def unfinished(out: Path) -> Path:
    """Return the folder that keeps what has ended until ``out`` is written."""
    return out.with_name(f"{out.name}.unfinished")


@contextmanager
def kept_runs(
    out: Path | None, resume: bool, what: str, identity: dict[str, Any] | None = None
) -> Iterator["Journal | None"]:
    """Keep ended runs in `unfinished`, which is removed with the end of the block.

    Args:
        out: what the command writes; None keeps nothing.
        resume: whether to go on with the runs of an interrupted command.
        what: what the folder holds, in words.
        identity: what must be equal to go on, besides the version."""
    from eldr_sim.planning.runs.journal import FILE_NAME, open_journal

    if out is None:
        yield None
        return
    folder = unfinished(out)
    header = {"eldr-sim": version("eldr-sim")} | (identity or {})
    with open_journal(folder, header, resume, what) as journal:
        try:
            yield journal
            journal.discard()
        finally:
            if out in written():
                journal.discard()
            if not journal.outcomes:
                for path in folder.iterdir():
                    if path.name != FILE_NAME:
                        path.unlink()
