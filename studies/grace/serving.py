"""What placements cost besides, not in the paper: KV blocks, a NIC shared with KV, moved bytes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from eldr_sim.charts import bars, lines
from eldr_sim.planning.slo import paired_percent
from eldr_sim.planning.studies.figures import Reproduction, Runner, change, mean, write_requests
from eldr_sim.simulator.outcome.summary import summary_of
from eldr_sim.simulator.run import build_cluster, offered_load
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.setup.transfer import PRESETS
from studies.grace.figures import TWO_BY_TWO
from studies.grace.settings import write_gpu

_GROUP: dict[str, Any] = {
    "frontend": "none", "data_parallel_size": TWO_BY_TWO.n_ranks, "enable_expert_parallel": True,
    "gpus_per_node": TWO_BY_TWO.gpus_per_node, "all2all_backend": "deepep_ht",
}  # fmt: skip
#: Redundant experts and the choice of instances.
REPLICAS = (*((n, "local_first") for n in (0, 8, 16, 32, 64)), *((n, "weighted") for n in (16, 64)))
_RATE, _PROMPT, _OUTPUT = 24.0, 1024, 384
_SLO = {"ttft": 2000.0, "tpot": 60.0}
#: Gb/s of a node.
NODE_GBITS = (25.0, 100.0, 400.0)
#: Steps between relocations, where experts move; and Gb/s of a node.
INTERVALS = (50, 200, 800)
DRIFT_GBITS = (25.0, 100.0, 400.0)


def _log(folder: str, n: int, prompt: int, output: int, seed: int) -> str:
    """Write a log of equal requests at random moments, whose prompts share no prefix."""
    at = np.cumsum(np.random.default_rng(seed).exponential(1e3, n)).astype(int).tolist()
    return write_requests(Path(folder) / f"{seed}.jsonl", at, [prompt] * n, [output] * n)


def replicas(runner: Runner, seeds: Sequence[int], quick: bool = False) -> Reproduction:
    """Goodput by redundant experts where the KV cache binds: 2x2 A100-40GB, co-located."""
    n = 250 if quick else 500
    base = _GROUP | {
        "gpu": "A100-40GB", "topology": "1C", "num_requests": n, "request_rate": _RATE,
        "warmup": n / 4 / _RATE, "policy": "jsq", "expert_placement": "eplb", "goodput": _SLO,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for k, choice in REPLICAS:
            case = base | {"num_redundant_experts": k, "replica_choice": choice}
            logs = {seed: _log(folder, n, _PROMPT, _OUTPUT, seed) for seed in seeds}
            groups[k, choice] = [case | {"workload": w, "seed": seed} for seed, w in logs.items()]
        runs = runner.groups(groups)
    shown = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "preemptions")
    rows = []
    for (k, choice), own in runs.items():
        found = change(own, runs[REPLICAS[0]], "request_goodput")
        rows.append(
            {"redundant": k, "choice": choice, "kv_blocks": own[0]["kv_blocks_per_worker"]}
            | {"goodput": mean(own, "request_goodput")}
            | dict(zip(("change", "low", "high"), found, strict=True))
            | {key: mean(own, key) for key in shown}
        )
    title = "Redundant experts against KV blocks, 2x2 A100-40GB"
    draw = lines(rows, "redundant", "goodput", "choice")
    return Reproduction("replicas", title, rows, [], draw)


def shared_nic(seeds: Sequence[int]) -> Reproduction:
    """KV transfers and expert traffic on one NIC, by mean utilisation, on the paper's RTX 4090.

    The simulator gives both links of their own. A run tells the mean bytes/s of each, a second one
    gives each what the other leaves, and so on to 1%: an estimate, as bursts that meet take turns.
    """
    rows = []
    with TemporaryDirectory() as folder:
        for gbits in NODE_GBITS:
            for seed in seeds:
                log = _log(folder, 160, 1024, 128, seed)
                rows.append({"node_gbit_s": gbits, **_share(log, gbits, seed)})
    table = []
    for gbits in NODE_GBITS:
        own = [row for row in rows if row["node_gbit_s"] == gbits]
        kept = ("prefill_share", "decode_share", "kv_share", "ttft_ms", "tpot_ms")
        line: dict[str, Any] = {"node_gbit_s": gbits}
        line |= {key: float(np.mean([row[key] for row in own])) for key in kept}
        for key in ("ttft_ms", "tpot_ms"):
            span = paired_percent([r[f"shared_{key}"] for r in own], [r[key] for r in own])
            line |= {f"{key}_change": span.mean, f"{key}_low": span.low, f"{key}_high": span.high}
        table.append(line)
    title = "KV transfers and expert traffic on one NIC, 2x2 + 2x2 RTX 4090"
    draw = bars(table, "node_gbit_s", ("ttft_ms_change", "tpot_ms_change"))
    return Reproduction("shared_nic", title, table, [], draw)


def _share(log: str, gbits: float, seed: int) -> dict[str, float]:
    """Return latencies without and with sharing, and what each uses of a GPU's NIC without."""
    nic = gbits * 1e9 / 8 / TWO_BY_TWO.gpus_per_node
    left = {"experts": 1.0, "kv_out": 1.0, "kv_in": 1.0}
    first: dict[str, float] = {}
    for _ in range(6):
        figures, used = _serve(log, nic, left, seed)
        first = first or {
            "ttft_ms": figures["mean_ttft_ms"],
            "tpot_ms": figures["mean_tpot_ms"],
            "prefill_share": used["experts_out"],
            "decode_share": used["experts_in"],
            "kv_share": used["kv"],
        }
        # A mean that fills the NIC leaves nothing: 5% keep the two going.
        new = {
            "experts": max(0.05, 1 - used["kv"]),
            "kv_out": max(0.05, 1 - used["experts_out"]),
            "kv_in": max(0.05, 1 - used["experts_in"]),
        }
        if all(abs(new[key] / left[key] - 1) < 0.01 for key in new):
            break
        left = new
    shared = {f"shared_{name}_ms": figures[f"mean_{name}_ms"] for name in ("ttft", "tpot")}
    return first | shared


def _serve(
    log: str, nic: float, left: dict[str, float], seed: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Run with parts of the NIC; returns figures, and what each uses of a whole one."""
    with TemporaryDirectory() as folder:
        share = {"nic_bandwidth": nic * left["experts"]}
        config = make_config(
            _GROUP
            | {
                "model": "Qwen3-30B-A3B",
                "trace": "reference-moe",
                "gpu": write_gpu(Path(folder) / "gpu.json", TWO_BY_TWO, **share),
                "topology": "1P1D",
                "kv_transfer": "ideal",
                "workload": log,
                "request_rate": 6.0,
                "num_requests": 160,
                "warmup": 4.0,
                "policy": "jsq",
                "prefill_policy": "least_loaded",
                "seed": seed,
            }
        )
        prepared = prepare(config)
    transfer = PRESETS["ideal"].over(nic * left["kv_out"], nic * left["kv_in"])
    prepared = replace(prepared, spec=replace(prepared.spec, transfer=transfer))
    requests, window = offered_load(config, prepared.trace)
    cluster = build_cluster(config, prepared, requests, window)
    record = cluster.run()
    summary = summary_of(config, replace(prepared, spec=cluster.spec), requests, record)
    span = float(record.requests["arrival_s"].max() - record.requests["arrival_s"].min())

    def used(steps: Any) -> float:
        # `between_bytes` are dispatch's and combine's, sent or received by the busiest rank.
        own = steps[steps["start"] <= record.requests["arrival_s"].max()]
        return float(own["between_bytes"].sum()) / span / nic

    kv = float((requests.prompt_len.sum()) * prepared.model.kv_bytes_per_token)
    return summary, {
        "experts_out": used(record.prefill_group_steps),
        "experts_in": used(record.decode_group_steps),
        "kv": kv / TWO_BY_TWO.n_ranks / span / nic,
    }


def relocation(runner: Runner, seeds: Sequence[int], quick: bool = False) -> Reproduction:
    """When moving experts after a drift repays its bytes: gpt-oss-20b, 2x2 RTX 4090."""
    n = 1024 if quick else 4096
    with TemporaryDirectory() as folder:
        base = _GROUP | {
            "model": "GPT-OSS-20B", "trace": "gpt-oss-20b", "topology": "1C", "workload": "trace",
            "request_rate": "inf", "num_requests": n, "max_num_seqs": 64, "output_len": 64,
            "policy": "round_robin", "enable_prefix_caching": False, "expert_placement": "eplb",
            "domain_mix": {"code": 1.0}, "domain_mix_end": {"multilingual": 1.0},
        }  # fmt: skip
        cases: dict[tuple[float, str], dict[str, Any]] = {}
        for gbits in DRIFT_GBITS:
            nic = gbits * 1e9 / 8 / TWO_BY_TWO.gpus_per_node
            path = Path(folder) / f"{gbits:g}.json"
            own = base | {"gpu": write_gpu(path, TWO_BY_TWO, nic_bandwidth=nic)}
            cases[gbits, "linear"] = own | {"expert_placement": "linear"}
            cases[gbits, "stale"] = own
            for steps in INTERVALS:
                moved = {"eplb_interval": steps, "eplb_window": steps}
                cases[gbits, f"every {steps}"] = own | moved
        runs = runner.paired(cases, seeds)
    rows = [_moved(*key, own, runs[key[0], "stale"]) for key, own in runs.items()]
    title = "Experts moved after a drift of domains, 2x2 RTX 4090"
    draw = lines(rows, "placement", "time_change", "node_gbit_s")
    return Reproduction("relocation", title, rows, [], draw)


def _moved(gbits: float, name: str, own: Sequence[Any], stale: Sequence[Any]) -> dict[str, Any]:
    """Return what moving gave against the stale placement, in time of the whole run."""
    # All requests come at once: a run lasts as long as its tokens take.
    ours, theirs = ([1 / run["output_throughput"] for run in runs] for runs in (own, stale))
    span = paired_percent(ours, theirs)

    def step_ms(runs: Sequence[Any]) -> float:
        """Mean of a step without what it waits for experts."""
        waits = [1e3 * (r["relocation_stall_s"] or 0.0) / r["group"]["steps"] for r in runs]
        steps = [r["group"]["mean_step_ms"] for r in runs]
        return float(np.mean(np.subtract(steps, waits)))

    gain, n = step_ms(stale) - step_ms(own), mean(own, "relocations")
    stall_s = mean(own, "relocation_stall_s")
    return (
        {"node_gbit_s": gbits, "placement": name, "time_change": span.mean}
        | {"time_low": span.low, "time_high": span.high, "step_ms": step_ms(own)}
        | {"load_max": mean(own, "group.busiest_rank_pairs_over_mean"), "relocations": n}
        | {"moved_gb": mean(own, "relocated_bytes") / 1e9, "stall_s": stall_s}
        | {"steps": mean(own, "group.steps")}
        | {"repaid_after_steps": 1e3 * stall_s / n / gain if n and gain > 0 else None}
    )
