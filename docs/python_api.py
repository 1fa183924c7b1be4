"""The Python API, walked through.

The functions have the names of the commands: `simulate`, `compare`, `sweep`, `what_if`, `plan`. All
are typed; `help(eldr_sim.simulate)` tells what they take and return. Run this file as a script
(`python docs/python_api.py`), or cell by cell in an editor that knows percent cells. It takes
seconds: the clusters are small and the runs short, so the figures are examples, not findings.
"""

# %% One run
from pathlib import Path
from tempfile import mkdtemp

from eldr_sim import (
    Objective,
    RunConfig,
    Simulation,
    compare,
    plan,
    simulate,
    sweep,
    what_if,
    write_report,
    write_result,
)
from eldr_sim.simulator.setup.config import ServiceLevel

# What every run here has in common; a field has the name of its option, with underscores.
base = RunConfig(topology="2P4D", request_rate=20, duration=10, warmup=4, output_len=128)
result = simulate(base.replace(policy="eldr"))  # or policy="eldr:tau=0.2"
print(result)  # every result prints a few figures; notebooks show them as a table
summary = result.summary  # the fields of `vllm bench serve`, see docs/metrics.md
print(summary["label"])
print(f"  median TPOT      {summary['median_tpot_ms']:7.2f} ms")
print(f"  p99 TTFT         {summary['p99_ttft_ms']:7.2f} ms")
print(f"  output           {summary['output_throughput']:7.0f} tokens/s")
print(f"  active experts   {summary['mean_active_experts_per_step']:7.2f} a layer and step")
print(f"  rests on         {summary['weakest_provenance']} step times")

# %% Its requests and steps are Arrow tables
requests = result.requests.to_pandas()
print(requests[requests["measured"]].groupby("domain")["tpot_ms"].median().round(2))
steps = result.steps.to_pandas()
print(steps[steps["role"] == "decode"].groupby("worker")["active_experts"].mean().round(1))

# %% SimPy processes share a run's time: users, operators, autoscalers (docs/simulation.md)
sim = Simulation(base)


def operator():
    """Drain a worker at 6 s."""
    yield sim.env.timeout(6)
    sim.cluster.drain(sim.cluster.pool("decode")[0])


sim.env.process(operator())
drained = sim.run().summary
print(f"one decode worker less from 6 s on: p99 TPOT {drained['p99_tpot_ms']:.2f} ms")

# %% Policies on the same requests: paired over seeds, with 95% intervals
comparison = compare(base, ["jsq", "domain", "eldr"], n_seeds=3, jobs=1)
for difference in comparison.differences:
    if difference.metric == "median_tpot_ms" and difference.reference == "round_robin":
        print(
            f"{difference.name:>8}: median TPOT {difference.percent:+.1f}% "
            f"[{difference.low:+.1f}, {difference.high:+.1f}] against round_robin"
        )

# %% Many runs: a sweep, as the mapping that its YAML file would hold (docs/sweeps.md)
folder = Path(mkdtemp(prefix="eldr-sim-"))
swept = sweep(
    {
        "config": {"topology": "2P4D", "duration": 8, "warmup": 4, "output_len": 64},
        "sweep": {
            "type": "grid",
            "parameters": {"policy": ["jsq", "eldr"], "request_rate": [20, 60]},
        },
        "multiRun": {"numRuns": 2},
    },
    folder / "sweep",
    jobs=1,
)
columns = ["policy", "request_rate", "median_tpot_ms", "mean_active_experts_per_step"]
print(swept.aggregate.select(columns).to_pandas().round(2).to_string(index=False))

# %% One change at a time against a base run, paired over seeds
for change in what_if(base, ["policy=eldr", "topology=2P6D"], n_seeds=2, jobs=1).changes:
    effect = next(e for e in change.effects if e.metric == "median_tpot_ms")
    print(
        f"{change.name}: median TPOT {effect.percent:+.1f}% [{effect.low:+.1f}, {effect.high:+.1f}]"
    )

# %% The cheapest cluster that meets an objective (docs/planning.md)
load = RunConfig(request_rate=30, duration=4, warmup=3, output_len=64)
objective = Objective(ServiceLevel(ttft=500, tpot=14), attainment=0.9, looks=(2,))
planned = plan(load, objective, policies=["jsq"], max_gpus=4, tensor_parallel_sizes=[1], jobs=1)
answer = planned.best
if answer is not None and answer.trial is not None and planned.margin is not None:
    cluster, margin = answer.trial, planned.margin
    print(f"{cluster.config.topology} on {answer.gpu} attains {cluster.attainment.mean:.1%}")
    print(f"and carries {margin.rate.mean:.0f} requests/s ({len(planned.runs)} runs)")

# %% Results on disk, and one HTML page of them
comparison.write(folder / "comparison")
planned.write(folder / "plan")
write_result(result, folder / "eldr")
write_result(simulate(base), folder / "round_robin")
page = folder / "report.html"
names = ("eldr", "round_robin", "comparison", "sweep", "plan")
write_report([folder / name for name in names], page)
print(f"Wrote {page}")
