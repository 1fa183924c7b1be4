"""What a search over all choices finds that a search over a single one misses.

``python docs/joint_optimum.py docs/data/joint_runs.csv docs/data/joint.csv 1,3`` from the root of a
checkout answers two questions, by number from 1, in two CPU-minutes each, adds their rows to the
first file and makes the page's table anew; without numbers the table alone.

Every question has a base: co-located workers of the fewest GPUs that hold the model, on vLLM, in
turn, without drafts. Each knob is searched alone, the others as the base has them, then all of them
together (`best_splits`). What a knob adds to the joint answer is what that loses without it: the
knob is set back, and workers are split between pools anew. All rates are means over seeds.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.outputs import write_rows
from eldr_sim.planning.intervals import paired_percent, t_interval
from eldr_sim.planning.runs.shared_runs import Runs
from eldr_sim.planning.search.axes import Axes
from eldr_sim.planning.search.candidates import (
    ClusterTemplate,
    cluster_label,
    clusters_to_plan,
    make_candidate,
)
from eldr_sim.planning.search.rates import carried_by_seed, lowest_rate
from eldr_sim.planning.search.split import best_splits
from eldr_sim.planning.slo import Objective, parse_slo
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config

#: Model, GPU, how many, tokens in and out, service level, published acceptance of drafts.
QUESTIONS = [
    (model, gpu, *rest)
    for model, *rest in (
        ("Qwen3-30B-A3B", 8, 2000, 300, "ttft:1000,tpot:25", "qwen3-30b-a3b-eagle3"),
        ("GPT-OSS-120B", 8, 2000, 300, "ttft:1000,tpot:20", "gpt-oss-120b-eagle3"),
        ("Qwen3-235B-A22B-FP8", 16, 2000, 300, "ttft:2000,tpot:40", ""),
    )
    for gpu in ("H100", "H200")
]
#: Fields of a run that are knobs, and their values; the first is the base's.
FIELDS: dict[str, tuple[str, list[Any]]] = {
    "engine": ("engine", ["vllm", "sglang", "trtllm"]),
    "router": ("policy", ["round_robin", "jsq"]),
    "tokens a step": ("max_num_batched_tokens", [None, 2048]),
    "drafts": ("drafts", [0, 3]),
}
SHAPES = ("GPUs of a worker", "prefill apart")
KNOBS = (*SHAPES, *FIELDS)
SIZES, SEEDS = [1, 2, 4, 8], 3
FIGURES = ("rate", "low", "high", "change", "change_low", "change_high")
Row = dict[str, str]


class Question:
    """A model, its GPUs and its load."""

    def __init__(self, spec: Sequence[Any], runs: Runs) -> None:
        model, gpu, self.n_gpus, prompt, output, slo, drafts = spec
        self.runs, self.objective = runs, Objective(parse_slo([slo]), 0.95, (SEEDS,))
        self.drafts = {
            "method": "eagle3", "num_speculative_tokens": 3, "acceptance": drafts,
        } if drafts else None  # fmt: skip
        self.config = make_config(
            {"model": model, "gpu": gpu, "input_len": prompt, "output_len": output, "duration": 12,
             "warmup": output * (self.objective.level.tpot or 0.0) / 1e3, "request_rate": 1,
             "goodput": self.objective.level, "speculative_config": self.drafts}
        )  # fmt: skip
        self.low = lowest_rate(self.config)

    def templates(
        self, values: Mapping[str, Sequence[Any]], sizes: Sequence[int], engines: Sequence[int]
    ) -> tuple[Axes, list[Any]]:
        """Return candidates: every shape of workers under every combination of values."""
        fields = {FIELDS[name][0]: list(given) for name, given in values.items()}
        if self.drafts is None:
            del fields["drafts"]
        axes = Axes(fields)
        made = [
            make_candidate(each, axes, self.objective, self.n_gpus, sizes, engines)
            for each in clusters_to_plan(self.config, axes, None)
        ]
        return axes, made

    def best(
        self,
        values: Mapping[str, Sequence[Any]],
        fits: Callable[[ClusterTemplate], bool],
        sizes: Sequence[int] = SIZES,
        engines: Sequence[int] = (1,),
    ) -> tuple[RunConfig | None, list[float]]:
        """Return the cluster with the highest rate, and that under each seed."""
        axes, candidates = self.templates(values, sizes, engines)
        kept = [
            dataclasses.replace(each, templates=tuple(filter(fits, each.templates)))
            for each in candidates
        ]
        kept = [each for each in kept if each.templates]
        quick = dataclasses.replace(self.objective, looks=(1,))
        rows = self.runs.ended(best_splits(kept, axes.label, quick, self.n_gpus, self.low))
        found = next((row for row in rows if row.trial is not None), None)
        name = None if found is None or found.config is None else told(found.config)
        print(f"{time.process_time():.0f} CPU-s, {len(self.runs)} runs: {name}", flush=True)
        if found is None or found.config is None:
            return None, [0.0] * SEEDS
        rates = self.runs.ended(carried_by_seed(found.config, SEEDS, self.objective, low=self.low))
        return found.config, [rate or 0.0 for rate in rates]


def together(template: ClusterTemplate) -> bool:
    """Whether workers compute prompts and decode."""
    return template.config.n_prefill == 0


def rows_of(spec: Sequence[Any], runs: Runs) -> list[Row]:
    """Answer a question: with the base, with each knob, with all of them, with all but one."""
    own = Question(spec, runs)
    base = {name: given[:1] for name, (_, given) in FIELDS.items()}
    everything = {name: given for name, (_, given) in FIELDS.items()}
    able = [t for each in own.templates(base, SIZES, (1,))[1] for t in each.templates]
    size = min(t.config.tensor_parallel_size for t in able if together(t))
    wide = [1] if own.n_gpus < 16 else [1, 8, 16]

    def plain(t: ClusterTemplate) -> bool:
        return together(t) and not t.config.enable_expert_parallel

    found = {"base": own.best(base, plain, [size])}
    found["GPUs of a worker"] = own.best(base, together, SIZES, wide)
    found["prefill apart"] = own.best(base, lambda t: True, [size])
    for name, (_, given) in FIELDS.items():
        if name == "drafts" and own.drafts is None:
            continue
        found[name] = own.best(base | {name: given}, plain, [size])
    found["all"] = config, _ = own.best(everything, lambda t: True, SIZES, wide)
    assert config is not None
    values = {
        name: [
            getattr(config.speculative_config, "num_speculative_tokens", 0)
            if field == "drafts"
            else getattr(config, field)
        ]
        for name, (field, _) in FIELDS.items()
    }
    apart, workers = config.n_prefill > 0, [pool.own.parallelism for pool in config.pools]

    def like(those: list[Parallelism]) -> Callable[[ClusterTemplate], bool]:
        return lambda t: [pool.own.parallelism for pool in t.config.pools] == those

    for name in [name for name in KNOBS if name in found]:
        given = values
        fits, sizes = like(workers), SIZES
        if name in FIELDS:
            given = values | {name: base[name]}
        elif name == "prefill apart":  # a router may need prompts' signatures
            given, fits = values | {"router": everything["router"]}, like(workers[-1:])
        else:
            fits, sizes = (lambda t: together(t) != apart), [size]
        if given != values or name in SHAPES:
            found[f"all but {name}"] = own.best(given, fits, sizes, wide)
    first, rows = found["base"][1], []
    for what, (cluster, rates) in found.items():
        rate, change = t_interval(rates), paired_percent(rates, first)
        rows.append(
            {"question": f"{spec[0]}, {spec[2]} {spec[1]}", "searched": what,
             "cluster": "none" if cluster is None else told(cluster)}
            | {name: f"{value:.4g}" for name, value in zip(FIGURES, (*rate, *change), strict=True)}
        )  # fmt: skip
    return rows


def answer_of(rows: Sequence[Row]) -> Row:
    """Return a line of the page: the base, each knob alone, all together, what each adds."""
    found = {row["searched"]: row for row in rows}
    alone = sorted(
        (name for name in KNOBS if name in found), key=lambda name: -float(found[name]["rate"])
    )

    def change(row: Row) -> str:
        low, high = float(row["change_low"]), float(row["change_high"])
        return f"{float(row['change']):+.0f}% [{low:+.0f}, {high:+.0f}]"

    def without(name: str) -> str:
        less = float(found[f"all but {name}"]["rate"]) / float(found["all"]["rate"]) - 1.0
        return f"{name} {100.0 * less:+.0f}"

    base, best, every = found["base"], found[alone[0]], found["all"]
    return {
        "question": base["question"],
        "base": f"{base['cluster']}: {float(base['rate']):.3g}/s",
        "best single knob": f"{alone[0]} ({best['cluster']}): {change(best)}",
        "the others alone, %": "; ".join(
            f"{name} {float(found[name]['change']):+.0f}" for name in alone[1:]
        ),
        "all together": f"{every['cluster']}: {change(every)}",
        "of that without a knob, %": "; ".join(
            without(name) for name in KNOBS if f"all but {name}" in found
        ),
    }


def told(config: RunConfig) -> str:
    """Return a cluster in words: its workers and what differs from the base."""
    words = [cluster_label(config)]
    drafts = getattr(config.speculative_config, "num_speculative_tokens", 0)
    for name, (field, given) in FIELDS.items():
        value = drafts if field == "drafts" else getattr(config, field)
        if value != given[0] and str(value) not in words[0]:
            words.append(f"{value} {name}" if isinstance(value, int) else str(value))
    return ", ".join(words)


def main(out: Path, page: Path, numbers: Sequence[int]) -> None:
    """Answer questions, and add their rows to a file as they come; the page's are made anew."""
    known = list(csv.DictReader(out.open())) if out.exists() else []
    for number in numbers:
        runs = Runs(1)
        known += rows_of(QUESTIONS[number - 1], runs)
        write_rows(out, known)
        print(f"question {number}: {len(runs)} runs", flush=True)
    questions = dict.fromkeys(row["question"] for row in known)
    write_rows(page, [answer_of([r for r in known if r["question"] == q]) for q in questions])


if __name__ == "__main__":
    asked = [int(n) for text in sys.argv[3:] for n in text.split(",") if n]
    main(Path(sys.argv[1]), Path(sys.argv[2]), asked)
