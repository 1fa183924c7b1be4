"""What `fuzz` tries: command lines, with files that are good, odd or spoilt."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_binary
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from fuzz_spoil import (
    good_config,
    good_log,
    good_model,
    good_routing,
    good_sweep,
    odd_text,
    spoil_array,
    spoil_bytes,
    spoil_value,
    spoilt_document,
)

SMALL = ["--trace", "reference-moe", "--num-prompts", "5", "--output-len", "4"]


@dataclass(frozen=True)
class Case:
    """A command line, and how it is judged.

    Attributes
    ----------
    surface
        What of the product it tries.
    argv
        The command line.
    before
        Command lines that make what this one starts from.
    plain, option
        The same command line without an option, and its field: that it is given must show.
    beside
        Command lines of other processes that share the cache folder with this one.
    spoils_cache
        Whether the cache is filled and a file of it spoilt before.
    """

    surface: str
    argv: list[str]
    before: tuple[list[str], ...] = ()
    plain: list[str] | None = None
    option: str = ""
    beside: tuple[list[str], ...] = ()
    spoils_cache: bool = False


def case(seed: int, number: int, folder: Path, only: tuple[str, ...] = ()) -> Case:
    """Write the files of a case into a folder, and return it; ``only``: of some surfaces."""
    rng = np.random.default_rng([seed, number])
    surfaces: dict[str, tuple[int, Callable[[Any, Path], list[str] | Case]]] = {
        "options": (12, _options), "config": (4, _configs), "sweep": (4, _sweeps),
        "model": (4, _models), "log": (4, _logs), "import": (8, _imports), "trace": (3, _traces),
        "manifest": (6, _manifests), "what-if": (3, _changes), "synthesize": (4, _synthetic),
        "gpu": (4, _gpus), "table": (4, _tables), "report": (4, _reports), "plan": (2, _plans),
        "effect": (14, _effects), "shared cache": (2, _shared_caches), "faults": (6, _faults),
        "part of a log": (4, _parts), "explain": (5, _explained), "compare": (3, _compared),
    }  # fmt: skip
    surfaces |= {name: (4, make) for name, make in fuzz_binary.SURFACES.items()}
    if only:
        surfaces = {name: surfaces[name] for name in only}
    names = [name for name, (weight, _) in surfaces.items() for _ in range(weight)]
    surface = names[rng.integers(len(names))]
    made = surfaces[surface][1](rng, folder)
    return made if isinstance(made, Case) else Case(surface, made)


def with_out(argv: list[str], out: Path) -> list[str]:
    """Return a command line that writes to another place."""
    return [*argv[: argv.index("--out")], "--out", str(out), *argv[argv.index("--out") + 2 :]]


def _options(rng: Any, folder: Path) -> list[str]:
    from eldr_sim.simulator.setup.config.groups import RUN_FIELDS

    argv = ["run", *SMALL]
    names = [name.replace("_", "-") for name in RUN_FIELDS]
    for _ in range(int(rng.integers(1, 4))):
        argv += [f"--{names[rng.integers(len(names))]}", odd_text(rng)]
    return [*argv, "--out", str(folder / "out")]


def _configs(rng: Any, folder: Path) -> list[str]:
    path = spoilt_document(good_config, "config.yaml", False, rng, folder)
    return ["run", "--config", str(path), "--out", str(folder / "out")]


def _sweeps(rng: Any, folder: Path) -> list[str] | Case:
    """A sweep, listed, run, or changed and resumed."""
    document = good_sweep()
    way = rng.integers(3)
    if way == 1:
        lists = {"policy": ["jsq", "p2c"], "output_len": [2, 3]}
        document["sweep"] = {"type": "zip", "parameters": lists}
    elif way == 2:
        runs = [{"name": "a", "output_len": 2}, {"name": "b", "decode": {"max_num_seqs": 2}}]
        document["sweep"] = {"type": "scenarios", "runs": runs}
    good = folder / "good.yaml"
    good.write_text(yaml.safe_dump(document))
    path = spoilt_document(lambda: document, "sweep.yaml", False, rng, folder)
    with suppress(ValueError, RecursionError):
        text = yaml.safe_dump(json.loads(path.read_text()), default_flow_style=None)
        odd = [
            "&a [*a]",
            "!!python/object:os.system x",
            "<<: *b",
            "? [1]",
            "- - -",
            "\t",
            "x: 1: 2",
        ]
        if rng.random() < 0.15:
            lines = text.splitlines()
            lines.insert(int(rng.integers(len(lines) + 1)), odd[rng.integers(len(odd))])
            text = "\n".join(lines)
        path.write_text(text)
    out = ["--jobs", "1", "--out", str(folder / "out")]
    way = rng.integers(5)
    if way == 0:
        return ["sweep", str(path), *out]
    if way == 1:
        return Case(
            "sweep", ["sweep", str(path), *out, "--resume"], before=(["sweep", str(good), *out],)
        )
    return ["sweep", str(path), "--dry-run"]


def _models(rng: Any, folder: Path) -> list[str]:
    (folder / "m").mkdir()
    path = spoilt_document(good_model, "m/config.json", False, rng, folder)
    return ["run", "--model", str(path), *SMALL, "--out", str(folder / "out")]


def _logs(rng: Any, folder: Path) -> list[str]:
    if rng.random() < 0.5:
        path = spoilt_document(good_log, "log.jsonl", True, rng, folder)
    else:
        header, row = (
            ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"),
            ("Timestamp,Session ID,Request tokens,Response tokens", "5,s,472,18"),
        )[rng.integers(2)]
        cells = row.split(",")
        rows = [row] * 3
        cells[rng.integers(len(cells))] = odd_text(rng)
        rows.insert(int(rng.integers(4)), ",".join(cells))
        path = folder / "log.csv"
        data = "\n".join([header, *rows]).encode("utf-8", "replace")
        path.write_bytes(spoil_bytes(data, rng) if rng.random() < 0.3 else data)
    argv = ["run", "--workload", str(path), "--trace", "reference-moe", "--num-prompts", "3"]
    return [*argv, "--output-len", "3", "--out", str(folder / "out")]


def _imports(rng: Any, folder: Path) -> list[str]:
    data = good_routing(rng)
    way = rng.integers(3)
    if way == 0:
        path = folder / "a.npz"
        key = list(data)[rng.integers(len(data))]
        np.savez(path, **(data | {key: spoil_array(data[key], rng)}))
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
            spoilt = pa.array(spoil_value(columns[key], rng))
            pq.write_table(pa.table(columns | {key: spoilt}), path)
        if not path.exists():
            pq.write_table(pa.table({"request_id": [1]}), path)
    else:

        def lines() -> list[dict[str, Any]]:
            ids = data["topk"][:5].tolist()
            return [{"domain": "a", "routed_experts": ids, "prompt_len": 2}] * 2

        path = spoilt_document(lines, "a.jsonl", True, rng, folder)
    if rng.random() < 0.4:
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))
    argv = ["trace", "import", str(path), "--out", str(folder / "out"), "--model", "m"]
    argv += ["--captured-by", "x", "--source-data", "y"]
    return argv if rng.random() < 0.5 else [*argv, "--experts", odd_text(rng)]


def _spoil_a_file(folder: Path, rng: Any, json_share: float) -> None:
    """Spoil one file of a folder: of JSON a value, in that share of cases; else its bytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = files[rng.integers(len(files))]
    if path.suffix == ".json" and rng.random() < json_share:
        document = spoil_value(json.loads(path.read_text()), rng)
        path.write_bytes(json.dumps(document).encode("utf-8", "replace"))
    else:
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))


def _traces(rng: Any, folder: Path) -> list[str]:
    from eldr_sim.traces.routing.imports.importers import import_trace

    np.savez(folder / "a.npz", **good_routing(rng))
    trace = folder / "trace"
    import_trace(
        folder / "a.npz", trace, model="m", captured_by="x", source_data="y", tool_versions={}
    )
    _spoil_a_file(trace, rng, json_share=0.8)
    return ["trace", "inspect", str(trace)]


def _changes(rng: Any, folder: Path) -> list[str]:
    base = folder / "base.yaml"
    base.write_text(json.dumps(good_config()))
    paths = ["seed", "policy", "decode.gpu", "goodput.tpot", "topology", "a.b", "", "output_len"]
    change = f"{paths[rng.integers(len(paths))]}={odd_text(rng)}"
    return ["what-if", str(base), "--set", change, "--seeds", "1", "--jobs", "1"]


def _synthetic(rng: Any, folder: Path) -> list[str]:
    argv = ["trace", "synthesize", "--preset", "Qwen3-30B-A3B", "--requests", "2"]
    argv += ["--calibration", "1", "--prompt-len", "2", "--output-len", "2"]
    names = ["layers", "experts", "top-k", "domains", "set", "requests", "prompt-len", "seed"]
    argv += [f"--{names[rng.integers(len(names))]}", odd_text(rng)]
    return [*argv, "--out", str(folder / "out")]


def _gpus(rng: Any, folder: Path) -> list[str]:
    from eldr_sim.kernel_profiles.gpus import load_gpu

    def made() -> Any:
        return json.loads(load_gpu("H100").model_dump_json())

    path = spoilt_document(made, "gpu.json", False, rng, folder)
    return ["run", "--gpu", str(path), *SMALL, "--out", str(folder / "out")]


def _tables(rng: Any, folder: Path) -> list[str]:
    from importlib import resources

    data = Path(str(resources.files("eldr_sim.kernel_profiles") / "data"))
    files = sorted(data.rglob("*.parquet"))
    path = files[rng.integers(len(files))]
    (folder / "t.parquet").write_bytes(spoil_bytes(path.read_bytes(), rng))
    return ["run", "--tables", str(folder), *SMALL, "--out", str(folder / "out")]


def _a_result(folder: Path) -> Path:
    from eldr_sim.simulator.results import write_result
    from eldr_sim.simulator.run import simulate
    from eldr_sim.simulator.setup.config.run_config import RunConfig

    result = folder / "result"
    write_result(simulate(RunConfig(**good_config())), result)
    return result


def _reports(rng: Any, folder: Path) -> list[str]:
    result = _a_result(folder)
    _spoil_a_file(result, rng, json_share=0.7)
    return ["report", str(result), "--out", str(folder / "page.html")]


def _explained(rng: Any, folder: Path) -> list[str]:
    """A result of which a column is missing, odd or empty, explained or reported."""
    path = _a_result(folder) / ("requests.parquet", "steps.parquet")[rng.integers(2)]
    with suppress(pa.ArrowException):
        table = pq.read_table(path)
        names = table.column_names
        way, name = rng.integers(4), names[rng.integers(len(names))]
        if way == 0:
            table = table.drop_columns(name)
        elif way == 1:
            table = table.slice(0, int(rng.integers(2)))
        elif way == 2:
            odd = [[None] * len(table), ["a"] * len(table), [float("nan")] * len(table)]
            place = names.index(name)
            table = table.set_column(place, name, pa.array(odd[rng.integers(3)]))
        pq.write_table(table, path)
    argv = ["explain", str(folder / "result")]
    way = rng.integers(3)
    return (
        argv if way == 0 else [*argv, "--request", ("0", "3", "99", odd_text(rng))[rng.integers(4)]]
    )


_FAULTS: list[Any] = [
    "decode:0@0.01", "decode:1@0.01+0.02", "prefill:0@0", "decode:9@1", "decode:0@-1", "",
    "decode:0@1+0", "decode:0@nan", "decode:0@inf", "decode:0@1e308s+1e308s", "x:0@1", ",",
    "decode:-1@1", "decode:0@0.01,decode:0@0.02", "decode:0@0.01,decode:1@0.01", "@", ":@+",
]  # fmt: skip


def _faults(rng: Any, folder: Path) -> list[str]:
    """Workers that die, hang, drain, join and slow down, as they are spelled or in a file."""
    argv = ["run", *SMALL, "--topology", ("1P2D", "2C", "2P")[rng.integers(3)]]
    if rng.random() < 0.5:
        argv += ["--fail", str(_FAULTS[rng.integers(len(_FAULTS))])]
    else:

        def events() -> list[dict[str, Any]]:
            kinds = ["fail", "hang", "slow", "drain", "join", "link", "cancel"]
            made: list[dict[str, Any]] = []
            for _ in range(int(rng.integers(1, 4))):
                event: dict[str, Any] = {kinds[rng.integers(7)]: f"decode:{rng.integers(3)}"}
                event |= {"at_s": 0.01 * int(rng.integers(4)), "for_s": 0.02}
                event |= {"factor": 2.0} if rng.random() < 0.5 else {}
                made.append(event)
            return made

        argv += ["--events", str(spoilt_document(events, "events.yaml", False, rng, folder))]
    for name, values in (("retry", ["migrate", "never"]), ("health-delay-ms", [0, 20, 1e300, -1]),
                         ("max-retries", [0, 10**9, -1])):  # fmt: skip
        if rng.random() < 0.3:
            argv += [f"--{name}", str(values[rng.integers(len(values))])]
    return [*argv, "--out", str(folder / "out")]


def _parts(rng: Any, folder: Path) -> list[str]:
    """A part of a request log."""
    path = folder / "log.jsonl"
    entries = [{"timestamp": 200 * i, "input_length": 40, "output_length": 3} for i in range(30)]
    path.write_text("\n".join(map(json.dumps, entries)))
    argv = ["run", "--workload", str(path), "--trace", "reference-moe"]
    times = ["0", "1", "2.5", "5s", "1m", "00:00:02", "-1", "1e300", "nan", "inf", "", "100", "6"]
    for name in ("from", "to", "busiest", "warmup", "duration", "request-rate"):
        if rng.random() < 0.35:
            value = times[rng.integers(len(times))]
            argv += [f"--{name}", odd_text(rng) if rng.random() < 0.1 else value]
    return [*argv, "--out", str(folder / "out")]


def _compared(rng: Any, folder: Path) -> list[str]:
    argv = ["compare", *SMALL, "--topology", "1P2D", "--jobs", "1"]
    policies = ["jsq", "p2c,jsq", "jsq,jsq", "eldr:tau=0.2,eldr:tau=0.3", "nosuch", "", "random"]
    argv += ["--policy", policies[rng.integers(len(policies))]]
    argv += ["--seeds", ("1", "2", "0", "-1", "x", "3,3")[rng.integers(6)]]
    if rng.random() < 0.3:
        argv += ["--request-rate", odd_text(rng)]
    return [*argv, "--out", str(folder / "out")]


def _manifests(rng: Any, folder: Path) -> list[str]:
    """A trace whose manifest says odd things, inspected or replayed."""
    trace = _small_trace(rng, folder)
    path = trace / "manifest.json"
    document = json.loads(path.read_text())
    plausible = {
        "n_layers": [1, 2, 4], "n_experts": [2, 7, 9, 64, 65536], "top_k": [1, 3, 8],
        "rank_groups": [[1, 1], [2], [1], [], [0, 2], [3, -1]], "prompt_rows": [False, True],
        "recorded_phase": ["prompt", "generated"], "prompt_share": [0.5, 1e-9], "n_tokens": [1, 10],
        "encoding": ["npy", "xz"], "domains": [["a"], ["a", "a"], ["a", "b", "c"], ["b", "a"]],
        "n_requests": [1, 3], "provenance": ["recorded", "synthetic"], "format_version": [1, 2, 3],
        "gate_scores_checksum": ["0" * 64], "checksum": ["0" * 64], "requests_checksum": ["f" * 64],
    }  # fmt: skip
    for _ in range(int(rng.integers(1, 4))):
        if isinstance(document, dict) and rng.random() < 0.7:
            key = list(plausible)[rng.integers(len(plausible))]
            document[key] = plausible[key][rng.integers(len(plausible[key]))]
        else:
            document = spoil_value(document, rng)
    data = json.dumps(document).encode("utf-8", "replace")
    path.write_bytes(spoil_bytes(data, rng) if rng.random() < 0.1 else data)
    if rng.random() < 0.4:
        return ["trace", "inspect", str(trace)]
    return _small_run(trace, folder)


def _small_trace(rng: Any, folder: Path) -> Path:
    """A trace of 8 experts in 3 layers, as imported."""
    from eldr_sim.traces.routing.imports.importers import import_trace

    np.savez(folder / "a.npz", **good_routing(rng, 12))
    made = {"model": "m", "captured_by": "x", "source_data": "y", "tool_versions": {}}
    import_trace(folder / "a.npz", folder / "trace", **made)
    return folder / "trace"


def small_trace(rng: Any, folder: Path) -> tuple[Path, Path]:
    """Write a trace and the configuration of its model, of 8 experts in 3 layers."""
    return _small_trace(rng, folder), _small_model(folder)


def _small_model(folder: Path) -> Path:
    model = folder / "m" / "config.json"
    model.parent.mkdir()
    size = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    size["layer_types"] = ["full_attention"] * 3
    model.write_text(json.dumps(good_model() | size))
    return model


def _small_run(trace: Path, folder: Path) -> list[str]:
    model = _small_model(folder)
    argv = ["run", "--model", str(model), "--trace", str(trace), "--workload", "trace"]
    return [*argv, "--num-prompts", "5", "--topology", "1P2D", "--out", str(folder / "out")]


def _plans(rng: Any, folder: Path) -> list[str]:
    """Plans with odd or extreme sizes, bounds and prices; small where they are simulated."""
    argv = ["plan", "--trace", "reference-moe", "--num-prompts", "100", "--output-len", "2"]
    argv += ["--jobs", "1", "--out", str(folder / "out")]
    given: dict[str, list[Any]] = {
        "slo": ["ttft:500,tpot:30", "tpot:0.001", "ttft:1e300", "e2el:1", "tpot:3,tpot:4"],
        "attainment": [0, 1, 0.5, 0.999999, 1e-9, -1, 2], "seeds": [2, 1, 0, 10**9, -1],
        "max-gpus": [1, 2, 3, 0, -1, 10**9, 2**63], "request-rate": [1e-9, 1, 1e9, "inf", 0, -1],
        "gpu": ["H100", "H100,H100", "h200", "H100,nosuch", ",", "MI300X,B200"],
        "policy": ["jsq", "jsq,p2c", "jsq,jsq", "eldr:tau=9", "none", ","],
        "price": ["H100=1", "H100=0", "H100=-1", "H100=1e308", "H100=nan", "H100", "X=1"],
        "tensor-parallel-size": ["1", "1,2", "0", "3", "1024", "1,1", "a"],
        "num-redundant-experts": ["0", "0,8", "-1", "1000000"],
        "ffn-ranks": ["0", "0,2", "-1", "1000000", "a"],
        "topology": ["1P1D", "1C", "1P", "9999P1D"],
        "gpus": [1, 2, 3, 0, -1, 10**9], "strategy": ["tp", "pp,pp", "nosuch", "async_ep"],
        "max-num-seqs": [1, 2, 65536], "duration": [1e-9, 1e9], "warmup": [0, 1e9],
    }  # fmt: skip
    options: dict[str, Any] = {"slo": "ttft:500,tpot:30", "seeds": 2}
    options[("topology", "gpus", "request-rate")[rng.integers(3)]] = 1
    for name in ("topology", "gpus", "request-rate"):
        if name in options:
            options[name] = given[name][rng.integers(2)]
    for _ in range(int(rng.integers(1, 4))):
        name = list(given)[rng.integers(len(given))]
        options[name] = given[name][rng.integers(len(given[name]))]
        if rng.random() < 0.2:
            options[name] = odd_text(rng)
    options.setdefault("max-gpus", 2)
    if rng.random() < 0.15:
        argv.append("--prefill-only")
    elif rng.random() < 0.15:
        argv.append("--knobs")
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    return argv


#: Clusters and traffic in which options are tried: busy, so that what they change shows.
BASES: dict[str, dict[str, Any]] = {
    "disaggregated": {"topology": "2P2D"},
    "co-located": {"topology": "2C"},
    "groups": {"topology": "1P2D", "data_parallel_size": 2, "enable_expert_parallel": True},
    "co-located groups": {"topology": "2C", "data_parallel_size": 2}
    | {"enable_expert_parallel": True},
    "prompts alone": {"topology": "2P"},
    "streamed": {"topology": "1P", "data_parallel_size": 2, "enable_expert_parallel": True}
    | {"expert_gather": "one_sided"},
}  # fmt: skip
_EXTRAS: list[dict[str, Any]] = [
    {}, {}, {}, {"frontend": "xeon-emerald-rapids"}, {"fail": "{pool}:1@0.03+0.05"},
    {"workload": "trace"}, {"prefix_len": 64}, {"enable_prefix_caching": False},
    {"eplb_interval": 3, "expert_placement": "eplb:load=none", "num_redundant_experts": 8},
]  # fmt: skip
#: Fields of a run, with values that are not their defaults.
VALUES: dict[str, list[Any]] = {
    "policy": ["p2c", "eldr", "vllm_dp", "gimbal"], "prefill_policy": ["round_robin", "saturation"],
    "queue_order": ["sjf", "sjf_aging:age=0.01"], "expert_placement": ["eplb", "affinity"],
    "replica_choice": ["source", "metro"], "columns": ["time_s=a,input=b,output=c"],
    "time_unit": ["s"],
    "arrivals": ["recorded"], "burstiness": [0.2], "max_concurrency": [2],
    "load": ["ladder:2000,500@0.004"],
    "autoscale": ["hpa:interval=0.004,target=2", "seconds:interval=0.004", "none:n=1"],
    "start_up": ["0.01"], "prefill.start_up": ["0.02"], "decode.start_up": ["0.02"],
    "min_workers": ["2"], "initial_workers": ["1"], "gpu_budget": [2], "demand": ["exit"],
    "metric_delay": [0.002], "drain_timeout": [0.005], "switch_time": [0.01, "graphs"],
    "width_pause": [0.01],
    "prompts": ["shared"], "trace_replay": ["same_domain"], "domain_mix": ["code=1"],
    "domain_mix_end": ["code=1"], "input_len": [33], "random_range_ratio": [0.5],
    "prefix_len": [40], "num_prefixes": [3], "length_shape": ["central"], "gpu": ["H200"],
    "tensor_parallel_size": [2], "enable_expert_parallel": [True], "data_parallel_size": [2],
    "enable_elastic_ep": [True],
    "pipeline_parallel_size": [2], "num_redundant_experts": [8], "gpus_per_node": [1],
    "micro_batches": [3],
    "all2all_backend": ["pplx", "deepep_ll"], "moe_dp_chunk_size": [16],
    "two_batch_overlap": [True], "kv_transfer": ["ideal"],
    "load_report_delay_ms": [30], "kv_load": ["cheaper"],
    "kv_tier": ["host:1GB,load=20GB/s", "host:1GB,load=20GB/s,evict=arc",
                "host:9MB,load=20GB/s,evict=session"],
    "conditional_disagg": ["noncached:40"],
    "kv_overlap": ["layers"], "kv_in_flight": ["delay", "duplicate"],
    "answer_kv": ["pull"], "kv_reserve": ["arrival"],
    "speculative_config": [{"method": "ngram", "num_speculative_tokens": 2,
                            "synthetic_acceptance_length": 1.8}],
    **{f"{pool}.speculative_config": [
        {"method": "ngram", "num_speculative_tokens": 1, "acceptance": "mtp-code"}
    ] for pool in ("prefill", "decode")},
    "acceptance": ["mtp-code"],
    "signal_interval_ms": [30], "kv_signal": ["approx"], "price_per_gpu_hour": [2.0],
    "max_model_len": [60], "max_num_batched_tokens": [64], "block_size": [32],
    "disable_hybrid_kv_cache_manager": [True], "enable_prefix_caching": [False],
    "async_scheduling": [False], "prefill_schedule_interval": [3], "gpu_memory_utilization": [0.8],
    "long_prefill_token_threshold": [32],
    "num_gpu_blocks_override": [40], "kv_cache_memory_bytes": [10**9],
    "host_gap_ms": [5.0], "cudagraph_padding": ["experts"],
    "frontend": ["none"], "tokenizer_mode": ["microbatch_sequential"],
    "tokenizer_threads": [4], "api_servers": [3], "cpu_slowdown": [50.0], "handover": ["vllm_nixl"],
    "eplb_interval": [3], "eplb_window": [2], "eplb_async": [True], "eplb_overhead_ms": [3.0],
    "expert_gather": ["collective", "needed"], "offload_window": [2], "gather_interference": [0.5],
    "kv_cache_free": [True], "fail": ["decode:0@0.03+0.05", "decode:0@60", "prefill:0@0.02"],
    "health_delay_ms": [40.0], "retry": ["migrate", "never"], "max_retries": [0],
    "user_retry_s": [0.02],
    "goodput": [{"ttft": 100}, {"tpot": 5}], "confidence": [80], "warmup": [0.02],
    "duration": [0.05],
    "prefill.gpu": ["H200"], "prefill.max_num_seqs": [1], "prefill.max_num_batched_tokens": [64],
    "prefill.tensor_parallel_size": [2], "prefill.num_redundant_experts": [8],
    "prefill.expert_placement": ["eplb"], "prefill.price_per_gpu_hour": [1.0],
    "decode.gpu": ["H200"], "decode.max_num_seqs": [1], "decode.max_num_batched_tokens": [64],
    "decode.tensor_parallel_size": [2], "decode.num_redundant_experts": [8],
    "decode.expert_placement": ["affinity"], "decode.price_per_gpu_hour": [1.0],
    "enforce_eager": [True], "prefill.enforce_eager": [True], "decode.enforce_eager": [True],
    "prefill.enable_expert_parallel": [True], "decode.enable_expert_parallel": [True],
    "prefill.data_parallel_size": [2], "decode.data_parallel_size": [2],
    "prefill.pipeline_parallel_size": [2], "decode.pipeline_parallel_size": [2],
    "moe_backend": ["aiter"], "routing_band": ["low"], "prompt_lengths": ["data_sets"],
    "log_from": [0.01], "log_to": [0.01], "busiest": [0.01], "kv_cache_dtype": ["fp8"],
    "max_num_seqs": [1], "output_len": [2], "seed": [1], "request_rate": [20],
    "num_requests": [9], "model": ["Mixtral-8x7B"], "trace": ["qwen3-30b-a3b"],
    "topology": ["3P"], "workload": ["language"],
    "engine": ["sglang", "trtllm"], "prefill.engine": ["sglang"], "decode.engine": ["trtllm"],
    "engine_version": ["0.16"], "prefill.engine_version": ["0.24"],
    "decode.engine_version": ["0.16"],
    "engine_args": ["--block-size 32"], "extra_llm_api_options": ["missing.yaml"],
    "enable_mixed_chunk": [True], "scheduler_recv_interval": [4],
    "schedule_conservativeness": [0.5], "enable_chunked_prefill": [True],
    "piecewise_cuda_graph": [False], "max_cudagraph_capture_size": [10**6],
    "shared_experts_fusion": [True],
    "attention_dp_balance": [True],
    "attention_dp_timeout_iters": [4], "attention_dp_batching_wait_iters": [4],
    "capacity_scheduler_policy": ["MAX_UTILIZATION"],
    "batch_wait_timeout_iters": [4], "batch_wait_max_tokens_ratio": [0.5], "routing": ["uniform"],
    "prefill.all2all_backend": ["pplx"], "decode.all2all_backend": ["pplx"],
    "sessions": [3], "sessions_file": ["missing.csv"], "max_active_sessions": [1], "turns": ["3"],
    "think_time": ["0.02"], "tool_time": ["0.02"], "calls_per_turn": ["2"], "new_tokens": ["8"],
    "history": ["none"], "recorded_ttft_ms": [20.0], "recorded_tpot_ms": [5.0],
}  # fmt: skip

#: Where a field may change nothing in so short a run although it can in others.
_QUIET: dict[str, set[str]] = {
    "policy": set(BASES) - {"prompts alone", "streamed"},
    "prefill_policy": set(BASES) - {"co-located", "co-located groups"},
    "queue_order": set(BASES), "load_report_delay_ms": set(BASES),
    "signal_interval_ms": set(BASES), "kv_signal": set(BASES), "gather_interference": {"streamed"},
    "prefill.engine": set(BASES), "decode.engine": set(BASES),
    # A version may change memory alone; steps this small are not split (vLLM's thresholds).
    "engine_version": set(BASES), "prefill.engine_version": set(BASES),
    "decode.engine_version": set(BASES), "two_batch_overlap": set(BASES),
    "conditional_disagg": set(BASES), "kv_tier": set(BASES), "kv_load": set(BASES),
    "kv_reserve": set(BASES),
    "kv_overlap": set(BASES), "kv_in_flight": set(BASES),
    # So few sequences capture no step with prompts.
    "shared_experts_fusion": set(BASES),
    "piecewise_cuda_graph": set(BASES), "cudagraph_padding": {"prompts alone", "streamed"},
}  # fmt: skip
_OF_FAULTS = ("retry", "max_retries", "health_delay_ms", "user_retry_s")


def base_of(kind: str) -> dict[str, Any]:
    """Return the fields of a run of one of `BASES`."""
    base: dict[str, Any] = {
        "trace": "reference-moe", "num_requests": 24, "output_len": 6, "request_rate": 2000,
        "max_num_seqs": 3, "policy": "jsq",
    }  # fmt: skip
    if kind in ("prompts alone", "streamed"):
        del base["output_len"]
    return base | BASES[kind]


def with_field(base: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the fields of a run with another one; a pool's own is named ``decode.gpu``."""
    pool, _, field = name.rpartition(".")
    return base | ({pool: {field: value}} if pool else {name: value})


def may_be_quiet(kind: str, base: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a field may change nothing without a word: as it is, or under so short a load."""
    is_fault = name in _OF_FAULTS and "fail" in base
    own = base.get(name.rpartition(".")[2]) == value
    return own or kind in _QUIET.get(name, ()) or is_fault


def _effects(rng: Any, folder: Path) -> Case:
    """A run with an option and without: figures differ, or it is refused, or a warning names it."""
    kind = list(BASES)[rng.integers(len(BASES))]
    base = base_of(kind) | _EXTRAS[rng.integers(len(_EXTRAS))]
    if "fail" in base:
        base["fail"] = base["fail"].format(
            pool="prefill" if base["topology"].endswith("P") else "decode"
        )
    not_here = {"C": "prefill.", "P": "decode."}.get(base["topology"][-1], "-")
    names = [name for name in VALUES if not name.startswith(not_here)]
    name = names[rng.integers(len(names))]
    value = VALUES[name][rng.integers(len(VALUES[name]))]
    if name == "columns" and rng.random() < 0.5:
        value = "a=b"
    plain, given = folder / "plain.yaml", folder / "given.yaml"
    plain.write_text(yaml.safe_dump(base))
    given.write_text(yaml.safe_dump(with_field(base, name, value)))
    run = ["run", "--config", str(given), "--out", str(folder / "out")]
    same = ["run", "--config", str(plain), "--out", str(folder / "plain")]
    told = may_be_quiet(kind, base, name, value)
    return Case("effect", run, plain=None if told else same, option=name.rpartition(".")[2])


def _shared_caches(rng: Any, folder: Path) -> Case:
    """Processes that share a cache folder: empty, spoilt, cleared meanwhile, or too small."""
    trace = _small_trace(rng, folder)
    run = [*_small_run(trace, folder), "--policy", ("jsq", "eldr")[rng.integers(2)]]
    if rng.random() < 0.1:
        run = [
            "run",
            "--model",
            "Mixtral-8x7B",
            "--tensor-parallel-size",
            "4",
            "--topology",
            "1P2D",
        ]
        run += ["--num-prompts", "5", "--output-len", "4", "--out", str(folder / "out")]
    beside = [with_out(run, folder / f"beside{i}") for i in range(int(rng.integers(1, 3)))]
    if rng.random() < 0.3:
        beside.append(["cache", ("clear", "info")[rng.integers(2)]])
    return Case("shared cache", run, beside=tuple(beside), spoils_cache=rng.random() < 0.4)
