"""The judge of predictions: ``python tests/judge.py`` predicts the watched rows again and exits 1
where a cell of engine, GPU and model moves that CHANGELOG.md does not name.

``--update`` keeps their new predictions; ``--take DIR`` takes over those of a folder of ``eldr-sim
validate published --of launches --out DIR``. Both write the table of studies/record/cells.md, and
refuse cells that move unsaid."""

import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from eldr_sim.validation.published import judge
from eldr_sim.validation.published.freeze import freeze
from eldr_sim.validation.published.journal import OF_RUNS, read_journal
from eldr_sim.validation.published.runs import PublishedRun, predict, read_runs
from eldr_sim.validation.published.runs_page import MANY

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "validation" / "published" / "rows" / "predicted.json"
TABLE = ROOT / "docs" / "data" / "accuracy_cells.csv"


def watched() -> list[PublishedRun]:
    """Return the rows that every run of the tests predicts."""
    by_name = {run.name: run for run in read_runs()}
    return [by_name[name] for name in judge.WATCHED]


def main() -> None:
    """Predict again, compare, and keep what is asked to be kept."""
    runs, words = read_runs(), sys.argv[1:]
    before = judge.predictions(judge.kept()) if KEPT.exists() else {}
    if words[:1] == ["--take"]:
        after = read_journal(Path(words[1]) / OF_RUNS)
        after = {
            name: what
            for name, what in after.items()
            if isinstance(what, dict) and what["in_flight"] <= MANY
        }
    else:
        after = before | {run.name: predict(run) for run in watched()}
    moved = judge.moved(judge.cells(runs, before), judge.cells(runs, after)) if before else []
    print(*moved, sep="\n")
    if left := judge.unsaid(moved, (ROOT / "CHANGELOG.md").read_text()):
        sys.exit(f"CHANGELOG.md names none of: {'; '.join(left)}")
    if words:
        KEPT.unlink(missing_ok=True)
        date = datetime.now(UTC).strftime("%d %B %Y")
        predicted = [run for run in runs if run.name in after and run.measured]
        freeze(KEPT, predicted, after, version("eldr-sim"), date)
        judge.write_table(TABLE, judge.cells(runs, after).values(), date)
        print(f"kept {len(predicted)} predictions; render the pages: python docs/render.py")


if __name__ == "__main__":
    main()
