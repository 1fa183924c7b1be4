"""What a search over all choices finds that a search over a single one misses, for `joint.md`.

``python studies/joint_optimum.py docs/data/joint_runs.csv docs/data/joint.csv 1,3``, from the root
of a checkout, answers two questions, by number from 1, in two CPU-minutes each, adds their rows to
the first file and makes the page's table again; without numbers it makes the table alone. A
question is what ``eldr-sim plan --gpus N --knobs`` answers."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eldr_sim.outputs import write_rows
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.search import answer as answers
from eldr_sim.planning.search.axes import Space, value_of
from eldr_sim.planning.search.candidates import cluster_label
from eldr_sim.planning.search.goals import HighestRate, find
from eldr_sim.planning.search.knobs import ALL, BASE
from eldr_sim.planning.slo import Objective, paired_percent
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config

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
AXES: dict[str, list[Any]] = {
    "engine": ["vllm", "sglang", "trtllm"],
    "policy": ["round_robin", "jsq"],
    "max_num_batched_tokens": [None, 2048],
    "drafts": [0, 3],
}
NAMES = {"policy": "router", "max_num_batched_tokens": "tokens a step"}
Row = dict[str, str]


def rows_of(question: Sequence[object], runs: RunCache) -> list[Row]:
    """Answer a question: with the base, with each knob, with all of them, with all but one."""
    model, gpu, n_gpus, prompt, output, slo, drafts = question
    objective, axes = Objective(parse_slo([str(slo)]), 0.95, (3,)), dict(AXES)
    spec = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": drafts}
    if not drafts:
        del axes["drafts"]
    config = make_config(
        {"model": model, "gpu": gpu, "input_len": prompt, "output_len": output, "duration": 12,
         "warmup": int(str(output)) * (objective.level.tpot or 0.0) / 1e3,
         "speculative_config": spec if drafts else None}
    )  # fmt: skip
    engines = [1] if int(str(n_gpus)) < 16 else [1, 8, 16]
    answer = find(
        Space(config, axes=axes, tensor_parallel_sizes=[1, 2, 4, 8], data_parallel_sizes=engines),
        HighestRate(objective, int(str(n_gpus)), knobs=True),
        runs,
    )
    first = next(row for row in answer.rows if row.policy == BASE)
    rows = []
    for row in sorted(answer.rows, key=lambda row: (row.policy.startswith("all but"), row.policy)):
        figures = [row.figure, paired_percent(row.by_seed, first.by_seed)] if row.figure else []
        rows.append(
            {"question": f"{model}, {n_gpus} {gpu}", "searched": named(row.policy),
             "cluster": told(row)}
            | dict(zip(("rate", "low", "high", "change", "change_low", "change_high"),
                       [f"{value:.4g}" for figure in figures for value in figure], strict=False))
        )  # fmt: skip
    return rows


def named(what: str) -> str:
    """Return a row's name as the page has it."""
    *but, last = what.rpartition("all but ")
    return "".join(but) + NAMES.get(last, last)


def told(row: answers.Row) -> str:
    """Return a row's cluster in words: its workers and what differs from the base."""
    if row.config is None:
        return "none"
    words = [cluster_label(row.config)]
    for name, given in AXES.items():
        value = value_of(row.config, name)
        if value != given[0] and str(value) not in words[0]:
            words.append(f"{value} {named(name)}" if isinstance(value, int) else str(value))
    return ", ".join(words)


def answer_of(rows: Sequence[Row]) -> Row:
    """Return a line of the page: the base, each knob alone, all together, what each adds."""
    by_search = {row["searched"]: row for row in rows}
    base, every = by_search[BASE], by_search[ALL]
    knobs = [
        name for name in by_search if name not in (BASE, ALL) and not name.startswith("all but")
    ]
    best, *others = sorted((by_search[name] for name in knobs), key=lambda row: -float(row["rate"]))

    def change(row: Row) -> str:
        low, high = float(row["change_low"]), float(row["change_high"])
        return f"{float(row['change']):+.0f}% [{low:+.0f}, {high:+.0f}]"

    less = [
        f"{name} {100.0 * (float(row['rate']) / float(every['rate']) - 1.0):+.0f}"
        for name in knobs
        if (row := by_search.get(f"all but {name}")) is not None
    ]
    return {
        "question": base["question"],
        "base": f"{base['cluster']}: {float(base['rate']):.3g}/s",
        "best single knob": f"{best['searched']} ({best['cluster']}): {change(best)}",
        "the others alone, %": "; ".join(
            f"{row['searched']} {float(row['change']):+.0f}" for row in others
        ),
        "all together": f"{every['cluster']}: {change(every)}",
        "of that without a knob, %": "; ".join(less),
    }


def main(out: Path, page: Path, numbers: Sequence[int]) -> None:
    """Answer questions, and add their rows to a file as they come; the page's are made anew."""
    known = list(csv.DictReader(out.open())) if out.exists() else []
    for number in numbers:
        runs = RunCache(1)
        known += rows_of(QUESTIONS[number - 1], runs)
        write_rows(out, known)
        print(f"question {number}: {len(runs)} runs", flush=True)
    questions = dict.fromkeys(row["question"] for row in known)
    write_rows(page, [answer_of([r for r in known if r["question"] == q]) for q in questions])


if __name__ == "__main__":
    asked = [int(n) for text in sys.argv[3:] for n in text.split(",") if n]
    main(Path(sys.argv[1]), Path(sys.argv[2]), asked)
