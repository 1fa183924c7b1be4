"""A profile: measure within a budget, journal, resume, write tables (``docs/profiling.md``)."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.kernel_profiles.gpus import list_gpus
from eldr_sim.kernel_profiles.kernels import kernel_latency
from eldr_sim.kernel_profiles.kernels.moe_latency import fit_moe_latency
from eldr_sim.kernel_profiles.profile import table_fit
from eldr_sim.kernel_profiles.profile.device import (
    Device,
    copy_bandwidth,
    differing_facts,
    gemm_flops,
    gpu_entry,
    reference_s,
)
from eldr_sim.kernel_profiles.profile.measurement_plan import (
    PARTS,
    Outcome,
    Target,
    Task,
    Workbench,
    make_plan,
)
from eldr_sim.kernel_profiles.profile.records import HOT, MAIN, Record, tables_of
from eldr_sim.kernel_profiles.profile.table_fit import Difference, differences
from eldr_sim.kernel_profiles.tables.format import LatencyTable, table_name
from eldr_sim.outputs import keeping, whole_file, writing

JOURNAL = "journal.jsonl"
#: A reference point is measured again after this many seconds; a run ends if its clocks drift by
#: more than this share.
REFERENCE_EVERY_S, MOST_DRIFT = 30.0, 0.05
_FORMAT = 1
Clock = Callable[[], float]


@dataclass
class Journal:
    """What has been measured, on disk line by line."""

    path: Path  #: of the file
    header: dict[str, Any]  #: device, facts, copy bandwidth, GEMM throughput
    outcomes: dict[str, Outcome] = field(default_factory=dict)  #: by task

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> "Journal":
        """Begin a journal."""
        journal = cls(path, {"format": _FORMAT, **header})
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(journal.header) + "\n", encoding="utf-8")
        return journal

    @classmethod
    def read(cls, path: Path) -> "Journal":
        """Read a journal without a cut last line; raises InputError if there is none."""
        lines = read_text(path, "resume").split("\n")
        cut = lines.pop()  # empty after a whole line
        try:
            header = json.loads(lines[0]) if lines else {}
            if header.get("format") != _FORMAT:
                raise InputError("resume", f"{path} is not a journal of this version")
            journal = cls(path, header)
            for line in lines[1:]:
                entry = json.loads(line)
                records = [Record.from_json(values) for values in entry["records"]]
                journal.outcomes[entry["task"]] = Outcome(records, entry["note"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError("resume", f"{path} is damaged: {error}") from None
        if cut:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - len(cut.encode()))
        return journal

    def add(self, task: str, outcome: Outcome) -> None:
        """Note a task as done."""
        records = [record.to_json() for record in outcome.records]
        line = json.dumps({"task": task, "records": records, "note": outcome.note})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.outcomes[task] = outcome

    @property
    def records(self) -> list[Record]:
        """Rows of all tasks."""
        return [record for outcome in self.outcomes.values() for record in outcome.records]


@dataclass(frozen=True)
class Profile:
    """What a session leaves behind."""

    out: Path  #: folder
    tables: Sequence[Path]  #: paths of the tables that a run uses
    summary: dict[str, Any]  #: as in ``profile.json``
    differences: Sequence[Difference]  #: points that a shipped table has, too


def open_journal(out: Path, device: Device, resume: bool) -> Journal:
    """Begin a profile, or go on with one of the very same device. Raises InputError: the folder is
    in use, or the earlier profile's device differs in any recorded fact: a name alone does not
    do."""
    path = out / JOURNAL
    if out.exists() and not out.is_dir():
        raise InputError("out", f"{out} is a file", "a folder")
    if path.exists():
        if not resume:
            raise InputError("out", f"{out} already has a profile", "--resume, or another folder")
        journal = Journal.read(path)
        differing = differing_facts(journal.header["facts"], device.facts)
        if differing:
            problem = f"{out} was measured on another set-up: {'; '.join(differing)}"
            raise InputError("resume", problem)
        return journal
    if out.exists() and any(out.iterdir()):
        raise InputError("out", f"{out} exists and is not a profile", "a new folder")
    header = {
        "device": device.name,
        "facts": dict(device.facts),
        "copy_bandwidth": copy_bandwidth(device),
        "gemm_flops": gemm_flops(device),
    }
    return Journal.create(path, header)


def profile(
    targets: Sequence[Target],
    device: Device,
    out: Path,
    *,
    budget_s: float,
    parts: Sequence[str] = PARTS,
    resume: bool = False,
    progress: Callable[[float, str], None] = lambda share, task: None,
    clock: Clock = time.monotonic,
) -> Profile:
    """Measure models' kernels on a device and write what was found.

    Raises InputError, see :func:`open_journal` and `measurement_plan.make_plan`; after
    KeyboardInterrupt the journal has what was measured. ``targets``: models, and how a worker
    spreads them; ``budget_s``: what does not fit is left out and reported; ``resume``: go on with
    the profile in ``out``; ``progress``: receives the share of tasks or budget done, whichever is
    more, and the task; ``clock``: seconds; tests replace it."""
    if not budget_s > 0:
        raise InputError("budget", f"{budget_s} s", "more than 0")
    start = clock()
    make_plan(targets, device, parts)  # bad input is told before anything is written
    journal = open_journal(out, device, resume)
    known = {
        (record.row["n"], record.row["k"]) for record in journal.records if record.kind == "gemm"
    }
    tasks = make_plan(targets, device, parts, known)
    with keeping(lambda: f"{journal.path} keeps what was measured; --resume continues."):
        skipped = measure(tasks, device, journal, start + budget_s, progress, clock)
        return write(journal, device, tasks, skipped, clock() - start)


def measure(
    tasks: Sequence[Task],
    device: Device,
    journal: Journal,
    deadline: float,
    progress: Callable[[float, str], None],
    clock: Clock,
    reference: Callable[[], float] | None = None,
) -> dict[str, str]:
    """Run tasks that the journal lacks until the deadline; returns why groups were given up. Raises
    InputError where the ``reference`` point, by default of a GPU a product of matrices, s, takes
    longer or shorter than at first; what was measured meanwhile is not in the journal."""
    tuned = {
        task.removesuffix(" tune"): outcome.note["tuned"]
        for task, outcome in journal.outcomes.items()
        if "tuned" in outcome.note
    }
    workbench = Workbench(device, tuned)
    skipped: dict[str, str] = {}
    device.warm_up()
    if reference is None and not device.is_cpu:
        reference = partial(reference_s, device)
    first = None if reference is None else reference()
    waiting: list[tuple[str, Outcome]] = []  # until the reference says that clocks held

    def settle() -> None:
        if reference is not None and first is not None:
            ratio = reference() / first
            if abs(ratio - 1) > MOST_DRIFT:
                problem = f"the reference point takes {ratio:.2f} times as long as at first"
                allowed = f"{device.state() or 'a device'} that holds its clocks; then --resume"
                raise InputError("device", problem, allowed)
        for key, outcome in waiting:
            journal.add(key, outcome)
        waiting.clear()

    begin = checked = clock()
    for index, task in enumerate(tasks):
        if task.key in journal.outcomes or task.group in skipped:
            continue
        now = clock()
        if now >= deadline:
            break
        share = max(index / len(tasks), (now - begin) / (deadline - begin))
        progress(min(share, 1.0), task.key)
        try:
            outcome = task.run(workbench)
        except InputError as error:
            skipped[task.group] = str(error)
            continue
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            workbench.clear()
            skipped[task.group] = "out of memory"
            continue
        state = device.state()
        note = outcome.note | ({"state": state} if state else {})
        waiting.append((task.key, Outcome(outcome.records, note)))
        if reference is None or clock() - checked >= REFERENCE_EVERY_S:
            settle()
            checked = clock()
    settle()
    workbench.clear()
    progress(1.0, "")
    return skipped


#: What a run makes of tables, by kind.
_MADE_OF: dict[str, Callable[[LatencyTable], object]] = {
    "moe": fit_moe_latency,
    "attention_decode": kernel_latency.DecodeAttention.from_table,
    "attention_prefill": lambda table: kernel_latency.PrefillAttention.from_table(table, 1024, 0.0),
    "gemm": kernel_latency.GemmLatency.from_table,
    "collective": kernel_latency.CollectiveLatency.from_table,
}


def unusable(table: LatencyTable) -> str:
    """Why a table holds too little for a run to use it; empty when it does not."""
    try:
        _MADE_OF.get(table.metadata.kind, len)(table)
    except (InputError, ValueError, IndexError) as error:
        return str(error)
    return ""


def write(
    journal: Journal, device: Device, tasks: Sequence[Task], skipped: Mapping[str, str], took: float
) -> Profile:
    """Write tables, ``gpu.json`` and ``profile.json``; each file appears whole or not at all."""
    out = journal.path.parent
    bandwidth, flops = journal.header["copy_bandwidth"], journal.header["gemm_flops"]
    tables = tables_of(journal.records, device.name, device.facts)
    fits: dict[str, Any] = {}
    paths, incomplete, reports = [], {}, []
    for folder, table in tables:
        name = table_name(table.metadata)
        reason = "" if folder == HOT else unusable(table)  # a few points, compared one by one
        if reason:
            incomplete[str(Path(folder) / name)] = reason
            continue
        if table.metadata.kind == "moe" and folder != HOT:
            fits[str(Path(folder) / name)] = report = table_fit.moe_report(table)
            held_out = {k: v for k, v in report["linear"].items() if k.startswith("held_out")}
            linear = {f"linear_{name}": error for name, error in held_out.items()}
            table = table.saying(fit_error=report["grid"] | linear)
        table.save(out / folder / name)
        if folder == MAIN:
            paths.append(out / name)
            reports += differences(table, device.cache_bytes)
    by_folder: dict[str, list[LatencyTable]] = {}
    for folder, table in tables:
        by_folder.setdefault(folder, []).append(table)
    coverage: dict[str, dict[str, int]] = {}
    for task in tasks:
        entry = coverage.setdefault(task.group, {"done": 0, "planned": 0})
        entry["planned"] += 1
        entry["done"] += task.key in journal.outcomes
    summary = {
        **journal.header,
        "took_s": round(took, 1),
        "coverage": coverage,
        "skipped": dict(skipped),
        "incomplete_tables": incomplete,
        "moe_fits": fits,
        "effects": table_fit.effects(by_folder),
        "moe_bandwidth": table_fit.bandwidth_report(by_folder.get(MAIN, []), bandwidth),
        "attention_chunks": table_fit.chunk_report(by_folder.get(MAIN, [])),
        "kv_transfer": table_fit.transfer_report(by_folder.get(MAIN, [])),
        "notes": {task: o.note for task, o in journal.outcomes.items() if o.note},
        "differences_over_10_percent": [asdict(d) for d in reports if abs(d.ratio - 1) > 0.1],
        "points_compared": len(reports),
    }
    if device.name not in list_gpus():
        entry_json = gpu_entry(device, bandwidth, flops).model_dump_json(indent=1)
        _write_text(out / "gpu.json", entry_json + "\n")
    _write_text(out / "profile.json", json.dumps(summary, indent=1) + "\n")
    return Profile(out, paths, summary, reports)


def _write_text(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
