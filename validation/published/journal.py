"""Predictions on processes, each kept in a journal when it ends, so that a run that was cut goes
on."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from eldr_sim.kinds import Progress, no_progress
from eldr_sim.outputs import writing

#: Journals of a folder: of runs with their launch lines, and of rows of aiconfigurator-core.
OF_RUNS, OF_RECORD = JOURNALS = "runs.jsonl", "predictions.jsonl"
#: Figures, or why there are none.
Found = dict[str, float] | str


def predicted(
    tasks: Mapping[str, Callable[[], Found]],
    journal: Path | None,
    jobs: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Found]:
    """Call all tasks that the journal does not hold, in their order; return what all yield by key.

    ``journal``: None keeps nothing; ``jobs``: processes, number of CPUs when None."""
    from joblib import Parallel, delayed  # takes long to import

    predictions = {} if journal is None else read_journal(journal)
    todo = {key: task for key, task in tasks.items() if key not in predictions}
    calls = (delayed(_timed)(key, task) for key, task in todo.items())
    made: Any = Parallel(n_jobs=jobs or -1, return_as="generator_unordered", batch_size=1)
    with writing(journal or Path(os.devnull)):
        if journal is not None:
            journal.parent.mkdir(parents=True, exist_ok=True)
        with open(journal or os.devnull, "a", encoding="utf-8") as file:
            for done, (key, what, cpu_s) in enumerate(made(calls), 1):
                predictions[key] = what
                entry = {"key": key, "found": what, "cpu_s": round(cpu_s, 2)}
                file.write(json.dumps(entry) + "\n")
                file.flush()
                progress(done / len(todo))
    return predictions


def kept(folder: Path, *journals: str) -> str:
    """Say what an interrupted command keeps in the journals of a folder, which is removed if it
    holds nothing."""
    with suppress(OSError):
        for path in map(folder.joinpath, journals):
            if path.exists() and path.stat().st_size == 0:
                path.unlink()
        folder.rmdir()
    if not folder.exists():
        return ""
    done = sum(len(read_journal(folder / name)) for name in journals)
    predictions = f"{done} ended prediction{'s' * (done != 1)}"
    return f"{folder} keeps {predictions}; the same command continues."


def read_journal(journal: Path) -> dict[str, Found]:
    """Return what a journal holds, by key; without its last line where that was cut."""
    if not journal.exists():
        return {}
    text = journal.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]  # the last line may be cut
    if whole != text:
        journal.write_text(whole, encoding="utf-8")
    return {entry["key"]: entry["found"] for entry in map(json.loads, whole.splitlines())}


def _timed(key: str, task: Callable[[], Found]) -> tuple[str, Found, float]:
    began = time.process_time()
    return key, task(), time.process_time() - began
