"""The cache folder: where it is, what goes when it is full, and what ``clear`` may touch."""

import ast
import errno
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eldr_sim
from eldr_sim import cache
from eldr_sim.errors import EldrSimWarning, InputError
from eldr_sim.jit import _place, linked

from ..paths import ROOT


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELDR_SIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    return tmp_path / "cache"


def keep(name, size=100, age_s=None):
    path = cache.keep(cache.BITSETS, name, lambda file: file.write(bytes(size)))
    if age_s is not None:
        os.utime(path, (time.time() - age_s,) * 2)
    return path


def names():
    return {file.path.name for file in cache.files()}


def test_a_drawn_trace_makes_room_and_goes_when_it_is_the_oldest(home, monkeypatch):
    def write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "experts.npy").write_bytes(bytes(1000))

    monkeypatch.setenv("ELDR_SIM_CACHE_SIZE", "1500")
    keep("old.bits", 600, age_s=100)
    place = cache.keep_folder(cache.TRACES, "a", write)
    assert names() == {"experts.npy"}  # the bit sets made room for it
    os.utime(place / "experts.npy", (time.time() - 50,) * 2)
    assert cache.find(cache.TRACES, "a") == place  # used now
    keep("new.bits", 400)
    assert names() == {"experts.npy", "new.bits"}
    os.utime(place / "experts.npy", (time.time() - 50,) * 2)
    keep("newer.bits", 400)
    assert names() == {"experts.npy", "newer.bits"}  # bit sets go first, however old it is
    cache.keep_folder(cache.TRACES, "b", write)
    assert [path.name for path in (home / "traces").glob("*/*.npy")] == ["experts.npy"]
    assert not (place / "experts.npy").exists()


def test_a_folder_that_another_process_made_first_is_taken(home):
    def beaten(folder):
        for made, text in ((folder, "mine"), (home / "traces" / "a", "theirs")):
            made.mkdir(parents=True)
            (made / "experts.npy").write_text(text)

    place = cache.keep_folder(cache.TRACES, "a", beaten)
    assert (place / "experts.npy").read_text() == "theirs"
    assert [path.name for path in place.parent.iterdir()] == ["a"]

    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.warns(EldrSimWarning, match="nothing can be kept"):
        assert cache.keep_folder(cache.TRACES, "b", full) is None


# --- the folder -------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="XDG is Linux")
def test_folder_is_the_users_unless_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ELDR_SIM_CACHE", "")
    assert cache.folder() == tmp_path / "eldr-sim"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELDR_SIM_CACHE", "here")
    assert cache.folder() == tmp_path / "here"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("without_home", ["error", "tilde"])
def test_without_a_home_nothing_is_kept(home, monkeypatch, without_home):
    def find(*_arguments, **_options):
        if without_home == "error":
            raise RuntimeError("no home")
        return Path("~/.cache/eldr-sim")

    monkeypatch.delenv("ELDR_SIM_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_path", find)
    assert cache.find(cache.BITSETS, "a.bits") is None
    assert cache.files() == cache.clear() == []
    with pytest.warns(EldrSimWarning, match="no home folder"):
        assert keep("a.bits") is None
    with warnings.catch_warnings(action="error"):  # once is enough
        assert cache.writable_folder("numba") is None


def test_file_that_cannot_be_finished_leaves_nothing(home):
    def full_disk(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.warns(EldrSimWarning, match="No space left"):
        assert cache.keep(cache.BITSETS, "a.bits", full_disk) is None
    assert list((home / "bitsets").iterdir()) == []


# --- the limit --------------------------------------------------------------------------------


def test_those_used_longest_ago_go(home, monkeypatch):
    monkeypatch.setenv("ELDR_SIM_CACHE_SIZE", "350")
    for age_s, name in ((40, "a"), (30, "b"), (20, "c")):
        keep(f"{name}.bits", age_s=age_s)
    assert names() == {"a.bits", "b.bits", "c.bits"}
    cache.find(cache.BITSETS, "a.bits")  # now b was used longest ago
    keep("d.bits", age_s=10)
    assert names() == {"a.bits", "c.bits", "d.bits"}
    keep("e.bits", size=200)
    assert names() == {"a.bits", "e.bits"}


def test_bit_sets_go_before_traces_that_are_older(home, monkeypatch):
    """The limit holds for traces, too; what takes a second to make goes first."""
    monkeypatch.setenv("ELDR_SIM_CACHE_SIZE", "350")
    for name in ("t", "u"):
        cache.keep_folder(cache.TRACES, name, lambda folder: _write_trace(folder, 100))
        for file in (home / "traces" / name).iterdir():
            os.utime(file, (time.time() - 100,) * 2)
    keep("a.bits", age_s=50)
    keep("b.bits", age_s=40)
    assert names() == {"experts.npy", "b.bits"}
    assert len(list((home / "traces").glob("*/experts.npy"))) == 2
    cache.keep_folder(cache.TRACES, "v", lambda folder: _write_trace(folder, 300))
    assert names() == {"experts.npy"}
    kept = [path.parent.name for path in (home / "traces").glob("*/experts.npy")]
    assert kept == ["v"]


def _write_trace(folder, size):
    folder.mkdir()
    (folder / "experts.npy").write_bytes(bytes(size))


def test_the_new_file_stays_however_large(home, monkeypatch):
    monkeypatch.setenv("ELDR_SIM_CACHE_SIZE", "0")
    keep("a.bits", age_s=-3600)  # a clock that was ahead
    assert names() == {"a.bits"}
    keep("b.bits")
    assert names() == {"b.bits"}
    keep("b.bits", size=1000)
    assert names() == {"b.bits"}


def test_abandoned_files_go_and_others_are_no_ones_business(home):
    keep("a.bits")
    for name, age_s in ((".x.bits-1", 600), (".y.bits-2", 9000), ("notes.txt", 90000)):
        path = home / "bitsets" / name
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    keep("b.bits")
    left = {path.name for path in (home / "bitsets").iterdir()}
    assert left == {"a.bits", "b.bits", ".x.bits-1", "notes.txt"}


_ITEMS = st.tuples(
    st.sampled_from(["bits", "trace", "left bits", "left trace"]),
    st.integers(1, 400),
    st.integers(0, 9000),
)


@given(st.lists(_ITEMS, max_size=8), st.integers(0, 1000), st.sampled_from(["bits", "trace"]))
def test_the_limit_holds_whatever_lies_there(items, limit, kind_of_new):
    """All but compiled code, the new item, and what may still be written; traces whole or gone. New
    bit sets, however large, cost no trace: those stand above the limit with them."""
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        home = Path(place)
        patch.setenv("ELDR_SIM_CACHE", place)
        patch.setenv("ELDR_SIM_CACHE_SIZE", str(limit))
        now, recent, traces = time.time(), 0, 0
        for number, (kind, size, age_s) in enumerate(items):
            hidden = "." * kind.startswith("left")
            folder = home / ("bitsets" if "bits" in kind else f"traces/{hidden}t{number}")
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{hidden}{number}.bits{'-x' if hidden else ''}"
            for path in (
                [folder / name]
                if "bits" in kind
                else [folder / each for each in ("experts.npy", "manifest.json")]
            ):
                path.write_bytes(bytes(size))
                os.utime(path, (now - age_s,) * 2)
                recent += size if hidden and age_s < 3600 else 0
                traces += size if kind == "trace" else 0
        if kind_of_new == "bits":
            new = keep("new.bits", size=50)
        else:
            new = cache.keep_folder(cache.TRACES, "new", lambda folder: _write_trace(folder, 50))
        found = cache.files()
        spared = traces if kind_of_new == "bits" else 0
        assert sum(file.size for file in found) <= max(limit, recent + spared + 50)
        assert new.exists()
        left = [path for path in (home / "traces").glob("[!.]*") if path != new]
        assert kind_of_new == "trace" or len(left) == sum(kind == "trace" for kind, *_ in items)
        for folder in left:
            assert len(list(folder.iterdir())) == 2


def test_compiled_code_of_other_versions_goes_when_it_is_unused(home):
    for name, age_days in (("1.0.0-old", 8), ("1.0.0-new", 6)):
        place = home / "numba" / name / "loop_12"
        place.mkdir(parents=True)
        (place / "run-1.py311.nbi").write_bytes(bytes(10))
        os.utime(place.parent, (time.time() - 86400 * age_days,) * 2)
    keep("a.bits")
    assert [path.name for path in (home / "numba").iterdir()] == ["1.0.0-new"]
    os.utime(place.parent, (0, 0))
    cache.writable_folder("numba/1.0.0-new")  # in use
    keep("b.bits")
    assert place.is_dir()


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_bad_limit(home, monkeypatch, text, run_cli):
    monkeypatch.setenv("ELDR_SIM_CACHE_SIZE", text)
    with pytest.raises(InputError, match="a number of bytes"):
        keep("a.bits")
    code, _, err = run_cli("cache", "info")
    assert code == 2
    assert err.splitlines() == [
        f"Error: ELDR_SIM_CACHE_SIZE: {text!r} (allowed: a number of bytes, such as 4e9)"
    ]


# --- the command ------------------------------------------------------------------------------


def test_info_and_clear_of_no_cache(home, run_cli):
    code, out, err = run_cli("cache", "info")
    assert (code, err) == (0, "")
    assert f"Folder: {home}\n" in out
    assert "0.0 MB in 0 files" in out
    assert "1073.7 MB" in out
    assert run_cli("cache", "clear")[1] == f"Removed 0 files, 0 bytes, from {home}\n"
    assert not home.exists()


def test_clear_removes_what_is_ours_and_nothing_else(home, tmp_path, run_cli):
    keep("a.bits", size=2_000_000)
    elsewhere = tmp_path / "elsewhere"
    ours = ["bitsets/.b.bits-tmp", "numba/0.0.9/s_12ab/f-1.py311.nbi"]
    ours += ["numba/0.0.9/s_12ab/f-1.py311.1.nbc", "numba/0.1.0/s_12ab/f-1.py311.nbi.tmp.0123"]
    ours += ["numba/0.1.0/s_12ab/f-0123.o", "numba/0.1.0/s_12ab/.f-0123.o-ab"]
    others = ["notes.bits", "bitsets/notes.txt", "numba/numba/jit.py", "numba/a.nbi"]
    others += ["numba/0.1.0/x/y/f.nbi", elsewhere / "c.bits", elsewhere / "d" / "f.nbi"]
    ours, others = ([home / path for path in paths] for paths in (ours, others))
    for path in ours + others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10))
    (home / "numba" / "link").symlink_to(elsewhere)
    (home / "bitsets" / "link.bits").symlink_to(elsewhere / "c.bits")
    _, out, _ = run_cli("cache", "info")
    assert re.search(r"a\.bits +2\.0 ", out)
    assert re.search(r"compiled code +5 ", out)
    assert all(purpose in out for purpose in cache.PURPOSES.values())
    assert run_cli("cache")[1] == out
    code, out, err = run_cli("cache", "clear")
    assert (code, err) == (0, "")
    link = len(str(elsewhere / "c.bits"))
    assert out.splitlines() == [
        f"Removed bit sets: 3 files, {2_000_010 + link} bytes",
        "Removed compiled code: 5 files, 50 bytes",
        f"Removed 8 files, {2_000_060 + link} bytes, from {home}",
    ]
    assert [path for path in ours if path.exists()] == []
    assert [path for path in others if not path.exists()] == []
    assert not (home / "numba" / "0.0.9").exists()
    assert cache.files() == []


def test_clear_says_what_it_cannot_remove(home, monkeypatch, run_cli):
    for name in ("a.bits", "b.bits"):
        keep(name)
    unlink = Path.unlink

    def refuse(path, *arguments, **options):
        if path.name == "a.bits":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, *arguments, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    code, _, err = run_cli("cache", "clear")
    assert code == 2
    assert "cannot remove" in err
    assert "a.bits: Permission denied" in err
    assert names() == {"a.bits"}


# --- compiled functions -----------------------------------------------------------------------

MODULE = """
from eldr_sim.jit import njit
import sys

@njit()
def f():
    return {value}

assert "eldr_sim.simulator.plane.loop" not in sys.modules
print(f(), sum(f.stats.cache_hits.values()))
"""


def compiled(folder, value, **variables):
    """Run a module that compiles a function; return its value and whether it was in the cache."""
    folder.mkdir(exist_ok=True)
    module = folder / "module.py"
    if not module.exists() or module.read_text() != MODULE.format(value=value):
        module.write_text(MODULE.format(value=value))
    done = subprocess.run(
        [sys.executable, str(module)],
        env={**os.environ, **{name: str(text) for name, text in variables.items()}},
        capture_output=True,
        text=True,
        check=True,
    )
    value, hits = done.stdout.split()
    return int(value), hits == "1", done.stderr


@pytest.mark.long
def test_compiled_code_is_kept_in_the_cache_and_not_beside_the_source(home, tmp_path):
    folder = tmp_path / "code"
    assert compiled(folder, 1) == (1, False, "")
    assert compiled(folder, 1) == (1, True, "")
    assert compiled(folder, 2) == (2, False, "")  # as long as before: an upgrade
    assert compiled(tmp_path / "another", 2) == (2, True, "")  # the same in another environment
    kept = [file.path for file in cache.files()]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    (place,) = {path.parents[1] for path in kept}
    assert place.parent == home / "numba"
    assert place.name.startswith(f"{eldr_sim.__version__}-")
    assert [path.name for path in folder.iterdir()] == ["module.py"]


def test_code_from_the_cache_is_linked_into_what_is_compiled_later(home, tmp_path):
    """Its intermediate code is parsed when another function needs it."""
    (tmp_path / "kept.py").write_text(MODULE.format(value=1))
    later = "import numba; from kept import f; print(numba.njit(lambda: 1 + f())())"
    for hits in "01":
        done = subprocess.run(
            [sys.executable, "-c", "import kept" if hits == "0" else later],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.split()[:2] == ["1", hits]
    assert done.stdout.split()[2] == "2"


def test_numbas_own_variable_wins(home, tmp_path):
    own = tmp_path / "own"
    assert compiled(tmp_path / "code", 1, NUMBA_CACHE_DIR=own)[:2] == (1, False)
    assert [*own.rglob("*.nbi")]
    assert not home.exists()


def test_functions_compile_where_nothing_can_be_kept(tmp_path):
    (tmp_path / "file").touch()
    value, hit, err = compiled(tmp_path / "code", 1, ELDR_SIM_CACHE=tmp_path / "file" / "cache")
    assert (value, hit) == (1, False)
    assert err.count("nothing can be kept") == 1
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["module.py"]


def test_the_command_warns_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    code = (
        "import click; from eldr_sim.cache import writable_folder\n"
        "from eldr_sim.command import run_command\n"
        "run_command(click.command()(lambda: writable_folder('numba')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ELDR_SIM_CACHE": str(tmp_path / "file" / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("Warning: nothing can be kept in the cache (cannot make ")
    assert line.endswith("ELDR_SIM_CACHE names another folder")


def test_all_compiled_functions_go_through_the_cache():
    rooms = ("_eldr_sim", "cli", "kernel_profiles", "policies", "simulator", "traces", "validation")
    direct = re.compile(r"from numba import .*\bn?jit\b|numba\.n?jit\(")
    found = [
        str(path.relative_to(ROOT))
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if direct.search(path.read_text())
    ]
    assert found == [str(Path("_eldr_sim", "compiler.py"))]


def compiled_functions(path):
    """The functions of a module that are compiled, by name, and where its other names are from."""
    tree = ast.parse(path.read_text())
    made = {
        node.name: {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(re.match(r"(njit|compiled|Entry)\b", ast.unparse(d)) for d in node.decorator_list)
    }
    origin = {
        alias.asname or alias.name: node.module.removeprefix("eldr_sim.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eldr_sim.")
        for alias in node.names
    }
    return made, origin


def test_whoever_is_called_by_compiled_code_of_another_module_is_among_the_linked():
    """numba keeps a caller with the code of those that it calls, and does not see these change."""
    rooms = ("kernel_profiles", "policies", "simulator", "traces")
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): compiled_functions(path)
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
    }
    called = {
        origin[name]
        for made, origin in modules.values()
        for names in made.values()
        for name in names & origin.keys()
        if name in modules.get(origin[name], ({}, {}))[0]
    }
    assert len(called) > 20
    assert called <= set(linked())


# --- several processes -------------------------------------------------------------------------

_MAKE_ALL = """
import hashlib, sys, time
from pathlib import Path
from eldr_sim.policies.eldr.artifact import cached_fit
from eldr_sim.policies.eldr.signature import FitOptions
from eldr_sim.traces.requests.texts import wanted_domains
from eldr_sim.traces.routing.format import bit_sets
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.synthetic import drawn

drawn.SERVING = drawn.CALIBRATION = 24
ready, n = Path(sys.argv[1]), int(sys.argv[2])
(ready / sys.argv[3]).touch()
while len(list(ready.iterdir())) < n:
    time.sleep(0.001)
trace = drawn.drawn_trace(
    "Qwen3-30B-A3B", drawn.Shape(3, 128, 8), wanted_domains("task")
)
bits = bit_sets(trace)
fit = cached_fit(
    trace, "task", None, lambda: calibration_set(trace, workload="task"), 4, 0, FitOptions()
)
digest = hashlib.sha256(bits.tobytes() + fit.centroids.tobytes())
print(trace.manifest.checksum, digest.hexdigest())
"""


@pytest.mark.slow
def test_processes_share_an_empty_cache(tmp_path, monkeypatch):
    """All at once, and once more: the same bytes, no warning, nothing unfinished.

    Compiled code is the suite's here; `test_two_runs_share_an_empty_cache` is cold.
    """
    home = tmp_path / "cache"
    monkeypatch.setenv("NUMBA_CACHE_DIR", _place())
    monkeypatch.setenv("ELDR_SIM_CACHE", str(home))

    def together(n, ready):
        ready.mkdir()
        command = [sys.executable, "-W", "error::UserWarning", "-c", _MAKE_ALL, ready, str(n)]
        children = [
            subprocess.Popen(
                [*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for i in range(n)
        ]
        try:
            ended = [(*child.communicate(timeout=120), child.returncode) for child in children]
        finally:
            for child in children:
                child.kill()
        assert [(error, code) for _, error, code in ended] == [("", 0)] * n
        return {printed for printed, *_ in ended}

    def kept():
        return {
            path.relative_to(home): path.read_bytes()
            for part in (cache.BITSETS, cache.FITS, cache.TRACES)
            for path in (home / part).rglob("*")
            if path.is_file()
        }

    found = together(3, tmp_path / "first")
    assert len(found) == 1
    files = kept()
    assert {path.parts[0] for path in files} == {cache.BITSETS, cache.FITS, cache.TRACES}
    assert not any(file.unfinished for file in cache.files())
    assert together(1, tmp_path / "again") == found
    assert kept() == files


@pytest.mark.slow
def test_two_runs_share_an_empty_cache(home, tmp_path):
    """They compile the simulator at the same time, and draw the routing."""
    run = [
        sys.executable,
        "-m",
        "eldr_sim.cli.main",
        "run",
        "--topology",
        "1P2D",
        "--policy",
        "eldr",
    ]
    run += ["--num-requests", "20"]
    children = [
        subprocess.Popen([*run, "--out", tmp_path / name], stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    for child in children:
        _, error = child.communicate(timeout=900)
        assert (child.returncode, "Traceback" in error, "Warning" in error) == (0, False, False)
    for file in ("summary.json", "requests.parquet", "steps.parquet"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert not any(file.unfinished for file in cache.files())


# --- who may write to it ----------------------------------------------------------------------


needs_owners = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes are POSIX")
needs_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root may give files away"
)


@needs_owners
def test_what_others_may_write_to_is_not_used(home, monkeypatch):
    """... the folder, its parts, or a folder above; a sticky one above may be writable."""
    keep("a.bits")
    assert cache.distrusted(home) == ""
    monkeypatch.setattr(cache, "_is_private", lambda group: False)
    for place, mode in ((home, 0o777), (home / "bitsets", 0o757), (home.parent, 0o775)):
        before = place.stat().st_mode
        place.chmod(mode)
        monkeypatch.setattr(cache, "_warned", False)
        with pytest.warns(EldrSimWarning, match=f"others may write to {place}: chmod go-w"):
            assert cache.find(cache.BITSETS, "a.bits") is None
        assert keep("b.bits") is None
        assert cache.writable_folder(cache.BITSETS) is None
        place.chmod(before)
    home.parent.chmod(0o1777)
    assert cache.find(cache.BITSETS, "a.bits") == home / "bitsets" / "a.bits"
    home.chmod(0o1777)  # what is kept in it is another matter
    assert cache.distrusted(home)
    home.chmod(0o755)
    monkeypatch.setattr(cache, "_is_private", lambda group: True)
    home.chmod(0o775)
    assert cache.distrusted(home) == ""


@needs_root
def test_another_users_folder_is_not_used(home):
    keep("a.bits")
    os.chown(home / "bitsets", 12345, 12345)
    with pytest.warns(EldrSimWarning, match="bitsets belongs to another user"):
        assert cache.find(cache.BITSETS, "a.bits") is None
    os.chown(home / "bitsets", 0, 0)
    (home / "numba" / "x").mkdir(parents=True)
    (home / "numba" / "x" / "f.nbi").write_bytes(b"")
    assert cache.distrusted_files(home / "numba") == ""
    os.chown(home / "numba" / "x" / "f.nbi", 12345, 12345)
    assert "f.nbi belongs to another user" in cache.distrusted_files(home / "numba")


@needs_owners
def test_what_is_kept_is_closed_to_others_whatever_the_umask(home):
    umask = os.umask(0o000)
    try:
        keep("a.bits")
        cache.keep_folder(cache.TRACES, "t", Path.mkdir)
        cache.writable_folder(f"{cache.NUMBA}/x")
    finally:
        os.umask(umask)
    assert cache.distrusted(home) == cache.distrusted_files(home) == ""


COMPILES = """
import sys
from eldr_sim.jit import njit

@njit()
def one_more(x):
    return x + 1

print(one_more(int(sys.argv[1])))
"""


def one_more(home, tmp_path, limit=""):
    """Compile and call a function in a process; return what it prints and its standard error."""
    (tmp_path / "one_more.py").write_text(limit + COMPILES)
    command = [sys.executable, str(tmp_path / "one_more.py"), "6"]
    env = os.environ | {"ELDR_SIM_CACHE": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    return done.stdout.strip(), done.stderr


@needs_owners
def test_a_full_disk_under_compiled_code_does_not_end_a_run(home, tmp_path):
    full = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    )
    told, said = one_more(home, tmp_path, full)
    assert told == "7"
    assert "nothing can be kept in the cache" in said
    assert "File too large" in said
    assert not [path for path in (home / "numba").rglob("*") if path.is_file()]


@pytest.mark.long
@needs_owners
def test_code_that_another_may_have_written_does_not_run(home, tmp_path):
    """A pickle where a function's index is expected: numba would run it."""
    assert one_more(home, tmp_path) == ("7", "")
    index = next(path for path in (home / "numba").rglob("*one_more*.nbi"))
    index.write_bytes(b"cposix\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    index.parent.chmod(0o777)
    told, said = one_more(home, tmp_path)
    assert told == "7"
    assert f"others may write to {index.parent}" in said
    assert not (tmp_path / "ran").exists()
