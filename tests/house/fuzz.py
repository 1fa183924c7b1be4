"""Hostile command lines and files: no traceback, no hang, nothing half-written.

``python tests/house/fuzz.py 10000 0`` tries so many cases from a seed and prints what became of
them. Case ``i`` of a seed is the same on every machine; a failure prints both numbers, and
``fuzz.case(seed, i, folder)`` makes it again. Cases run in forked processes with bounded memory, so
that a crash is a result, too.
"""

from __future__ import annotations

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
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HANG_S = 30
MEMORY = 6 * 2**30
_BATCH = 40
SMALL = ["--trace", "reference-moe", "--num-prompts", "5", "--output-len", "4"]

NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 16, 0.5, -0.5, 1e-300, 1e300, 1e308, float("nan"), float("inf"),
    -float("inf"), 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63),
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "a", "NaN", "inf", "none", "null", "true", "task", "eldr", "jsq", "H100", "é", "日本",
    "\x00", "\n", "a,b", "a=b", ":", "eldr:tau=", "eldr:tau=nan", "eldr:tau=0.2,", "jsq:x=1",
    "../../etc/passwd", "/", ".", "..", "/dev/null", "/proc/self/mem", "x" * 300, "'", '"', "{}",
    "[]", "[1", "{{7*7}}", "=1+1", "1P1D", "0P1D", "1P0D", "1C", "2P", "99999D", "1p1d", "-1C",
    "code=1", "code=1,math=2", "code=-1", "code=1e308,math=1e308", "ttft=1", "tpot=-1", "\ud800",
]  # fmt: skip
ODD: list[Any] = [*NUMBERS, *TEXTS, None, True, [], {}, [1], {"a": 1}, [[]], "9" * 5000]
#: What fits many a place.
PLAIN: list[Any] = [
    1, 2, 3, 4, 8, 16, 100, 0.5, 1.5, 20, True, False, "task", "trace", "jsq", "p2c", "eldr",
    "round_robin", "H100", "MI300X", "1P1D", "2P3D", "1C", "2C", "2P", "sjf", "fcfs", "inf",
    "ideal", "recorded", "shared", "tpot=20", "code=1,math=2", "linear", "eplb", "affinity",
    "fp8", "auto", "prefix_hash", "saturation", "collective", "one_sided", "pplx", "deepep_ll",
    "hash",
]  # fmt: skip


def _odd(rng: np.random.Generator) -> Any:
    values = ODD if rng.random() < 0.5 else PLAIN
    return values[rng.integers(len(values))]


def _text(rng: np.random.Generator) -> str:
    """A value as the shell can pass it: without null bytes."""
    value = _odd(rng)
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\0", "").encode("utf-8", "ignore").decode()


# --- Files that are good, before they are spoilt --------------------------------------------------


def _config() -> dict[str, Any]:
    return {
        "topology": "1P2D", "trace": "reference-moe", "num_requests": 5, "output_len": 4,
        "policy": "jsq", "seed": 1, "request_rate": 10.0, "goodput": {"ttft": 500, "tpot": 20},
        "decode": {"max_num_seqs": 8}, "domain_mix": {"code": 1.0, "math": 2.0},
    }  # fmt: skip


def _sweep() -> dict[str, Any]:
    return {
        "config": _config(),
        "sweep": {"type": "grid", "parameters": {"policy": ["jsq", "p2c"], "output_len": [2, 3]}},
        "multiRun": {"numRuns": 2, "confidenceLevel": 0.95},
    }


def _model() -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
        "max_position_embeddings": 4096, "moe_intermediate_size": 128, "intermediate_size": 512,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "tie_word_embeddings": False, "layer_types": ["full_attention"] * 12,
    }  # fmt: skip


def _mooncake() -> list[dict[str, Any]]:
    return [
        {"timestamp": 10 * i, "input_length": 700, "output_length": 3, "hash_ids": [0, i]}
        for i in range(5)
    ]


def _routing(rng: np.random.Generator) -> dict[str, Any]:
    lengths = np.array([[3, 2], [2, 4]])
    rows = np.repeat(np.arange(4), lengths.ravel())
    return {
        "topk": np.argsort(rng.random((len(rows), 3, 8)))[..., :2].astype(np.uint8),
        "request_id": rows // 2, "is_decode": rows % 2 == 1, "domain": np.array([0, 1]),
        "domain_names": np.array(["a", "b"]), "prompt_len": lengths[:, 0],
        "output_len": lengths[:, 1], "E": np.array(8),
    }  # fmt: skip


# --- Ways to spoil them --------------------------------------------------------------------------


def _spoil_value(value: Any, rng: np.random.Generator) -> Any:
    """Put something odd somewhere in a document, drop a part, or add one."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = list(value)[rng.integers(len(value))]
        way = rng.integers(10)
        if way == 0:
            return {k: v for k, v in value.items() if k != key}
        if way == 1:
            return value | {str(_odd(rng)): _odd(rng)}
        return value | {key: _spoil_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = int(rng.integers(len(value)))
        return [*value[:i], _spoil_value(value[i], rng), *value[i + 1 :]]
    return _odd(rng)


def _spoil_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    way = rng.integers(7)
    if way == 0:
        return data[: rng.integers(len(data) + 1)]
    if way == 1:
        return b""
    if way == 2:
        return data + rng.bytes(20)
    broken = bytearray(data or b"\0")
    for _ in range(int(rng.integers(1, 6))):
        broken[rng.integers(len(broken))] = rng.integers(256)
    if way == 3:
        at = int(rng.integers(len(broken)))
        broken[at:at] = b"[" * 50_000
    return bytes(broken)


def _array(value: Any) -> np.ndarray[Any, Any]:
    with suppress(ValueError, TypeError, OverflowError):
        return np.array(value)
    return np.array(str(value))


def _spoil_array(array: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    way = rng.integers(7)
    if way == 0:
        with suppress(ValueError):
            return array.astype(("f4", "i8", "U8", "?", "M8[s]")[rng.integers(5)])
    if way == 1:
        return array[..., None]
    if way == 2:
        return array.ravel()[:1].reshape(())
    if way == 3:
        return array[: len(array) // 2] if array.ndim else array
    if way == 4:
        changed = array.astype(np.int64 if array.dtype.kind in "iub" else array.dtype)
        if changed.size and changed.dtype.kind == "i":
            odd = [-1, 0, 2**62, -(2**63), 2**40, 255, 256]
            changed.ravel()[rng.integers(changed.size)] = odd[rng.integers(len(odd))]
        return changed
    if way == 5:
        return _array(_odd(rng))
    return array[:0] if array.ndim else array


def _documents(make: Callable[[], Any], name: str, lines: bool, rng: Any, folder: Path) -> Path:
    document = make()
    for _ in range(int(rng.integers(1, 4))):
        document = _spoil_value(document, rng)
    if lines and isinstance(document, list):
        text = "\n".join(json.dumps(entry) for entry in document)
    else:
        text = json.dumps(document)
    data = text.encode("utf-8", "replace")
    path = folder / name
    path.write_bytes(_spoil_bytes(data, rng) if rng.random() < 0.3 else data)
    return path


# --- Cases ---------------------------------------------------------------------------------------


def case(seed: int, number: int, folder: Path) -> list[str]:
    """Write the files of a case into a folder, and return its command line."""
    rng = np.random.default_rng([seed, number])
    kinds: list[Callable[[Any, Path], list[str]]] = [
        _options, _options, _options, _configs, _sweeps, _models, _logs, _imports, _imports,
        _traces, _changes, _synthetic, _gpus, _tables, _reports,
    ]  # fmt: skip
    return kinds[rng.integers(len(kinds))](rng, folder)


def _options(rng: Any, folder: Path) -> list[str]:
    from eldr_sim.simulator.config import RunConfig

    argv = ["run", *SMALL]
    names = [name.replace("_", "-") for name in RunConfig.model_fields]
    for _ in range(int(rng.integers(1, 4))):
        argv += [f"--{names[rng.integers(len(names))]}", _text(rng)]
    return [*argv, "--out", str(folder / "out")]


def _configs(rng: Any, folder: Path) -> list[str]:
    path = _documents(_config, "config.yaml", False, rng, folder)
    return ["run", "--config", str(path), "--out", str(folder / "out")]


def _sweeps(rng: Any, folder: Path) -> list[str]:
    path = _documents(_sweep, "sweep.yaml", False, rng, folder)
    return ["sweep", str(path), "--dry-run"]


def _models(rng: Any, folder: Path) -> list[str]:
    (folder / "m").mkdir()
    path = _documents(_model, "m/config.json", False, rng, folder)
    return ["run", "--model", str(path), *SMALL, "--out", str(folder / "out")]


def _logs(rng: Any, folder: Path) -> list[str]:
    if rng.random() < 0.5:
        path = _documents(_mooncake, "log.jsonl", True, rng, folder)
    else:
        header, row = (
            ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"),
            ("Timestamp,Session ID,Request tokens,Response tokens", "5,s,472,18"),
        )[rng.integers(2)]
        cells = row.split(",")
        rows = [row] * 3
        cells[rng.integers(len(cells))] = _text(rng)
        rows.insert(int(rng.integers(4)), ",".join(cells))
        path = folder / "log.csv"
        data = "\n".join([header, *rows]).encode("utf-8", "replace")
        path.write_bytes(_spoil_bytes(data, rng) if rng.random() < 0.3 else data)
    argv = ["run", "--workload", str(path), "--trace", "reference-moe", "--num-prompts", "3"]
    return [*argv, "--output-len", "3", "--out", str(folder / "out")]


def _imports(rng: Any, folder: Path) -> list[str]:
    data = _routing(rng)
    way = rng.integers(3)
    if way == 0:
        path = folder / "a.npz"
        key = list(data)[rng.integers(len(data))]
        np.savez(path, **(data | {key: _spoil_array(data[key], rng)}))
    elif way == 1:
        path = folder / "a.parquet"
        ids = data["topk"].reshape(len(data["topk"]), -1)
        columns: dict[str, Any] = {
            "request_id": data["request_id"].tolist(),
            "domain": ["a"] * len(ids),
            "prompt_len": np.where(data["request_id"] == 0, 3, 2).tolist(),
            "position": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5],
        } | {f"layer_{i}": ids[:, 2 * i : 2 * i + 2].tolist() for i in range(3)}
        key = list(columns)[rng.integers(len(columns))]
        with suppress(pa.ArrowException, OverflowError, ValueError, TypeError):
            spoilt = pa.array(_spoil_value(columns[key], rng))
            pq.write_table(pa.table(columns | {key: spoilt}), path)
        if not path.exists():
            pq.write_table(pa.table({"request_id": [1]}), path)
    else:

        def lines() -> list[dict[str, Any]]:
            ids = data["topk"][:5].tolist()
            return [{"domain": "a", "routed_experts": ids, "prompt_len": 2}] * 2

        path = _documents(lines, "a.jsonl", True, rng, folder)
    if rng.random() < 0.4:
        path.write_bytes(_spoil_bytes(path.read_bytes(), rng))
    argv = ["trace", "import", str(path), "--out", str(folder / "out"), "--model", "m"]
    argv += ["--captured-by", "x", "--source-data", "y"]
    return argv if rng.random() < 0.5 else [*argv, "--experts", _text(rng)]


def _traces(rng: Any, folder: Path) -> list[str]:
    from eldr_sim.traces.importers import import_trace

    np.savez(folder / "a.npz", **_routing(rng))
    trace = folder / "trace"
    import_trace(
        folder / "a.npz", trace, model="m", captured_by="x", source_data="y", tool_versions={}
    )
    files = sorted(path for path in trace.iterdir() if path.is_file())
    path = files[rng.integers(len(files))]
    if path.suffix == ".json" and rng.random() < 0.8:
        document = _spoil_value(json.loads(path.read_text()), rng)
        path.write_bytes(json.dumps(document).encode("utf-8", "replace"))
    else:
        path.write_bytes(_spoil_bytes(path.read_bytes(), rng))
    return ["trace", "inspect", str(trace)]


def _changes(rng: Any, folder: Path) -> list[str]:
    base = folder / "base.yaml"
    base.write_text(json.dumps(_config()))
    paths = ["seed", "policy", "decode.gpu", "goodput.tpot", "topology", "a.b", "", "output_len"]
    change = f"{paths[rng.integers(len(paths))]}={_text(rng)}"
    return ["what-if", str(base), "--set", change, "--seeds", "1", "--jobs", "1"]


def _synthetic(rng: Any, folder: Path) -> list[str]:
    argv = ["trace", "synthesize", "--preset", "Qwen3-30B-A3B", "--requests", "2"]
    argv += ["--calibration", "1", "--prompt-len", "2", "--output-len", "2"]
    names = ["layers", "experts", "top-k", "domains", "set", "requests", "prompt-len", "seed"]
    argv += [f"--{names[rng.integers(len(names))]}", _text(rng)]
    return [*argv, "--out", str(folder / "out")]


def _gpus(rng: Any, folder: Path) -> list[str]:
    from eldr_sim.kernel_profiles.gpus import load_gpu

    def made() -> Any:
        return json.loads(load_gpu("H100").model_dump_json())

    path = _documents(made, "gpu.json", False, rng, folder)
    return ["run", "--gpu", str(path), *SMALL, "--out", str(folder / "out")]


def _tables(rng: Any, folder: Path) -> list[str]:
    from importlib import resources

    data = Path(str(resources.files("eldr_sim.kernel_profiles") / "data"))
    files = sorted(data.rglob("*.parquet"))
    path = files[rng.integers(len(files))]
    (folder / "t.parquet").write_bytes(_spoil_bytes(path.read_bytes(), rng))
    return ["run", "--tables", str(folder), *SMALL, "--out", str(folder / "out")]


def _reports(rng: Any, folder: Path) -> list[str]:
    from eldr_sim.simulator.config import RunConfig
    from eldr_sim.simulator.results import write_result
    from eldr_sim.simulator.run import simulate

    result = folder / "result"
    write_result(simulate(RunConfig(**_config())), result)
    files = sorted(path for path in result.iterdir() if path.is_file())
    path = files[rng.integers(len(files))]
    if path.suffix == ".json" and rng.random() < 0.7:
        document = _spoil_value(json.loads(path.read_text()), rng)
        path.write_bytes(json.dumps(document).encode("utf-8", "replace"))
    else:
        path.write_bytes(_spoil_bytes(path.read_bytes(), rng))
    return ["report", str(result), "--out", str(folder / "page.html")]


# --- Running them --------------------------------------------------------------------------------


class _HangError(BaseException):
    pass


def outcome(argv: list[str], folder: Path) -> str:
    """Run a command line in this process: ``done``, ``refused``, or what is wrong with it."""
    from eldr_sim.cli.main import main

    before = set(folder.rglob("*"))
    err = io.StringIO()
    sys.argv = ["eldr-sim", *argv]
    code: Any = 0
    signal.alarm(HANG_S)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(err), warnings.catch_warnings():
            main()
    except SystemExit as stop:
        code = stop.code or 0
    except _HangError:
        return f"hang: over {HANG_S} s"
    except BaseException:
        return f"traceback: {traceback.format_exc()[-700:]}"
    finally:
        signal.alarm(0)
    said = err.getvalue()
    new = [path for path in set(folder.rglob("*")) - before if path.name != "out"]
    hidden = [path for path in new if path.name.startswith(".")]
    if "Traceback" in said or hidden:
        return f"traceback or rest: {said[-400:]} {hidden}"
    if code == 0:
        return "done"
    if code == 1 and "No request completed" in said:
        return "done"
    if code != 2:
        return f"exit code {code}: {said[-400:]}"
    if (folder / "out").exists() or (folder / "page.html").exists():
        return "half-written output"
    errors = [line for line in said.splitlines() if not line.startswith(("Warning:", "Usage:"))]
    if len([line for line in errors if line and not line.startswith("Try ")]) != 1:
        return f"not one line: {said[-400:]}"
    return "refused"


def _child(seed: int, numbers: range, out: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _on_alarm)
    with os.fdopen(out, "w", buffering=1) as lines:
        for number in numbers:
            folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
            try:
                lines.write(f"{number} begun\n")
                os.chdir(folder)
                argv: list[str] = []
                try:
                    argv = case(seed, number, folder)
                    result = outcome(argv, folder)
                except Exception:
                    result = f"no case: {traceback.format_exc()[-500:]}"
                shown = " ".join(part[:80] for part in argv)
                told = result if result in ("done", "refused") else f"{result} ## {shown}"
                lines.write(json.dumps([number, told]) + "\n")
            finally:
                os.chdir("/")
                shutil.rmtree(folder, ignore_errors=True)


def _on_alarm(number: int, frame: Any) -> None:
    raise _HangError


def _compile() -> None:
    """Compile what runs call, so that no case waits for it."""
    from eldr_sim.simulator.config import RunConfig
    from eldr_sim.simulator.run import simulate

    simulate(RunConfig(**_config()))
    group = {"topology": "1C", "data_parallel_size": 2, "enable_expert_parallel": True}
    simulate(RunConfig(**_config() | group | {"decode": {}}))
    simulate(RunConfig(**_config() | {"offload_window": 2}))


def fuzz(n: int, seed: int, first: int = 0) -> dict[int, str]:
    """Try cases and return what became of each; a process that dies is an outcome."""
    _compile()
    results: dict[int, str] = {}
    number = first
    while number < first + n:
        numbers = range(number, min(number + _BATCH, first + n))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                _child(seed, numbers, write)
            finally:
                os._exit(0)
        os.close(write)
        begun = number
        with os.fdopen(read) as lines:
            for line in lines:
                if line.endswith("begun\n"):
                    begun = int(line.split()[0])
                else:
                    i, told = json.loads(line)
                    results[i] = told
        _, status = os.waitpid(child, 0)
        if begun not in results:
            results[begun] = f"process died: status {status}"
        number = begun + 1
    return results


def failures(results: dict[int, str]) -> dict[int, str]:
    """Return the cases that neither ended well nor were refused in a line."""
    return {i: told for i, told in results.items() if told not in ("done", "refused")}


if __name__ == "__main__":
    found = fuzz(*map(int, sys.argv[1:4]))
    print(collections.Counter(told.split(":")[0] for told in found.values()))
    for i, told in sorted(failures(found).items()):
        print(f"seed {sys.argv[2]} case {i}: {told}")
    sys.exit(bool(failures(found)))
