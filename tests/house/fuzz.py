"""Hostile command lines and files: no traceback, no hang, nothing half-written, nothing ignored.

``python tests/house/fuzz.py 10000 0`` tries so many cases from a seed and prints what became of
them, by surface; ``fuzz.py 500 0 npz parquet`` those of some surfaces. Case ``i`` of a seed is the
same on every machine; a failure prints both numbers, and ``fuzz_cases.case(seed, i, folder)`` makes
it again. Cases run in forked processes with bounded memory, so that a crash is a result, too.
"""

import collections
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_cases import Case, case, with_out
from fuzz_spoil import good_config, spoil_bytes

from eldr_sim import inputs

HANG_S = 30  # of processor time, whatever else the machine does
SILENCE_S = 300  # of any time
MEMORY = 6 * 2**30
_BATCH = 100
FIGURES = ("requests.parquet", "steps.parquet", "summary.json")


class _HangError(BaseException):
    pass


def ended(argv: list[str], folder: Path) -> tuple[str, str]:
    """Run a command line in this process.

    Returns
    -------
    outcome, said
        ``done``, ``refused``, or what is wrong with it; its standard error.
    """
    from eldr_sim.cli.main import main

    before = set(folder.rglob("*"))
    err = io.StringIO()
    sys.argv = ["eldr-sim", *argv]
    code: Any = 0
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    signal.alarm(SILENCE_S)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(err), warnings.catch_warnings():
            main()
    except SystemExit as stop:
        code = stop.code or 0
    except _HangError:
        return f"hang: over {HANG_S} s", err.getvalue()
    except BaseException:
        return f"traceback: {traceback.format_exc()[-700:]}", err.getvalue()
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    return _judged(code, err.getvalue(), folder, before), err.getvalue()


def _judged(code: Any, said: str, folder: Path, before: set[Path]) -> str:
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv[:-1] else None
    new = [path for path in set(folder.rglob("*")) - before if "cache" not in path.parts]
    hidden = [path for path in new if path.name.startswith(".") and path != out]
    if "Traceback" in said or hidden:
        return f"traceback or rest: {said[-400:]} {hidden}"
    if code == 0 or (code == 1 and any(word in said for word in _NOTHING)) or _is_plan(code):
        return "done"
    if code != 2:
        return f"exit code {code}: {said[-400:]}"
    if out is not None and out in new:
        return "half-written output"
    if "memory: this takes more" in said and sys.argv[1:2] == ["trace"]:
        return f"out of memory: {said[-400:]}"  # files are refused before they are unpacked
    beside = ("Warning:", "Usage:", "planning:")  # the last is a plan's first word
    errors = [line for line in said.splitlines() if not line.startswith(beside)]
    if len([line for line in errors if line and not line.startswith("Try ")]) != 1:
        return f"not one line: {said[-400:]}"
    return "refused"


#: What ends with exit code 1: runs and sweeps of which nothing completes.
_NOTHING = ("No request completed", "No run completed")


def _is_plan(code: Any) -> bool:
    """Whether it is a plan that says that no cluster is good enough."""
    return bool(code == 1 and sys.argv[1:2] == ["plan"])


def outcome(it: Case, folder: Path, rng: np.random.Generator) -> str:
    """Return what becomes of a case."""
    os.environ["ELDR_SIM_CACHE"] = CACHE
    for argv in it.before:
        assert ended(argv, folder)[0] == "done", argv
    if it.beside:
        return _together(it, folder, rng)
    told, said = ended(it.argv, folder)
    if told != "done" or it.plain is None or it.option in said.replace("-", "_"):
        return told
    same, _ = ended(it.plain, folder)
    if same == "done" and _figures(folder / "out") == _figures(folder / "plain"):
        return f"ignored: {it.option}"
    return "done"


def _figures(result: Path) -> list[Any]:
    """Return what a run yields; its summary without the words that only repeat the options."""
    rows = [(result / name).read_bytes() for name in FIGURES[:2]]
    summary = json.loads((result / FIGURES[2]).read_text())
    return [*rows, {name: value for name, value in summary.items() if not isinstance(value, str)}]


def _together(it: Case, folder: Path, rng: np.random.Generator) -> str:
    """Run a case and what is beside it at one time, with a cache folder that they share."""
    alone = with_out(it.argv, folder / "alone")
    os.environ["ELDR_SIM_CACHE"] = str(folder / "cache")
    wanted = _forked([alone], folder)[0]
    files = sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
    if it.spoils_cache and files:
        path = files[rng.integers(len(files))]
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))
    else:
        shutil.rmtree(folder / "cache", ignore_errors=True)
    told = _forked([it.argv, *it.beside], folder)
    wrong = [each for each in told if each not in (wanted, "done")]
    if wrong:
        return f"beside another: {wrong[0]}"
    for argv in [it.argv, *it.beside]:
        if "--out" not in argv:
            continue
        out = Path(argv[argv.index("--out") + 1])
        if wanted == "done" and _figures(out) != _figures(folder / "alone"):
            return "half-written: another result than alone"
    left = [path.name for path in folder.rglob(".*")]
    return f"half-written: {left}" if left else wanted


def _forked(commands: list[list[str]], folder: Path) -> list[str]:
    """Run command lines at one time, each in a process and a folder of its own."""
    processes = []
    for number, argv in enumerate(commands):
        own = folder / f"process-{number}"
        own.mkdir(exist_ok=True)
        process = os.fork()
        if process == 0:
            from eldr_sim.simulator.setup import run_routing

            try:
                run_routing._drawn.cache_clear()
                (own / "told").write_text(ended(argv, own)[0])
            finally:
                os._exit(0)
        processes.append(process)
    status = [os.waitpid(process, 0)[1] for process in processes]
    told = []
    for number, code in enumerate(status):
        path = folder / f"process-{number}" / "told"
        told.append(path.read_text() if path.exists() else f"process died: status {code}")
        path.unlink(missing_ok=True)
    return told


#: The cache folder of cases that share none.
CACHE = os.environ.get("ELDR_SIM_CACHE", "")


def _child(seed: int, numbers: range, out: int, only: tuple[str, ...]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    inputs.array_limit.cache_clear()
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.signal(signal.SIGPROF, _on_alarm)
    with os.fdopen(out, "w", buffering=1) as lines:
        for number in numbers:
            folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
            surface = "?"
            try:
                lines.write(f"{number} begun\n")
                os.chdir(folder)
                argv: list[str] = []
                try:
                    it = case(seed, number, folder, only)
                    surface, argv = it.surface, it.argv
                    result = outcome(it, folder, np.random.default_rng([seed, number, 1]))
                except Exception:
                    result = f"no case: {traceback.format_exc()[-500:]}"
                shown = " ".join(part[:80] for part in argv)
                told = result if result in ("done", "refused") else f"{result} ## {shown}"
                lines.write(json.dumps([number, surface, told]) + "\n")
            finally:
                os.chdir("/")
                shutil.rmtree(folder, ignore_errors=True)


def _on_alarm(number: int, frame: Any) -> None:
    raise _HangError


def _compile() -> None:
    """Compile what runs call, so that no case waits for it."""
    from eldr_sim.simulator.run import simulate
    from eldr_sim.simulator.setup.config.run_config import RunConfig

    simulate(RunConfig(**good_config()))
    group = {"topology": "1C", "data_parallel_size": 2, "enable_expert_parallel": True}
    simulate(RunConfig(**good_config() | group | {"decode": {}}))
    simulate(RunConfig(**good_config() | {"offload_window": 2}))


def fuzz(n: int, seed: int, *only: str, first: int = 0) -> dict[int, tuple[str, str]]:
    """Try cases and return the surface of each and what became of it.

    A process that dies is an outcome.
    """
    _compile()
    results: dict[int, tuple[str, str]] = {}
    number = first
    while number < first + n:
        numbers = range(number, min(number + _BATCH, first + n))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                _child(seed, numbers, write, only)
            finally:
                os._exit(0)
        os.close(write)
        begun = number
        with os.fdopen(read) as lines:
            for line in lines:
                if line.endswith("begun\n"):
                    begun = int(line.split()[0])
                else:
                    i, surface, told = json.loads(line)
                    results[i] = surface, told
        _, status = os.waitpid(child, 0)
        if begun not in results:
            results[begun] = "?", f"process died: status {status}"
        number = begun + 1
    return results


def failures(results: dict[int, tuple[str, str]]) -> dict[int, str]:
    """Return the cases that neither ended well nor were refused in a line."""
    return {i: told for i, (_, told) in results.items() if told not in ("done", "refused")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as beside:
        CACHE = CACHE or beside
        found = fuzz(*map(int, sys.argv[1:3]), *sys.argv[3:])
    counts = collections.Counter(
        (surface, told.split(":")[0].split(" ##")[0]) for surface, told in found.values()
    )
    for (surface, told), count in sorted(counts.items()):
        print(f"{surface:<14}{told:<24}{count:>6}")
    for i, told in sorted(failures(found).items()):
        print(f"seed {sys.argv[2]} case {i}: {told}")
    sys.exit(bool(failures(found)))
