"""Compiled code that a wheel brings along: who takes it, and that it is unpacked whole or not at
all. `.ci/run` builds such a wheel and runs it."""

import subprocess
import sys
import tarfile

import pytest

from eldr_sim import jit, shipped

AVX2 = dict.fromkeys(("avx2", "bmi2", "f16c", "fma", "lzcnt", "movbe"), True)
ICE_LAKE = AVX2 | dict.fromkeys(
    ("avx512bitalg", "avx512bw", "avx512cd", "avx512dq", "avx512ifma", "avx512vbmi", "avx512vbmi2",
     "avx512vl", "avx512vnni", "avx512vpopcntdq"), True
)  # fmt: skip
BEST, SECOND = shipped.LEVELS


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package without compiled code on a processor of the best level."""
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    real = shipped.archive
    monkeypatch.setattr(shipped, "archive", lambda name: real(name, tmp_path))
    for cached in (shipped.level, shipped.supported):
        cached.cache_clear()
    has(monkeypatch, ICE_LAKE)
    yield tmp_path
    for cached in (shipped.level, shipped.supported):
        cached.cache_clear()


def has(monkeypatch, features):
    monkeypatch.setattr(shipped.llvm, "get_host_cpu_features", lambda: features)


def bring(*levels):
    for name in levels:
        path = shipped.archive(name)
        path.parent.mkdir(exist_ok=True)
        (path.parent / "code.nbc").write_bytes(name.encode())
        with tarfile.open(path, "w:xz") as file:
            file.add(path.parent / "code.nbc", "module/code.nbc")


@pytest.mark.parametrize(
    ("features", "brought", "taken"),
    [
        (ICE_LAKE, (BEST, SECOND), BEST),
        (ICE_LAKE, (SECOND,), SECOND),
        (ICE_LAKE | {"avx512vpopcntdq": False}, (BEST, SECOND), SECOND),
        (AVX2, (BEST, SECOND), SECOND),
        (AVX2, (BEST,), None),
        ({"neon": True}, (BEST, SECOND), None),
        (ICE_LAKE, (), None),
    ],
)
def test_the_best_level_that_is_brought_and_runs(package, monkeypatch, features, brought, taken):
    has(monkeypatch, features)
    bring(*brought)
    assert shipped.level() == taken


def test_another_numba_does_not_take_it(package, monkeypatch):
    bring(BEST)
    monkeypatch.setattr(shipped, "version", lambda package: "0.99.0")
    assert shipped.level() is None


def test_who_names_a_processor_compiles_for_it(package, monkeypatch):
    bring(BEST)
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert shipped.level() is None


def test_code_made_for_a_level_is_what_a_process_of_that_level_looks_for(package, monkeypatch):
    bring(SECOND)
    taken = jit._machine.__wrapped__()
    assert SECOND in taken
    monkeypatch.setenv("NUMBA_CPU_NAME", SECOND)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", shipped.LEVELS[SECOND])
    shipped.level.cache_clear()
    assert jit._machine.__wrapped__() == taken
    monkeypatch.setenv("NUMBA_CPU_NAME", BEST)
    assert jit._machine.__wrapped__() != taken


def test_unpacked_once_and_whole(package):
    bring(BEST)
    place = package / "numba" / "here"
    place.mkdir(parents=True)
    shipped.unpack(BEST, place)
    assert (place / "module" / "code.nbc").read_bytes() == BEST.encode()
    (place / "module" / "code.nbc").write_bytes(b"compiled since")
    shipped.unpack(BEST, place)  # as a slower process does
    assert (place / "module" / "code.nbc").read_bytes() == b"compiled since"
    assert [path.name for path in place.parent.iterdir()] == ["here"]


@pytest.mark.parametrize("share", [0, 0.3, 0.6])
def test_a_damaged_archive_leaves_an_empty_folder(package, share):
    bring(BEST)
    path = shipped.archive(BEST)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    place = package / "numba" / "here"
    place.mkdir(parents=True)
    shipped.unpack(BEST, place)
    assert list(place.parent.iterdir()) == [place]
    assert not list(place.iterdir())


def test_a_process_compiles_for_the_level_that_it_takes(tmp_path):
    """numba's own name for what it compiles for, which is part of a cached function's key."""
    code = (
        "from eldr_sim import shipped\n"
        f"shipped.level = lambda: {SECOND!r}\n"
        "shipped.unpack = lambda *_: None\n"
        "import eldr_sim.compiler\n"
        "from numba.core.registry import cpu_target\n"
        "print(cpu_target.target_context.codegen().magic_tuple()[1:])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={"ELDR_SIM_CACHE": str(tmp_path), "PATH": ""})  # fmt: skip
    assert done.stdout.strip() == str((SECOND, shipped.LEVELS[SECOND]))
