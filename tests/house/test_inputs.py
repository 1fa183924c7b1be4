"""Users' files are read within bounds, and the command line says in a line what went wrong."""

import errno
import os
import signal
import subprocess
import sys
import zipfile

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eldr_sim import inputs, parquet
from eldr_sim.command import run_command
from eldr_sim.errors import InputError
from eldr_sim.inputs import check_arrays, parse_json, parse_yaml, read_text, regular_file, within
from eldr_sim.kernel_profiles.tables.format import load_table
from eldr_sim.parquet import read_table
from eldr_sim.traces.requests.logs.request_logs import read_request_log
from eldr_sim.traces.routing.manifest import load_ids

from ..on_each import on_each
from ..waiting import wait_until

DEEP = "[" * 100_000
#: Nine aliases of nine aliases of ..., nine times: 9^10 values where they are written out.
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
)


def test_a_pipe_or_a_device_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(InputError, match=r"pipe or a device \(allowed: a regular file\)"):
            regular_file(path, "config")
    with pytest.raises(InputError, match="Is a directory"):
        regular_file(tmp_path, "config")
    with pytest.raises(InputError, match="null byte"):
        regular_file("a\0b", "config")


def test_sizes_are_checked_before_the_file_is_read(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_text("[1, 2, 3]")
    assert read_text(file, "config", limit=9) == "[1, 2, 3]"
    with pytest.raises(InputError, match=r"has 9 bytes \(allowed: at most 8\)"):
        read_text(file, "config", limit=8)
    np.savez_compressed(tmp_path / "a.npz", zeros=np.zeros(1000))
    pq.write_table(pa.table({"zeros": np.zeros(100_000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(inputs, "array_limit", lambda: 1000)
    with pytest.raises(InputError, match="unpacks to 8,1"):
        check_arrays(tmp_path / "a.npz", "trace")


def test_an_array_that_holds_the_end_of_a_zip_file_is_an_array(tmp_path):
    """Expert ids 80, 75, 5 and 6 in a row, as drawn routing has them now and then."""
    ids = np.full(100, 7, np.uint8)
    ids[40:44] = list(b"PK\x05\x06")
    np.save(tmp_path / "experts.npy", ids)
    assert check_arrays(tmp_path / "experts.npy", "trace") == tmp_path / "experts.npy"
    assert (load_ids(tmp_path / "experts.npy", "npy") == ids).all()


def test_an_array_may_not_promise_what_no_machine_holds(tmp_path):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904,), }\n"
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "a.npy").write_bytes(member)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", member)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(InputError, match="unpacks to 36,893,488,147,419,103,232 bytes"):
            check_arrays(tmp_path / name, "trace")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\x7f")
    with pytest.raises(InputError, match="has a header of 2,147,483,647 bytes"):
        check_arrays(tmp_path / "a.npy", "trace")


def test_a_column_s_name_that_is_no_text(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"abcdefgh": [1]}), file)
    file.write_bytes(file.read_bytes().replace(b"abcdefgh", b"abcd\xedfgh"))
    with pytest.raises(pa.ArrowInvalid, match="can't decode"):
        read_table(file)
    with pytest.raises(InputError, match=r"cannot read .*can't decode"):
        load_table(file)
    with pytest.raises(InputError, match=r"no Parquet file: .*can't decode"):
        read_request_log(file, "input=abcdefgh,output=x")


@on_each("parse", [parse_json, parse_yaml])
@on_each(
    "text, message",
    [
        (DEEP, "nested too deeply"),
        ("[1, 2", "is not (valid JSON|YAML)"),
        ("9" * 5000, "Exceeds the limit"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_documents_that_cannot_be_parsed(parse, text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(text, "config", "a.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "x: [{y: {a: 1, 'b': 2, b: 3, a: 1}}]"])
def test_a_key_that_stands_twice_is_refused(text):
    with pytest.raises(InputError, match=r"^config: a\.yaml has '[ab]' twice in one mapping"):
        parse_yaml(text, "config", "a.yaml")


def test_aliases_are_counted_and_those_of_themselves_refused():
    shared = parse_yaml("base: &b {x: 1}\nmore: [*b, *b]", "config", "a.yaml")
    assert shared == {"base": {"x": 1}, "more": [{"x": 1}, {"x": 1}]}
    for text in (BOMB, "a: &a [*a]", "a: &a {b: *a}"):
        with pytest.raises(InputError, match="over 1,000,000 values"):
            parse_yaml(text, "config", "a.yaml")
    with pytest.raises(InputError, match="is not YAML"):
        parse_yaml("when: 2026-13-45", "config", "a.yaml")
    assert parse_yaml("", "config", "a.yaml") is None


def test_limits_are_said():
    within("seeds", 10, 10)
    with pytest.raises(InputError, match=r"seeds: 11 is above the limit \(allowed: at most 10\)"):
        within("seeds", 11, 10)


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (InputError("seed", "-1", "0 or more"), 2, "Error: seed: -1 (allowed: 0 or more)\n"),
        (OSError(errno.ENOSPC, "No space left", "out/a"), 2, "Error: out/a: No space left\n"),
        (MemoryError("Unable to allocate 7 TiB"), 2, "Error: memory: this takes more than"),
        (RecursionError(), 2, "Error: input: nested too deeply\n"),
        (
            OverflowError("too large\nfor C"),
            2,
            "Error: input: a number is too large: too large for",
        ),
        (KeyboardInterrupt(), 130, "Interrupted: nothing was written.\n"),
    ],
)
def test_what_ends_a_command_is_one_line(raised, code, said, capsys, monkeypatch):
    @click.command()
    def command():
        raise raised

    monkeypatch.setattr(sys, "argv", ["eldr-sim"])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            run_command(command)
    finally:
        signal.signal(signal.SIGTERM, handler)
    text = capsys.readouterr().err.lstrip("\n")  # click ends the line of ^C
    assert ended.value.code == code
    assert text.startswith(said)
    assert text.count("\n") == 1


ELDR_SIM = (sys.executable, "-c", "from eldr_sim.cli.main import main; main()")
#: The same, where the command gets a signal in a policy, which compiled code has called.
SIGNALLED = """
import os, sys
from eldr_sim.policies.routing.decode import PowerOfTwoChoicesPolicy

number = int(sys.argv.pop(1))

def select(self, *given, select=PowerOfTwoChoicesPolicy.select):
    self.asked = getattr(self, "asked", 0) + 1
    if self.asked == 100:
        os.kill(os.getpid(), number)
    return select(self, *given)

PowerOfTwoChoicesPolicy.select = select
from eldr_sim.cli.main import main
main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("shell", "code"), [("> /dev/full", 2), ("2>&-", 0), (">&-", 0), (">&- 2>&-", 0)]
)
def test_where_nothing_can_be_printed(shell, code):
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {shell}', "sh", *ELDR_SIM, "models"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("run", signal.SIGTERM, 143),
        ("reproduce", signal.SIGTERM, 143),
        pytest.param("run", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("reproduce", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_nothing(tmp_path, command, number, code):
    """Not a file, and no process of the group."""
    argv = {
        "run": [sys.executable, "-c", SIGNALLED, str(int(number)), "run", "--trace",
                "reference-moe", "--duration", "300", "--topology", "1P2D", "--policy", "p2c"],
        "reproduce": [*ELDR_SIM, "reproduce", "eldr"],
    }[command]  # fmt: skip
    process = subprocess.Popen(
        [*argv, "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        if command == "reproduce":
            assert "figure_2" in process.stderr.readline()
            process.send_signal(number)  # in the next figure, which takes several seconds
        _, said = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == code
    assert "nothing was written" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    try:
        wait_until(lambda: is_alive(process.pid), False)
    except AssertionError:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_arrays_may_take_half_of_what_the_process_may_use(tmp_path, monkeypatch):
    """Of the machine, its container, or its ``ulimit -v``, whichever is least."""
    inputs.array_limit.cache_clear()
    whole = inputs.array_limit()
    assert 0 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    (tmp_path / "memory.max").write_text("1000000\n")
    monkeypatch.setattr(inputs, "_CGROUPS", (str(tmp_path / "memory.max"),))
    inputs.array_limit.cache_clear()
    assert inputs.array_limit() == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    inputs.array_limit.cache_clear()
    assert inputs.array_limit() >= whole
    inputs.array_limit.cache_clear()


def test_a_mapped_array_may_not_be_longer_than_its_file(tmp_path, monkeypatch):
    """It takes no memory: its size is bounded by the file's, not by the machine's memory."""
    np.save(tmp_path / "a.npy", np.zeros(1000))
    monkeypatch.setattr(inputs, "array_limit", lambda: 100)
    assert check_arrays(tmp_path / "a.npy", "trace", mapped=True)
    with pytest.raises(InputError, match="unpacks to 8,000 bytes"):
        check_arrays(tmp_path / "a.npy", "trace")
    data = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(data.replace(b"(1000,)", b"(9000,)"))
    with pytest.raises(InputError, match="unpacks to 72,000 bytes"):
        check_arrays(tmp_path / "a.npy", "trace", mapped=True)


def test_a_text_that_a_parquet_file_keeps_once_may_not_fill_the_memory(tmp_path, monkeypatch):
    """1 kB in each of 20,000 rows: a file of 2 kB."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), ["x" * 1000])
    pq.write_table(pa.table({"domain": column}), tmp_path / "a.parquet", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 5000
    assert read_table(tmp_path / "a.parquet")["domain"][19_999].as_py() == "x" * 1000
    monkeypatch.setattr(parquet, "array_limit", lambda: 21_000_000)  # read in parts
    assert len(read_table(tmp_path / "a.parquet")) == 20_000
    monkeypatch.setattr(parquet, "array_limit", lambda: 1_000_000)
    with pytest.raises(InputError, match="bytes is above the limit"):
        read_table(tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": np.zeros(1_000_000, np.int64)}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="8,000,000 bytes is above"):
        read_table(tmp_path / "b.parquet")
