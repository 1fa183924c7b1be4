"""An interrupted command, or one on a full disk, says what it has left and how to continue."""

import csv
import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import yaml

from eldr_sim import command
from eldr_sim.command import _Terminated
from eldr_sim.planning.runs import runner
from eldr_sim.validation.published.runs import read_runs

from ..planning.analytic import Analytic

RUN = "--trace reference-moe --num-requests 8 --output-len 4"
SPEC = {
    "config": {"trace": "reference-moe", "topology": "1P1D", "num_requests": 8, "output_len": 4},
    "sweep": {"type": "grid", "parameters": {"request_rate": [5, 10]}},
}
STUDY = {
    "title": "two", "base": SPEC["config"], "seeds": 1,
    "figures": {
        name: {"title": name, "runs": {"request_rate": [rate], "policy": ["jsq"]}}
        for name, rate in (("one", 5), ("two", 10))
    },
}  # fmt: skip
#: Commands that write, each in a form that takes a second or two; FOLDER is a finished run.
COMMANDS = {
    "run": f"run {RUN} --topology 1P1D --out out",
    "compare": f"compare {RUN} --topology 1P2D --policy jsq --seeds 2 --jobs 1 --out out",
    "what-if": "what-if FOLDER --set request_rate=5 --seeds 2 --jobs 1 --out out",
    "sweep": "sweep sweep.yaml --jobs 1 --out out",
    "plan": "plan --slo ttft:500,tpot:30 --attainment 0.9 --policy jsq --duration 60 -tp 1 "
    "--output-len 64 --seeds 2 --jobs 1 --request-rate 20 --max-gpus 32 --out out",
    "study": "study run study.yaml --jobs 1 --out out",
    "published": "validate published --rows rows.csv --jobs 1 --out out",
    "freeze": "validate published --rows rows.csv --jobs 1 --freeze frozen.json",
    "report": "report FOLDER --out page.html",
    "fit": "fit --trace reference-moe --decoders 2 --out artifact.npz",
    "synthesize": "trace synthesize --preset Mixtral-8x7B --requests 4 --calibration 4 --layers 2 "
    "--out out",
}

#: Those that run on several processes, besides `sweep` and `published`.
SEVERAL = ("compare", "what-if", "plan", "study")
_QUICK = ("plan", "published", "freeze", "sweep")


@pytest.fixture
def place(tmp_path, monkeypatch, run_cli):
    """A folder with the files that the commands read."""
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(yaml.safe_dump(SPEC, sort_keys=False))
    Path("study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    rows = [run.row for run in read_runs() if run.row["launch"]][:2]
    with Path("rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"requests": "4", "output_len": "4"} for row in rows)
    return tmp_path


def full_disk():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Interrupted:
    """Raises at one of the moments at which a command may have left something: before and after a
    file takes its place, a line reaches the disk, a run ends."""

    def __init__(self, monkeypatch, error):
        self.left, self.happened, self.error = 0, 0, error
        for owner, name in [
            (os, "replace"),
            (os, "fsync"),
            ("eldr_sim.planning.runs.runner", "simulate_summary"),
            ("eldr_sim.validation.published.runs", "simulate_summary"),
        ]:
            self._watch(monkeypatch, owner, name)

    def _watch(self, monkeypatch, owner, name):
        target = f"{owner}.{name}" if isinstance(owner, str) else None
        real = getattr(owner if target is None else __import__(owner, fromlist=[name]), name)

        def watched(*given, **named):
            self._moment()
            found = real(*given, **named)
            if self.error is not full_disk:
                self._moment()
            return found

        if target is None:
            monkeypatch.setattr(owner, name, watched)
        else:
            monkeypatch.setattr(target, watched)

    def _moment(self):
        self.happened += 1
        if self.happened == self.left:
            raise self.error()


def tree(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
    }


def emptied(place, before):
    for path in place.iterdir():
        if not any(kept.parts[0] == path.name for kept in before):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_a_real_sigterm_after_the_first_row(place):
    """Processes of workers end with it, and the rows stay."""
    shell = [sys.executable, "-c", "from eldr_sim.cli.main import main; main()"]
    words = shlex.split(COMMANDS["published"].replace("--rows rows.csv --jobs 1", "--jobs 2"))
    process = subprocess.Popen([*shell, *words], stderr=subprocess.PIPE, text=True)
    journal = place / "out" / "runs.jsonl"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    rows = len(journal.read_text().splitlines())
    assert process.returncode == 143
    assert rows
    assert said.splitlines()[-1].startswith(f"Terminated: out keeps {rows} ended prediction")


#: A command whose processes are started, and that receives SIGTERM in the hooks of the first fork,
#: or from a process that then computes for long.
SIGNALLED = """
import os, signal, sys, time
from eldr_sim.cli.main import main
from eldr_sim.planning.runs import runner

parent, asked = os.getpid(), []

def once():
    asked.append(os.getpid() == parent and not asked and os.kill(parent, signal.SIGTERM))

def work(*_):
    os.kill(parent, signal.SIGTERM)
    time.sleep(600)

runner._Pace.is_long = lambda *_: True
if sys.argv.pop(1) == "forking":
    os.register_at_fork(after_in_parent=once)
else:
    runner.run_point = work
main()
"""


def alive(session):
    """Processes of a session that have not ended."""
    stats = {p.name: (p / "stat") for p in Path("/proc").iterdir() if p.name.isdigit()}
    found = []
    for pid, path in stats.items():
        try:
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        found += [pid] if its_session == str(session) and state != "Z" else []
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not forked")
@pytest.mark.parametrize("moment", ["forking", "running"])
@pytest.mark.parametrize(
    "command", ["sweep", *(pytest.param(name, marks=pytest.mark.slow) for name in SEVERAL)]
)
def test_sigterm_ends_all_processes_of_a_command(place, run_cli, command, moment):
    words = shlex.split(COMMANDS[command].replace("--jobs 1", "--jobs 2"))
    if "FOLDER" in words:
        assert run_cli(*shlex.split(COMMANDS["run"]), "--out", "FOLDER")[0] == 0
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, moment, *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 143, said
        assert alive(process.pid) == []
    finally:
        for pid in alive(process.pid):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("how", ["terminated", "disk full"])
@pytest.mark.parametrize(
    "command",
    [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS],
)
def test_what_is_left_is_said(place, run_cli, monkeypatch, command, how):
    words = shlex.split(COMMANDS[command])
    if "FOLDER" in words:
        assert run_cli(*shlex.split(COMMANDS["run"]), "--out", "FOLDER")[0] == 0
    before = tree(place)
    full = how == "disk full"
    if command == "plan":
        monkeypatch.setattr(runner, "simulate_summary", Analytic(0.02).summary)
    interrupted = Interrupted(monkeypatch, full_disk if full else _Terminated)
    for _ in range(2):  # the first run also fills the cache
        interrupted.happened = 0
        assert run_cli(*words)[0] == 0
        emptied(place, before)
    moments = interrupted.happened
    for interrupted.left in range(1, moments + 1):
        if 3 < interrupted.left < moments - 6:
            continue
        interrupted.happened = 0
        code, _, err = run_cli(*words)
        if code == 0:  # a full disk below the cache ends nothing
            assert full
            emptied(place, before)
            continue
        last = err.splitlines()[-1]
        assert "Traceback" not in err
        assert (code, last[:6]) == ((2, "Error:") if full else (143, "Termin")), err
        left = {path.parts[0] for path, state in tree(place).items() if before.get(path) != state}
        assert all(name in last for name in left), (last, left)
        assert ("nothing was written" in last) == (not left and not full), (last, left)
        folders = {path.name for path in place.iterdir()} - {path.parts[0] for path in before}
        assert folders <= left  # no empty folder
        if "continue" in last:
            more = ["--resume"] if "--resume" in last else []
            interrupted.happened = interrupted.left
            assert run_cli(*words, *more)[0] == 0
        emptied(place, before)
    assert moments


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 143, "Terminated"), (signal.SIGINT, 130, "Interrupted")],
)
def test_a_signal_in_a_callback_of_c_code_is_no_traceback(number, code, said):
    """Where numba compiles: ctypes drops what the handler raises, and an error follows."""
    program = (
        "import click, ctypes, os, time\n"
        "from eldr_sim.command import run_command\n"
        "@ctypes.CFUNCTYPE(None)\n"
        "def back():\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(1)\n"
        "@click.command()\n"
        "def compiling():\n"
        "    back()\n"
        "    raise RuntimeError('no compiled object')\n"
        "run_command(compiling)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (code, f"{said}: nothing was written.\n")


def test_the_signal_of_an_earlier_command_hides_no_error(monkeypatch):
    def broken():
        raise RuntimeError("no ink")

    monkeypatch.setattr(command, "_stops", [KeyboardInterrupt()])
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(RuntimeError, match="no ink"):
        command.run_command(click.Command("x", callback=broken))
