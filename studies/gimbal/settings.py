"""Gimbal's evaluation: what it ran on, and what stands for it here.

2 x A100-80GB, Qwen3-30B-A3B, vLLM 0.9.1, two engines that share experts over pplx (256 tokens of an
engine at once), chunked prompts, no prefix cache, 1,000 requests a run (Sec. V-A). BurstGPT cannot
be had: lengths are a log's, or drawn, lognormal and independent: 97.6% of prompts within 3,000
tokens as the paper says, mean 750 (assumed); outputs with median and mean of Azure's conversation
trace of 2023 (Patel et al., Splitwise, ISCA 2024). Shapes: `traces.requests.length_shapes`;
arrivals are Poisson.

Rates are relative: the paper sends 1.0, 1.2 and 1.4 requests/s, with a p99 TTFT of 4.9 s at 1.4
(Sec. V-A.2), and our tables' kernels carry seven times as much. The knee of a shape is where
`round_robin`'s p99 TTFT is 4.9 s. Thresholds in tokens, seconds and steps are the paper's."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.outputs import process_folder
from eldr_sim.planning.search.monotone_search import highest_rate
from eldr_sim.planning.slo import Interval
from eldr_sim.planning.studies.figures import Claim, Runner, write_requests
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.length_shapes import LENGTH_SHAPES, LengthShape, draw_by_length
from eldr_sim.traces.requests.logs.request_logs import read_request_log

#: Median and mean of prompts (97.6% within 3,000 tokens) and of outputs.
PROMPTS, OUTPUTS = (495.0, 750.0), (129.0, 211.0)
SHARES = (0.71, 0.86, 1.0)  # of the knee: 1.0, 1.2 and 1.4 requests/s of 1.4
P99_TTFT_MS = 4900.0
TTFT, P99, TPOT, THROUGHPUT = (
    "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "output_throughput",
)  # fmt: skip
_POOL = 60_000  # requests that lengths are drawn for

FIELDS: dict[str, Any] = {
    "frontend": "none", "topology": "1C", "data_parallel_size": 2, "enable_expert_parallel": True,
    "gpu": "A100-80GB", "model": "Qwen3-30B-A3B", "all2all_backend": "pplx",
    "enable_prefix_caching": False, "signal_interval_ms": 100.0, "output_len": "recorded",
}  # fmt: skip


class System(NamedTuple):
    """A balancer, a queue order and a placement."""

    policy: str = "round_robin"
    queue_order: str = "fcfs"
    expert_placement: str = "linear"
    eplb_interval: int | None = None

    def fields(self, interval: int) -> dict[str, Any]:
        """Return the fields of a run; tau is ``interval`` steps where experts move."""
        values = self._asdict()
        return values | {"eplb_interval": None if self.eplb_interval is None else interval}


SJF, EDR = "sjf_aging", "gimbal"
VLLM = System()
#: The paper's systems, with Algorithm 1 as printed; ``queues`` balances the prompt tokens that
#: wait, as the text has it ("prefill workload in their queues"), also below a KV usage of 0.9.
SYSTEMS = {
    "vLLM": VLLM,
    "DPLB": System(policy="gimbal"),
    "DPLB, queues": System(policy="gimbal:reading=queues"),
    "SJFS": System(queue_order=SJF),
    "EDR": System(expert_placement=EDR, eplb_interval=1),
    "Gimbal": System("gimbal", SJF, EDR, 1),
    "Gimbal, queues": System("gimbal:reading=queues", SJF, EDR, 1),
    "vLLM's first balancer": System(policy="vllm_dp_first"),
}


class Scale(NamedTuple):
    """How much is run."""

    requests: int
    seeds: int  #: of the main comparison
    few: int  #: of the ablations and studies
    interval: int  #: steps between relocations
    shapes: tuple[LengthShape, ...] = LENGTH_SHAPES


FULL, QUICK = Scale(1000, 10, 5, 3000), Scale(60, 2, 2, 100, ("random", "two_end"))


class Experiment:
    """Runs of the paper's set-up on logs of their own. ``runner``: runs configurations; ``scale``:
    how much is run; ``log``: a request log whose lengths are taken; None draws them."""

    def __init__(self, runner: Runner, scale: Scale, log: str | None = None) -> None:
        self.runner, self.scale = runner, scale
        self.folder = process_folder("gimbal")
        self.lengths, self.source = _lengths(log)
        self.base = FIELDS | {"num_requests": scale.requests}
        self._knees: dict[tuple[str, str], float] = {}

    def workload(self, shape: LengthShape, seed: int) -> str:
        """Write the log of a seed: lengths in a shape, Poisson arrivals of rate 1; its path."""
        path = self.folder / f"{shape}-{seed}.jsonl"
        if not path.exists():
            prompts, outputs = self.lengths
            chosen = draw_by_length(prompts, shape, self.scale.requests, seed)
            rng = np.random.default_rng([seed, 17])
            chosen = rng.permutation(chosen)
            write_log(path, prompts[chosen], outputs[chosen], rng)
        return str(path)

    def cases(
        self, system: System, shape: LengthShape, share: float, seeds: int, **more: Any
    ) -> list[dict[str, Any]]:
        """Return a case a seed at a share of the knee that `knee` has found."""
        rate = share * self.knee(shape, **more)
        return [
            self.base | system.fields(self.scale.interval) | more
            | {"workload": self.workload(shape, seed), "request_rate": rate, "seed": seed}
            for seed in range(seeds)
        ]  # fmt: skip

    def knee(self, shape: LengthShape, **more: Any) -> float:
        """Return the highest rate at which round robin's mean p99 TTFT is in bounds, to 2%."""
        key = shape, json.dumps(more, sort_keys=True)
        if key not in self._knees:
            case = self.runner.base | self.base | VLLM._asdict() | more

            def meets(rate: float) -> Any:
                logs = [self.workload(shape, seed) for seed in range(self.scale.few)]
                found = yield [
                    make_config(case | {"workload": log, "request_rate": rate, "seed": seed})
                    for seed, log in enumerate(logs)
                ]
                return float(np.mean([run[P99] for run in found])) <= P99_TTFT_MS

            search = highest_rate(8.0, 0.25, meets, tolerance=0.02, high=1000.0)
            found = self.runner.search(search)
            self._knees[key] = found.good if found else 0.25
        return self._knees[key]


def paired_claim(
    statement: str, low: float, high: float, found: Interval, reason: str = "", **more: Any
) -> Claim:
    """Return a claim about a paired change."""
    return Claim(statement, low, high, found.mean, reason=reason, interval=found[1:], **more)


def lognormal(rng: np.random.Generator, median: float, mean_: float, n: int) -> Ints:
    """Draw whole numbers of a lognormal distribution, 1 or more."""
    sigma = np.sqrt(2.0 * np.log(mean_ / median))
    drawn = rng.lognormal(np.log(median), sigma, n)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def write_log(path: Path, prompts: Ints, outputs: Ints, rng: np.random.Generator) -> None:
    """Write requests that arrive at random, one a second on average."""
    times = np.rint(1e3 * np.cumsum(rng.exponential(1.0, len(prompts)))).astype(int)
    write_requests(path, times.tolist(), prompts.tolist(), outputs.tolist())


def _lengths(log: str | None) -> tuple[tuple[Ints, Ints], str]:
    """Return prompt and output lengths of many requests, and what they are."""
    if log is not None:
        request_log = read_request_log(log)
        lengths = request_log.prompt_len.astype(np.int64), request_log.output_len.astype(np.int64)
        return lengths, f"lengths of {request_log.path.name}"
    rng = np.random.default_rng(0)
    drawn = lognormal(rng, *PROMPTS, _POOL), lognormal(rng, *OUTPUTS, _POOL)
    return drawn, "lognormal lengths"
