"""Predictions on processes, each kept in a journal when it ends, so that a run that was cut goes
on."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eldr_sim.kinds import Progress, no_progress

#: Figures, or why there are none.
Found = dict[str, float] | str


def predicted(
    tasks: Mapping[str, Callable[[], Found]],
    journal: Path,
    jobs: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Found]:
    """Call all tasks that the journal does not hold, in their order; return what all yield by key.

    ``jobs``: processes, one a CPU when None."""
    from joblib import Parallel, delayed  # takes long to import

    journal.parent.mkdir(parents=True, exist_ok=True)
    found = read_journal(journal)
    todo = {key: task for key, task in tasks.items() if key not in found}
    calls = (delayed(_timed)(key, task) for key, task in todo.items())
    with journal.open("a", encoding="utf-8") as file:
        made: Any = Parallel(n_jobs=jobs or -1, return_as="generator_unordered", batch_size=1)
        for done, (key, what, cpu_s) in enumerate(made(calls), 1):
            found[key] = what
            file.write(json.dumps({"key": key, "found": what, "cpu_s": round(cpu_s, 2)}) + "\n")
            file.flush()
            progress(done / len(todo))
    return found


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
