"""What `answers` asks, by part: all is small, so that all takes a CPU minute. A new policy,
model, GPU, field or published run is asked without a line here."""

import itertools
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bounds
import documented
import fuzz_cases
import msgspec
import numpy as np
import yaml
from answers import Asked, command, numbers
from fuzz_spoil import good_config, good_model, good_sweep

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles import acceptance, gpus, models
from eldr_sim.kernel_profiles.kernels import bounds as least
from eldr_sim.kernel_profiles.kernels import flops, roofline, small_kernels
from eldr_sim.kernel_profiles.kernels.all_to_all import BACKENDS, build_all_to_all, chunk_tokens
from eldr_sim.kernel_profiles.kernels.front_end import PARTS as FRONT_END
from eldr_sim.kernel_profiles.kernels.front_end import load_front_end
from eldr_sim.kernel_profiles.kernels.moe_latency import fit_moe_latency
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.library import Engine, shipped_tables
from eldr_sim.planning import slo
from eldr_sim.planning.launch.files import launch_files
from eldr_sim.planning.search import bounds as plan_bounds
from eldr_sim.planning.search import candidates, monotone_search, shapes
from eldr_sim.planning.studies import study
from eldr_sim.planning.studies.figures import Reproduction, Runner, claims_table
from eldr_sim.policies import registry
from eldr_sim.policies.choice import FIELDS
from eldr_sim.serving import bodies
from eldr_sim.serving.router.kv_events import CachedPrefixes
from eldr_sim.serving.router.signals import parse_metrics
from eldr_sim.serving.simulated import asked as served
from eldr_sim.serving.simulated import handover
from eldr_sim.serving.simulated.core import Stream, replay
from eldr_sim.serving.simulated.kv_events import KVEventsConfig, Publisher
from eldr_sim.serving.simulated.metrics import DIALECTS, Metrics
from eldr_sim.simulator.outcome import error_band
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.logs.request_logs import read_request_log
from eldr_sim.traces.routing.synthetic import presets, reshape, sampler
from eldr_sim.validation.published import bands, runs

KINDS = list(fuzz_cases.BASES)
#: A cluster in which a decision matters, by its name.
DECIDES: dict[str, dict[str, Any]] = {
    "decode": {"topology": "1P3D"}, "prefill": {"topology": "3P1D"}, "queue": {"topology": "1C"},
    "placement": fuzz_cases.BASES["groups"] | {"policy": "eldr:unit=engine"},
    "replica": fuzz_cases.BASES["groups"]
    | {"num_redundant_experts": 64, "topology": "1C", "num_requests": 6, "output_len": 3},
    "scaling": {"topology": "1P3D", "start_up": "0.002", "num_requests": 60},
}  # fmt: skip
LAYOUTS = [
    Parallelism(), Parallelism(2), Parallelism(2, True), Parallelism(4), Parallelism(1, True, 8),
    Parallelism(8, True), Parallelism(2, pipeline_parallel_size=2), Parallelism(2, True, 4),
]  # fmt: skip
ENGINES = [Engine(), Engine("sglang"), Engine("trtllm"), Engine("vllm", "0.16.0")]
TOKENS = np.array([1.0, 7.0, 64.0, 3000.0])


def _run(fields: dict[str, Any]) -> dict[str, Any]:
    return _figures(simulate(make_config(fields)))


def _figures(result: Any) -> dict[str, Any]:
    """Return a run's figures: of its summary those that stand first and one for all numbers, and
    one for each column of its tables."""
    known = [each for each in _leaves(result.summary) if each is not None]
    columns = {
        f"{kind}.{name}": table[name].to_pylist()
        for kind, table in (("requests", result.requests), ("steps", result.steps))
        for name in table.column_names
    }
    first = {name: result.summary.get(name) for name in _FIRST}
    whole = np.arcsinh(np.asarray(known, np.float64) * 1e6)  # all scales count alike
    numeric = {name: own for name, own in columns.items() if not {str} & set(map(type, own))}
    return first | {"summary": whole} | numeric


#: Figures of a summary that a reader of a difference knows.
_FIRST = (
    "completed",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "output_throughput",
)


def _leaves(value: Any) -> Any:
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif not isinstance(value, str):
        yield value


def _fields() -> Asked:
    """A value of each field, in the first kind of cluster that takes it, from another one on for
    each field."""
    for number, (name, values) in enumerate(fuzz_cases.VALUES.items()):
        kinds = KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]
        yield f"{name}={values[0]}", _first, kinds, name, values[0]


def _first(kinds: list[str], name: str, value: Any) -> dict[str, Any]:
    refused = []
    for kind in kinds:
        try:
            found = _run(fuzz_cases.with_field(fuzz_cases.base_of(kind), name, value))
        except InputError as error:
            refused.append(error.field)
        else:
            return {"kind": kind, "refused": ",".join(refused)} | found
    return {"refused": ",".join(refused)}


def _policies() -> Asked:
    small = fuzz_cases.small_trace(np.random.default_rng(0), Path.cwd())
    for decision, where in DECIDES.items():
        base = fuzz_cases.base_of("disaggregated") | where
        for name in registry.names(decision):
            more = ":interval=0.004" if decision == "scaling" else ""
            fields = base | {FIELDS[decision]: name + more}
            if decision == "placement":  # fits of few experts take no time
                fields |= {"model": str(small[1]), "trace": str(small[0]), "workload": "trace"}
                del fields["output_len"]
            yield f"{decision} {name}", _run, fields
            if decision in ("decode", "prefill"):
                late = {"prefix_len": 64, "load_report_delay_ms": 2}
                yield f"{decision} {name}, prefixes", _run, fields | late
            if decision == "replica":
                moving = {"eplb_interval": 3, "expert_placement": "eplb", "output_len": 9}
                moving |= {"eplb_overhead_ms": 3.0}
                yield f"{decision} {name}, moving", _run, fields | moving
            if decision == "decode":
                for kind in ("co-located", "groups"):
                    shared = fuzz_cases.base_of(kind) | {"policy": name, "num_requests": 12}
                    yield f"{decision} {name}, {kind}", _run, shared


def _mixtures() -> Asked:
    """Random parts of all fields together."""
    for seed in range(24):
        yield f"{seed}", _mixture, bounds.draw(7_000_000 + seed)


def _mixture(fields: dict[str, Any]) -> Any:
    told, result = bounds.run(fields)
    return told if result is None else _figures(result)


def _kernels() -> Asked:
    cards = [gpus.load_gpu(name) for name in gpus.list_gpus()]
    for number, (name, card) in enumerate(
        zip(models.list_models(), itertools.cycle(cards), strict=False)
    ):
        layout, engine = LAYOUTS[number % len(LAYOUTS)], ENGINES[number % len(ENGINES)]
        if models.load_model(name).is_dense:
            layout = LAYOUTS[number % 2]
        if number % 2:
            yield f"roofline: {name}, {card.name}", _roofline, models.load_model(name), card
        else:
            yield f"step: {name}, {card.name}", _step, name, card, layout, engine
    tables = [table for table in shipped_tables() if table.kind == "moe"]
    for table in tables[:: len(tables) // 16]:
        yield table.name, _moe, table
    model, card = models.load_model("Qwen3-30B-A3B"), gpus.load_gpu("H100")
    for backend in BACKENDS:
        for ranks in (4, 16):
            yield f"{backend} {ranks}", _all_to_all, model, card, backend, ranks
    for name in acceptance.list_acceptances():
        yield f"acceptance {name}", acceptance.shipped, name, "DeepSeek-R1", "mtp", 3
    for length in (1.0, 1.3, 2.5, 3.9):
        yield f"{length} tokens", lambda n: [f(n, 4) for f in _LENGTHS], length
    front = load_front_end("xeon-emerald-rapids")
    for part in FRONT_END:
        yield f"front end: {part}", lambda p: [front.time_s(p, n) for n in (1, 900, 20_000)], part


_LENGTHS = acceptance.rates_of_length, acceptance.spent


def _step(name: str, card: gpus.GPU, layout: Parallelism, engine: Engine) -> Any:
    made = build_step_time_model(
        name, card, max_num_seqs=9, max_model_len=1024, max_num_batched_tokens=128,
        parallelism=layout, engine=engine,
    )  # fmt: skip
    activated = [3.0] * made.n_moe_layers
    known = {part: entry["origin"] for part, entry in made.provenance.items()}
    return made.cost._asdict() | known | {
        "decode_s": made.decode_s(activated, 5, 333.0), "prompt_s": made.prompt_s(100),
        "prefill_s": made.prefill_s([60, 20], [60, 220]), "missing": made.missing,
        "reserved": layout.weight_bytes(made.model),
    }  # fmt: skip


def _roofline(model: models.ModelDims, card: gpus.GPU) -> Any:
    work = flops.prefill_work(model)
    return {
        "model": {name: getattr(model, name) for name in _MODEL},
        "matrices": model.matrices, "shapes": [model.heads(False), model.attention_kinds],
        "decode": roofline.decode_attention(card, model, False).time_s(TOKENS, TOKENS * 100),
        "prompt": roofline.prefill_attention(card, model, False, 4096),
        "gemm": roofline.gemm_s(card, model.hidden_size, 4096, TOKENS),
        "all_reduce": [roofline.all_reduce_s(card, n, TOKENS * 1e4) for n in (2, 16)],
        "least": least.linear_s(card, 4096, model.hidden_size, TOKENS, "bfloat16"),
        "flops": [work.flops(n) for n in (1, 3000)], "cached": flops.prefill_flops(model, 9, 900),
        "pairs": flops.pair_flops(model), "peak": flops.peak_flops(model, card),
        "bytes": flops.expert_bytes(model, TOKENS) if model.n_experts else 0,
        "small": small_kernels.layer_kernels(model, compiled=True),
    }  # fmt: skip


_MODEL = (
    "is_dense", "n_moe_layers", "n_full_layers", "expert_width", "attention_params",
    "total_params", "active_params", "weight_bytes", "kv_bytes_per_token", "n_kv_tensors",
    "state_bytes", "embedding_params", "lm_head_params",
)  # fmt: skip


def _moe(table: Any) -> Any:
    made = fit_moe_latency(table.load())
    distinct = np.minimum(TOKENS[:3], made.n_experts)
    return {
        "time_s": made.time_s(TOKENS[:3], distinct), "few": made.time_s(TOKENS[:3], 0.4),
        "prefill_s": made.prefill_s(TOKENS),
        "grid": made.grid_s(9), "mixed": made.mixed_grid_s(9), "errors": made.fit_error,
    }  # fmt: skip


def _all_to_all(model: models.ModelDims, card: gpus.GPU, backend: Any, ranks: int) -> Any:
    made = build_all_to_all(model, card, backend, ranks)
    return {
        "cost": made.cost, "gathered": made.gathered, "chunk": chunk_tokens(backend, None),
        "dispatch": made.dispatch_s(100.0, 7.0), "combine": made.combine_s(100.0, 7.0),
    }  # fmt: skip


def _hf_configs() -> Asked:
    """A model's configuration with keys of others, and without each of its own."""
    good = good_model()
    changes = [{key: None} for key in good] + [
        {"num_experts": 8}, {"num_experts_per_tok": 1}, {"sliding_window": 128},
        {"tie_word_embeddings": True}, {"torch_dtype": "float16"}, {"n_shared_experts": 1},
        {"first_k_dense_replace": 1}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2},
        {"attention_bias": True}, {"head_dim": 96}, {"num_key_value_heads": 1},
        {"use_sliding_window": True, "sliding_window": 64}, {"unheard_of": 3},
        *({"quantization_config": q} for q in (
            {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "fp8"},
            {"quant_method": "mxfp4"}, {"quant_method": "awq", "bits": 4}, {"quant_method": "x"},
        )),
    ]  # fmt: skip
    for number, change in enumerate(changes):
        yield json.dumps(change), _hf_config, number, good | change


def _hf_config(number: int, document: dict[str, Any]) -> Any:
    path = Path(f"{number}/config.json")
    path.parent.mkdir()
    known = {key: value for key, value in document.items() if value is not None}
    path.write_text(json.dumps(known))
    return models.load_model(path)


def _launches() -> Asked:
    """Published launch lines as runs, and clusters as files to launch."""
    lines = {run.row["launch"]: run for run in runs.read_runs()}
    for line, run in lines.items():
        yield (
            line[:160],
            lambda run: {
                name: json.dumps(value, default=str) for name, value in run.fields().items()
            },
            run,
        )
    for kind, own in fuzz_cases.BASES.items():
        for engine in ("vllm", "sglang", "trtllm"):
            yield (
                f"{engine}, {kind}",
                _files,
                {"engine": engine, "output_len": 9, "tensor_parallel_size": 2} | own,
            )


def _files(fields: dict[str, Any]) -> Any:
    files = launch_files(make_config(fields), "1", (100.0, 9.0, 3.0))
    return {name: numbers(text) for name, text in files.items()}


def _logs() -> Asked:
    documented.write_files(Path.cwd())
    for name in documented.FILES:
        yield name, _log, name
    stamps = {"s": 1.0, "ms": 1e3, "us": 1e6}
    for unit, size in stamps.items():
        rows = [{"timestamp": i * i * size, "input_length": 9 + i, "output_length": 1 + i % 3,
                 "hash_ids": [0, i // 2]} for i in range(12)]  # fmt: skip
        name = f"log_{unit}.jsonl"
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for asked in (None, "s", "ms", "us"):
            yield f"{name} in {asked}", _log, name, asked


def _log(name: str, unit: str | None = None) -> Any:
    return read_request_log(name, columns=_COLUMNS.get(name), time_unit=unit)


_COLUMNS = {"log.csv": "time_s=t,input=prompts,output=outputs"}


def _commands() -> Asked:
    documented.write_files(Path.cwd())
    Path("base.yaml").write_text(yaml.safe_dump(good_config()))
    Path("good.yaml").write_text(yaml.safe_dump(good_sweep()))
    small = ["--trace", "reference-moe", "--num-prompts", "12", "--output-len", "6"]
    one = ["--jobs", "1"]
    for line in (
        ["run", *small, "--topology", "2P2D", "--out", "a", "--goodput", "ttft:100"],
        ["run", *small, "--topology", "1P3D", "--policy", "eldr", "--out", "b", "--verbose"],
        ["run", *small, "--topology", "3C", "--fail", "decode:0@0.1+0.2",
         "--price-per-gpu-hour", "2"],
        ["run", *small, "--workload", "log.csv", "--topology", "1P1D"],
        ["run", "--trace", "reference-moe", "--workload", "log.csv", "--columns",
         "time_s=t,input=prompts,output=outputs", "--busiest", "3s", "--topology", "1P1D"],
        ["explain", "a"], ["explain", "a", "--request", "3"], ["explain", "a", "b"],
        ["report", "a", "b", "--out", "page.html"],
        ["compare", *small, "--topology", "1P2D", "--policy", "jsq,eldr", "--seeds", "2", *one],
        ["compare", *small, "--topology", "1C", "--drafts", "0,1", "--seeds", "2", *one],
        ["compare", *small, "--vary", "topology=2C,1P1D", "--seeds", "2", *one],
        ["what-if", "base.yaml", "--set", "policy=p2c", "--seeds", "2", *one],
        ["sweep", "good.yaml", "--out", "swept", *one], ["report", "swept", "--out", "s.html"],
        ["plan", *small, "--slo", "ttft:500,tpot:30", "--seeds", "2", "--max-gpus", "4",
         "--request-rate", "8", "--duration", "4", "--gpu", "h100", "--price", "h100=2",
         "--tensor-parallel-size", "1", "--out", "planned", *one],
        ["plan", *small, "--slo", "ttft:500,tpot:30", "--seeds", "2", "--gpus", "3", "--duration",
         "4", "--tensor-parallel-size", "1", *one],
        ["report", "planned", "--out", "p.html"],
        ["balance", "monday.json", "--model", "DeepSeek-V3", "--gpu", "H200", "--ranks", "8"],
        ["trace", "list"], ["options", "block_size"],
        ["gpus", "show", "MI300X"], ["support", "Qwen3-30B-A3B", "--gpu", "H100"],
        ["tables", "list", "H200", "msa", "vllm"], ["models"],
        ["validate", "published", "--rows", "new.csv", "--freeze", "frozen.json", *one],
        ["validate", "bench", "result.json", "--model", "Qwen3-30B-A3B", "--trace",
         "reference-moe"],
        ["trace", "synthesize", "--preset", "Mixtral-8x7B", "--requests", "4", "--calibration", "4",
         "--layers", "2", "--prompt-len", "9", "--output-len", "9", "--out", "mine"],
        ["trace", "inspect", "mine"],
    ):  # fmt: skip
        yield " ".join(line)[:150], command, *line


def _planning() -> Asked:
    shares = [[0.9, 0.95], [0.99, 1.0, 0.98], [0.5, 0.6, 0.55, 0.4], [1.0, 1.0, 1.0]]
    level = parse_slo(["ttft:500,tpot:30"])
    for n, own in enumerate(shares):
        asked = slo.Objective(level, 0.95, slo.looks_up_to(8))
        yield f"shares {n}", lambda own, asked: {
            "t": slo.t_interval(own), "paired": slo.paired_percent(own, own[::-1]),
            "below": slo.is_below(own, [1.0] * len(own)), "out": asked.is_out_of_reach(own),
            "interval": asked.interval(own, 100), "verdict": asked.verdict(asked.interval(own, 90)),
            "blocks": slo.block_interval([[(int(20 * s), 20), (9, 10)] for s in own]),
        }, own, asked  # fmt: skip
    for seed in range(40):
        yield f"search {seed}", _search, np.random.default_rng(seed)
    for kind, own in fuzz_cases.BASES.items():
        config = make_config(fuzz_cases.base_of(kind) | own | {"goodput": {"ttft": 500}})
        yield f"sizes: {kind}", lambda config: {
            "cost": candidates.cost(config), "label": candidates.cluster_label(config),
            "shape": candidates.shape_label(config), "gpu": candidates.gpu_label(config),
            "shapes": [str(each) for each in shapes.shapes(config, (1, 2))],
            "engines": shapes.usual_engines(config), "colocated": shapes.may_be_colocated(config),
            "bounds": plan_bounds.bounds(config, slo.Objective(level)),
        }, config  # fmt: skip
    for name in models.list_models():
        yield f"engines: {name}", lambda name: [
            shapes.usual_engines(make_config({"model": name, "gpu": gpu, "topology": "1P1D"}))
            for gpu in ("H100", "MI300X", "B200")
        ], name  # fmt: skip
    for path in sorted(Path(__file__).parents[2].glob("studies/*/*.yaml")):
        for name, make in study.read_study(path).known(_Figures({})).items():
            yield f"{path.parent.name}: {name}", _reproduced, make


class _Figure(float):
    """A figure that follows from its name alone, and so do figures within it."""

    def __getitem__(self, name: str) -> Any:
        return _Figure(1.0 + zlib.crc32(f"{float(self)} {name}".encode()) / 2**32)


class _Figures(Runner):
    """Runs of a study that are not run."""

    def run(self, cases: Any) -> Any:
        return [_Figure(zlib.crc32(json.dumps(case, default=str).encode())) for case in cases]


def _reproduced(make: Callable[[], Reproduction]) -> Any:
    made = make()
    return {"claims": claims_table([made]), "rows": made.table}


def _search(rng: Any) -> Any:
    """A search over clusters of which those meet the objective that reach a border."""
    a, b, price = rng.uniform(0.5, 4, 3)
    space = monotone_search.SearchSpace(
        int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(8, 30)),
        lambda x, y: x * price + y, x_size=int(rng.integers(1, 3)),
    )  # fmt: skip
    asked: list[tuple[int, int]] = []

    def judge(x: int, y: int) -> Any:
        asked.append((x, y))
        meets = (x + 1) ** a * y**b >= 300
        return slo.Verdict.MEETS if meets else slo.Verdict.MISSES
        yield

    def rate(value: float) -> Any:
        asked.append((0, round(value, 6)))
        return value < a * 10
        yield

    start = (2, 3) if rng.random() < 0.5 else None
    found = {
        "cheapest": _ended(monotone_search.cheapest(space, judge, start)),
        "fewest": _ended(monotone_search.fewest(space, judge, 4)),
        "prompts": _ended(monotone_search.fewest(space, judge, None, prefill=True)),
        "rate": _ended(monotone_search.highest_rate(b * 10, 0.1, rate)),
    }  # fmt: skip
    return {name: str(each) for name, each in found.items()} | {"asked": [list(p) for p in asked]}


def _ended(search: Any) -> Any:
    try:
        while True:
            next(search)
    except StopIteration as end:
        return end.value


def _bands() -> Asked:
    rng = np.random.default_rng(60)
    kinds = [("vllm", "H100", "moe"), ("vllm", "H200", "moe"), ("sglang", "H100", "dense")]
    rows = [
        bands.Residual(f"p{i % 5}", kinds[i % 3], float(v))
        for i, v in enumerate(rng.normal(0, 0.2, 60))
    ]
    yield "cells", lambda: {".".join(k): v for k, v in bands.cells_of(rows).items()}
    yield "growth", lambda: {"growth": bands.growth_of(rows, bands.by_publishers)}
    yield "coverage", bands.coverage, rows
    pairs = [bands.Pair(f"p{i % 4}", float(v)) for i, v in enumerate(rng.normal(0, 0.1, 30))]
    yield "relative", bands.relative, pairs
    yield "line", error_band.relative_line
    for name in models.list_models()[::7]:
        model = models.load_model(name)
        for apart, load in ((False, 8.0), (True, 700.0)):
            yield f"{name} {load}", _band, model, apart, load


def _band(model: models.ModelDims, apart: bool, load: float) -> Any:
    kind = error_band.kind_of("vllm", "H100", model, apart=apart, in_flight=load)
    band = error_band.band_of(kind)
    level = parse_slo(["ttft:500,tpot:30"])
    return {
        "kind": kind, "band": band, "words": error_band.in_words(band),
        "interval": error_band.interval(band, "tpot", 20.0),
        "bad": error_band.at_bad_end(level, band), "line": error_band.one_line(band),
    }  # fmt: skip


def _routing() -> Asked:
    preset = presets.preset_model("Mixtral-8x7B", n_layers=2)
    changed = {
        "preset": preset, "layers": reshape.with_layers(preset, 3),
        "experts": reshape.with_experts(preset, 6, 2), "scaled": reshape.scaled(preset, topics=0.5),
    }  # fmt: skip
    for name, model in changed.items():
        yield name, sampler.sample_experts, model, [0, 1, 0], [9, 5, 7], [4, 8, 1], 3


def _serving() -> Asked:
    asked: list[dict[str, Any]] = [
        {"prompt": "some words"}, {"prompt": [1, 2, 3]}, {"prompt": [[1], [2, 3]]}, {"prompt": ""},
        {"prompt": "a" * 50, "max_tokens": 3, "stop": "ok"}, {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "n": 3, "best_of": 3}, {"prompt": "a", "n": 2, "best_of": 3},
        {"prompt": "a", "min_tokens": 4, "max_tokens": 9}, {"prompt": "a", "ignore_eos": True},
        {"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6, "stream": True},
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "stream_options": {}}, {"prompt": "a", "logprobs": 3},
        {"prompt": "a", "logprobs": 33}, {"prompt": "a", "echo": True}, {"prompt": "a", "odd": 1},
        {"prompt": "a" * 5000}, {"prompt": "a", "model": "other"}, {"prompt": "a", "model": "lora"},
        {"messages": [{"role": "user", "content": "hello there"}]}, {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]},
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2},
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
        {"messages": [{"content": "x"}]}, {"messages": "x"}, {"input": "hi", "instructions": "be"},
        {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 4},
        {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}, {"prompt": ["a", "b"]},
        {"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
        {"prompt": "a", "response_format": {"type": "json_object"}}, {"prompt": "a", "stop": [1]},
    ]  # fmt: skip
    for body in asked:
        raw = json.dumps(body).encode()
        for over in (False, True):
            yield (
                f"{raw[:90].decode()} {over}",
                lambda raw, over: _without_raw(bodies.parse_body(raw, handed_over=over)),
                raw,
                over,
            )
        for role in (None, "prefill", "decode") if "kv_transfer_params" in body else (None,):
            kind = "chat" if "messages" in body else "response" if "input" in body else "completion"
            yield f"{raw[:90].decode()} at {role}", _read, raw, kind, role
        yield f"{raw[:90].decode()} prefill", bodies.prefill_body, body
    for stops in ([], ["ok"], ["k t", "tok"], ["zz"]):
        for n in (1, 5):
            yield f"stopped {stops} {n}", served.stopped, n, stops
    for name, own in (
        ("vllm", _METRICS),
        ("sglang", _METRICS.replace("vllm", "sglang")),
        ("odd", "x NaN\n"),
    ):
        yield f"metrics of {name}", parse_metrics, own
    yield "handed over", handover.handed_over, 3, "a", 33, 16
    for topology in ("2P3D", "2C", "1P"):
        config = {"topology": topology, "output_len": 4}
        yield (
            f"workers of {topology}",
            lambda c: [
                (w.role, w.config.cluster.topology, w.config.requests.seed)
                for w in handover.workers_of(make_config(c))
            ],
            config,
        )
    yield "prefixes", _prefixes
    for kind in ("disaggregated", "co-located"):
        yield f"replay: {kind}", _replayed, fuzz_cases.base_of(kind)
    for engine in DIALECTS:
        for role in (None, "prefill", "decode"):
            yield f"counted: {engine}, {role}", _counted, engine, role
    for as_lists in (False, True):
        yield f"events {as_lists}", _published, as_lists


def _replayed(fields: dict[str, Any]) -> Any:
    head = {"config": make_config(fields).model_dump(mode="json"), "speed": 1.0}
    rows: list[dict[str, Any]] = [
        {"t": 0.01 * n, "prompt_len": 40 + n, "output_len": 3 + n, "prefix": [0, 1, n]}
        for n in range(9)
    ]
    rows.insert(6, {"t": 0.05, "cancel": 5})
    rows.append({"t": 0.1, "prompt_len": 1, "output_len": 1})
    Path("served.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [head, head, *rows]))
    return _figures(replay("served.jsonl"))


def _counted(engine: str, role: Any) -> dict[str, str]:
    """What a server says of three requests: of many tokens, of one, and of a client that left."""
    names = "arrival_s", "prefill_start_s", "decode_start_s", "first_token_s", "finish_s"
    kinds = [(name, np.float64) for name in names] + [("preemptions", np.int64)]
    times = [(1.0, 1.5, 3.5, 3.0, 9.0, 2), (2.0, 2.25, 3.0, 4.0, 4.0, 0), (3.0, -1, -1, -1, -1, 1)]
    core: Any = SimpleNamespace(
        config=make_config({"topology": "2C"}), role=role, open={}, kv_blocks=lambda: [100, 300],
        cluster=SimpleNamespace(requests=np.array(times, kinds)), cached_tokens=lambda s: s.number,
        engines=lambda: [(3, 1, 0.25), (0, 0, 0.5)],
    )  # fmt: skip
    metrics = Metrics("m", engine)
    metrics.watch(core)
    ends = ("length", "completed"), ("stop", "completed"), ("stop", "client_left")
    for number, (reason, outcome) in enumerate(ends):
        stream = Stream(number, 7 + number, (9, 1, 5)[number], reason, [])
        for total, at_s in ((1, 3.0), (1, 3.5), (4, 5.0), (stream.output_len, 9.0))[: 4 - number]:
            stream.give(min(total, stream.output_len), at_s)
        core.ended(stream, outcome)
    lines = metrics.text().decode().splitlines()
    return {n: v for n, _, v in (line.rpartition(" ") for line in lines if "_created" not in line)}


def _published(as_lists: bool) -> Any:
    """The events of blocks that come and go, as a publisher keeps them to be sent again."""
    config = KVEventsConfig(endpoint="inproc://eldr-sim", as_lists=as_lists, buffer_steps=4)
    publisher = Publisher(config, 0, 4)
    publisher.learn([3, 4, 9], list(range(11)), None)
    publisher.learn([3, 7], list(range(8)), "lora")
    for stored, removed in (([3, 4, 9], []), ([7, 3], [4]), ([], []), ([], [7]), ([4], [3])):
        publisher.tell(stored, removed)
    publisher.clear()
    kept = [(number, msgspec.msgpack.decode(data)) for number, data in publisher._kept]
    publisher.close()
    return [
        (number, json.dumps([batch[1], batch[2]] if as_lists else batch | {"ts": 0}))
        for number, batch in kept
    ]


_METRICS = "".join(
    f'vllm:{name}{{engine="0"}} {value}\n'
    for name, value in (("num_requests_waiting", 3), ("num_requests_running", 5),
                        ("kv_cache_usage_perc", 0.25))
) + 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'  # fmt: skip


def _without_raw(request: Any) -> Mapping[str, Any]:
    return {name: value for name, value in request._asdict().items() if name not in ("raw", "body")}


def _read(raw: bytes, kind: str, role: Any) -> Any:
    parser = served.Parser("m", ["lora"], None, 1000, role)
    found = parser.read(raw, kind)
    first = found.prompts[0]
    return _without_raw(found) | {
        "most": parser.most_of(found, first), "blocks": len(served.blocks_of(first, 20, 4, None)[0])
    }  # fmt: skip


def _prefixes() -> Any:
    known = CachedPrefixes(2)
    tokens = list(range(40))
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "token_ids": tokens[:16],
        "block_size": 8,
    }
    known.hear(0, [0.0, [event]])
    known.hear(1, [0.0, [event | {"block_hashes": [7], "token_ids": tokens[:8]}]])
    before = known.matched(known.keys(tokens), 40)
    known.hear(0, [1.0, [{"type": "BlockRemoved", "block_hashes": [2]}]])
    after = known.matched(known.keys(tokens), 40)
    return {"before": before, "after": after, "blocks": [known.blocks_of(e) for e in (0, 1)]}


PARTS: dict[str, Callable[[], Asked]] = {
    "serving": _serving, "bands": _bands, "planning": _planning, "logs": _logs,
    "configurations": _hf_configs, "launches": _launches, "routing": _routing,
    "kernels": _kernels, "policies": _policies, "mixtures": _mixtures, "fields": _fields,
    "commands": _commands,
}  # fmt: skip
