"""Folders that reports are made of."""

import itertools
import json
import sys

import pyarrow as pa
import pytest

from eldr_sim.cli.main import main
from eldr_sim.simulator.results import write_json, write_result, write_table
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config


@pytest.fixture(scope="session")
def report_folders(tmp_path_factory):
    """What ``eldr-sim report`` reads.

    The runs ``jsq`` and ``eldr`` and a ``comparison`` as the commands write them; a ``sweep``, a
    ``plan`` of a cluster and one of ``rates`` in their formats, with figures made up from a run's.
    """
    folder = tmp_path_factory.mktemp("report")
    for policy in ("jsq", "eldr"):
        fields = {"topology": "2P3D", "request_rate": 20, "duration": 3, "warmup": 1}
        fields |= {"output_len": 20, "goodput": {"ttft": 500, "tpot": 40}}
        config = make_config({**fields, "policy": policy, "price_per_gpu_hour": 2.5})
        result = simulate(config)
        write_result(result, folder / policy)
    command = "compare --policies jsq --seeds 2 --topology 1P2D --request-rate 10 --duration 2"
    command += f" --warmup 1 --output-len 10 --out {folder / 'comparison'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["eldr-sim", *command.split(), "--jobs", "1"])
        main()
    _write_sweep(folder / "sweep", result.summary)
    _write_plans(folder, result)
    return folder


def _write_sweep(folder, summary):
    """Two policies at three rates, two runs each; the run of one point under one seed failed."""
    points, aggregate = [], []
    scalars = {k: v for k, v in summary.items() if isinstance(v, int | float) and k != "seed"}
    nested = {k: json.dumps(v) for k, v in summary.items() if isinstance(v, dict | list)}
    texts = {k: v for k, v in summary.items() if isinstance(v, str)}
    for index, (policy, rate) in enumerate(itertools.product(["jsq", "eldr"], [10.0, 20.0, 40.0])):
        point = {"point": index, "name": f"policy={policy}, request_rate={rate:g}"}
        point |= {"policy": policy, "request_rate": rate}
        figures = [
            {key: value * (1 + 0.1 * index + 0.01 * run) for key, value in scalars.items()}
            for run in range(2)
        ]
        for run in range(2):
            row = {**point, "run": run, "seed": run, "status": "completed", "reason": ""}
            row |= {k: v for k, v in (texts | figures[run] | nested).items() if k not in point}
            if (index, run) == (5, 1):
                row = dict.fromkeys(row) | {k: row[k] for k in (*point, "run", "seed")}
                row |= {"status": "failed", "reason": "model: no room <for> it"}
            points.append(row)
        done = 1 if index == 5 else 2
        row = {**point, "runs_completed": done, "runs_failed": 2 - done}
        for key in scalars.keys() - point.keys():
            mean = sum(f[key] for f in figures[:done]) / done
            ends = (None, None) if done == 1 else (0.9 * mean, 1.1 * mean)
            row |= {key: mean, f"{key}_low": ends[0], f"{key}_high": ends[1]}
        aggregate.append(dict(sorted(row.items())))
    folder.mkdir()
    write_table(folder / "points.parquet", pa.Table.from_pylist(points))
    write_table(folder / "aggregate.parquet", pa.Table.from_pylist(aggregate))
    parameters = {"policy": ["jsq", "eldr"], "request_rate": [10, 20, 40]}
    document = {
        "sweep": {"sweep": {"type": "grid", "parameters": parameters}, "multiRun": {"numRuns": 2}},
        "parameters": list(parameters),
        "points": 6,
        "runs": 12,
        "failed_runs": 1,
        "confidence_level": 0.9,
        "versions": {"eldr-sim": "0.1.0"},
    }
    write_json(folder / "sweep.json", document)


def _write_plans(folder, result):
    """A plan with an answer, a policy without one, and a plan of rates."""

    def cluster(policy, decode, tpot_ms, verdict="meets"):
        share = {"mean": 0.995, "low": 0.99, "high": 1.0}
        return {
            "name": f"2P{decode}D",
            "policy": policy,
            "gpu": "H100",
            "topology": f"2P{decode}D",
            "tensor_parallel_size": 1,
            "enable_expert_parallel": False,
            "gpus": 2 + decode,
            "price_per_hour": 2.5 * (2 + decode),
            "request_rate": 20.0,
            "verdict": verdict,
            "weakest_provenance": "derived" if policy == "jsq" else "published",
            "hopeless": False,
            "seeds": 3,
            "slo_attainment": share,
            "slo_attainment_by_metric": {"ttft": 1.0, "tpot": 0.995},
            "median_ttft_ms": 60.0,
            "p99_ttft_ms": 90.0,
            "median_tpot_ms": tpot_ms,
            "p99_tpot_ms": 1.1 * tpot_ms,
            "output_throughput": 2000.0,
            "mean_decode_batch": 12.0,
            "mean_active_experts_per_step": 60.0,
            "mean_active_experts_per_token": 62.0,
            "cost_per_million_output_tokens": 1.5,
            "tokens_per_s_per_gpu": 2000.0 / (2 + decode),
            "tokens_per_s_per_user": 1e3 / tpot_ms,
        }

    summary = result.summary
    keys = ("weakest_provenance", "provenance", "lookups_outside_tables", "decode_steps")
    keys += ("latency_warnings", "latency_notes", "kv_transfer", "trace")
    common = {
        "slo_ms": {"ttft": 500.0, "tpot": 12.0},
        "attainment": 0.99,
        "confidence": 0.95,
        "looks": [3, 5],
        "config": result.config["config"],
        "assumptions": {key: summary[key] for key in keys},
        "warnings": ["the candidates' step times are derived and published"],
        "simulated_runs": 42,
        "versions": {"eldr-sim": "0.1.0"},
    }
    eldr, larger, jsq = cluster("eldr", 3, 10.0), cluster("eldr", 5, 8.0), cluster("jsq", 4, 11.0)
    lost = cluster("eldr", 2, 14.0, "misses")
    span = {"mean": 1.25, "low": 0.5, "high": 2.0}
    row = {"gpu": "H100", "figure": None, "by_seed": [], "without": "", "reasons": []}
    row |= {"notes": [], "shapes": []}
    gain = {"gpu": "H100", "policy": "eldr", "reference": "jsq", "by_seed": [5, 5]}
    gain |= {"reference_by_seed": [6, 7], "gain": span}
    plan = common | {
        "kind": "cluster",
        "request_rate": 20.0,
        "max_gpus": 16,
        "cheapest_by": "price_per_hour",
        "answer": eldr,
        "runner_up": jsq,
        "margin": {
            "highest_rate": {"mean": 24.0, "low": 22.0, "high": 26.0},
            "percent_above_load": {"mean": 20.0, "low": 10.0, "high": 30.0},
            "highest_rate_is_a_lower_bound": False,
            "one_decode_worker_lost": lost,
            "one_prefill_worker_lost": None,
        },
        "rows": [
            row | {"policy": "eldr", "cluster": eldr, "notes": ["not monotone"]},
            row | {"policy": "jsq", "cluster": jsq},
            row | {"policy": "random", "cluster": None, "without": "none"},
        ],
        "gains": [gain],
        "pareto_front": [larger, eldr],
        "clusters": [eldr, larger, lost, jsq],
        "notes": ["eldr on H100: not monotone", "random on H100: too <slow>"],
    }
    rates = plan | {
        "kind": "rate",
        "max_gpus": None,
        "margin": None,
        "rows": [
            row | {"policy": "eldr", "cluster": eldr, "figure": span, "by_seed": [1.0, 1.5]},
            row
            | {"policy": "jsq", "cluster": jsq, "by_seed": [None, 1.0], "without": "none"}
            | {"reasons": ["seed 0 carries none"]},
        ],
        "runner_up": None,
        "pareto_front": [],
        "clusters": [],
        "notes": [],
    }
    for name, document in (("plan", plan), ("rates", rates)):
        (folder / name).mkdir()
        write_json(folder / name / "plan.json", document)
        write_table(folder / name / "points.parquet", pa.table({"seed": [0]}))
