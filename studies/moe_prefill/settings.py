"""MoE-Prefill's evaluation: its cells, systems and workloads, and how a system gets its budget.

Qwen3-235B-A22B on 8 GPUs of a node, requests all at once (arXiv 2605.02960, Sec. 8.1). Every system
is run with each token budget of `steps.BUDGETS` that it has memory for and keeps its fastest. Only
DP+EP, whose tokens are counted expert by expert, takes the backend and budget that are fastest in
closed form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.outputs import process_folder
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.search.prefill import BUDGETS, WINDOW
from eldr_sim.planning.studies.figures import Runner
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from studies.moe_prefill import workload
from studies.moe_prefill.steps import Strategy, best_backend

#: Share of their prefix that prompts have in common. The paper does not say; at a tenth its router
#: gains on H100 FP8 what Figure 10 reports, so that this one figure is an input.
SHARING = 0.1
#: Tokens a step of the baselines: the chunk that Sec. 4 names, and the A100 server's default.
PAPERS_BUDGET = 2048
THROUGHPUT, COMPUTED, MFU = "prefill_throughput", "computed_prompt_throughput", "prefill_mfu"
#: Fields of every run: recorded routing, tiled; room for Table 2's longest prompts.
COMMON: dict[str, Any] = {
    "frontend": "none", "trace": "reference-moe", "max_model_len": 131_200, "max_num_seqs": 1024,
    "prefill_policy": "least_loaded",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A GPU and a precision."""

    name: str
    gpu: str
    model: str

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of its runs."""
        return {"gpu": self.gpu, "model": self.model}


_FP8 = "Qwen3-235B-A22B-FP8"
H100_FP8 = Cell("H100 FP8", "H100", _FP8)
CELLS = (
    Cell("A100 BF16", "A100", "Qwen3-235B-A22B"),
    Cell("H100 BF16", "H100", "Qwen3-235B-A22B"),
    H100_FP8,
    Cell("H200 FP8", "H200", _FP8),
)


@dataclass(frozen=True)
class System:
    """What is compared: strategy, router, queue order, and the token ``budgets`` to choose from."""

    label: str
    fields: dict[str, Any] = field(hash=False)
    budgets: tuple[int, ...] = BUDGETS


@cache
def refused(cell: Cell, fields: tuple[tuple[str, Any], ...]) -> str | None:
    """Return why a configuration cannot run; None where it can."""
    try:
        prepare(make_config(COMMON | cell.fields | dict(fields)))
    except InputError as error:
        return error.problem
    return None


def fits(cell: Cell, fields: dict[str, Any]) -> bool:
    """Whether a configuration has memory for its weights, and shapes that its GPUs divide."""
    return refused(cell, tuple(sorted(fields.items()))) is None


def async_ep(cell: Cell, n_gpus: int) -> Strategy:
    """Return AsyncEP with an offload window unless the largest steps leave room for all experts."""
    held = Strategy("async_ep")
    largest = {"max_num_batched_tokens": BUDGETS[-1]}
    fitting = n_gpus > 1 and fits(cell, held.fields(n_gpus) | largest)
    return held if fitting else Strategy("async_ep", window=WINDOW)


def engine_baselines(cell: Cell, n_gpus: int) -> list[System]:
    """Return the baselines but for DP+EP that fit on ``n_gpus`` GPUs, FCFS. In the place of TP+TP
    two workers, where blocks of FP8 weights cannot be cut as often."""
    systems = []
    for kind in ("pp", "tp_ep"):
        strategy = Strategy(kind)
        fields = strategy.fields(n_gpus)
        if n_gpus > 1 and fits(cell, fields):
            systems.append(System(strategy.label, fields))
    for workers in (1, 2):
        size = n_gpus // workers
        fields = Strategy("tp").fields(size) | {"topology": f"{workers}P"}
        if size > 1 and fits(cell, fields):
            return [*systems, System("TP+TP" if workers == 1 else f"2 x TP{size}", fields)]
    return systems


def dispatching(cell: Cell, n_gpus: int, context: int) -> System | None:
    """Return DP+EP with the backend and budget that are fastest in closed form; None: no room."""
    if n_gpus == 1 or not fits(cell, Strategy("dp_ep").fields(n_gpus)):
        return None
    strategy, made = best_backend(cell.model, cell.gpu, n_gpus, context)
    return System(strategy.label, strategy.fields(n_gpus), (made.budget,))


class Workloads:
    """Request logs, written when asked for."""

    def __init__(self) -> None:
        self._folder = process_folder("moe-prefill")
        self._written: dict[tuple[Any, ...], dict[str, Any]] = {}

    def real(
        self, scale: float, sharing: float = 1.0, seed: int = 0, rate: float = math.inf
    ) -> dict[str, Any]:
        """Return the fields of a run of Table 2's requests, so many a second."""
        return self._log(("real", sharing, scale, seed), rate) | {"seed": seed}

    def regime(
        self, name: str, tokens: int, rate: float = math.inf, arrivals: int = 0
    ) -> dict[str, Any]:
        """Return the fields of a run of prompts of one length; ``arrivals``: seed of when."""
        return self._log(("regime", name, tokens), rate, arrivals)

    def prompts(self, key: tuple[Any, ...]) -> list[workload.Prompt]:
        """Return the prompts of a log."""
        kind, *rest = key
        return workload.real_world(*rest) if kind == "real" else workload.regime(*rest)

    def _log(self, key: tuple[Any, ...], rate: float, arrivals: int = 0) -> dict[str, Any]:
        name = (*key, rate, arrivals)
        if name not in self._written:
            path = self._folder / f"{'-'.join(map(str, name))}.jsonl"
            prompts = self.prompts(key)
            workload.write_log(prompts, path, rate, arrivals)
            named = {"workload": str(path), "num_requests": len(prompts), "request_rate": rate}
            self._written[name] = named
        return self._written[name]


def run_budgets(
    runner: Runner, cell: Cell, systems: Sequence[System], requests: dict[str, Any],
    budgets: Sequence[int] = BUDGETS,
) -> dict[str, dict[int, Summary]]:  # fmt: skip
    """Run each system at each budget that it has memory for; returns summaries by label. Where
    budgets differ in how many prompts are refused, those that refuse fewest remain."""
    keys, cases = [], []
    for system in systems:
        mine = [b for b in system.budgets if b in budgets] or list(system.budgets)
        for budget in mine:
            fields = system.fields | {"max_num_batched_tokens": budget}
            if fits(cell, fields):
                keys.append((system.label, budget))
                cases.append(COMMON | cell.fields | fields | requests)
    by_budget: dict[str, dict[int, Summary]] = {}
    for (label, budget), summary in zip(keys, runner.run(cases), strict=True):
        if summary["completed"]:
            by_budget.setdefault(label, {})[budget] = summary
    for (
        label,
        made,
    ) in by_budget.items():  # more activations leave too little KV cache for some prompts
        fewest = min(summary["failed"] for summary in made.values())
        by_budget[label] = {b: each for b, each in made.items() if each["failed"] == fewest}
    return by_budget


def best_budget(made: dict[int, Summary]) -> int:
    """Return the budget of the highest throughput."""
    return max(made, key=lambda budget: float(made[budget][THROUGHPUT]))


def tuned(
    runner: Runner, cell: Cell, systems: Sequence[System], requests: dict[str, Any],
    budgets: Sequence[int] = BUDGETS,
) -> list[System]:  # fmt: skip
    """Return the systems with the one budget at which each computes these requests fastest."""
    made = run_budgets(runner, cell, systems, requests, budgets)
    return [
        System(system.label, system.fields, (best_budget(made[system.label]),))
        for system in systems
        if system.label in made
    ]
