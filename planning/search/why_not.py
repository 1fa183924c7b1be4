"""Why a cluster is not a plan's answer: what refuses it, what it costs, what it attains."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.planning.runs.run_cache import Search
from eldr_sim.planning.search.answer import Row
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.search.candidates import cost
from eldr_sim.planning.search.trial import try_cluster
from eldr_sim.planning.slo import Objective, Verdict
from eldr_sim.simulator.setup.config.pools import pools_of
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config, set_field

_ALLOWED = "TOPOLOGY[:SIZES] such as 1P2D:tp8, 4C:tp2,dp4 or 1P2D:tp2+tp1,dp8 (prefill + decode)"
_OF_POOLS = ("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel")
_PART = re.compile(r"(tp|dp)([1-9]\d{0,3})|ep")


def named(text: str) -> dict[str, Any]:
    """Return the fields of a cluster (``1P2D:tp8``, ``4C:tp2,dp4``, ``1P2D:tp2+tp1,dp8``): ``tp``
    GPUs of an engine, ``dp`` engines of a worker, ``ep`` experts spread over its GPUs; after a
    ``+`` of decode workers where they differ. Raises InputError."""
    topology, _, workers = text.partition(":")
    try:
        decodes = [pool.then is None for pool in pools_of(topology).root.values()]
    except InputError as error:
        raise InputError("why_not", error.problem, error.allowed) from None
    n_prefill, n_decode = decodes.count(False), decodes.count(True)
    pools = [_sizes(text, part) for part in workers.split("+")]
    if len(pools) > (2 if n_prefill else 1) or not n_decode:
        raise InputError("why_not", repr(text), _ALLOWED)
    own = {f"prefill.{name}": pools[0][name] if pools[1:] else None for name in _OF_POOLS}
    return {"topology": topology} | pools[-1] | own


def _sizes(text: str, part: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    for word in filter(None, part.split(",")):
        if (match := _PART.fullmatch(word.strip())) is None:
            raise InputError("why_not", repr(text), _ALLOWED)
        if match[1]:
            sizes["tensor_parallel_size" if match[1] == "tp" else "data_parallel_size"] = int(
                match[2]
            )
        else:
            sizes["enable_expert_parallel"] = True
    return {"enable_expert_parallel": sizes["data_parallel_size"] > 1} | sizes


def why(
    fields: Mapping[str, Any],
    config: RunConfig,
    rows: Sequence[Row],
    objective: Objective,
    max_gpus: int,
) -> Search[str]:
    """Say why a cluster is not the answer, simulating it where arithmetic does not tell.

    ``fields``: see `named`, the best one's where they do not say; ``rows``: the answer, the best
    first."""
    best = rows[0]
    values = (config if best.trial is None else best.trial.config).explicit_fields("python")
    price = values["decode"]["price_per_gpu_hour"]
    if values["prefill"]["price_per_gpu_hour"] is None:  # the best are co-located workers
        fields = {**fields, "prefill.price_per_gpu_hour": price}
    try:
        for name, value in fields.items():
            set_field(values, name, value)
        config = make_config(values)
        least = bounds(config, objective)
    except InputError as error:
        return f"refused: {error}"
    if config.n_gpus > max_gpus:
        return f"its {config.n_gpus} GPUs are more than {max_gpus}"
    if least.impossible:
        return least.impossible
    if (
        config.cluster.n_prefill < least.n_prefill
        or max(config.cluster.n_decode, 1) < least.n_decode
    ):
        apart = f"{least.n_prefill} prefill and " if config.cluster.n_prefill else ""
        return f"the load takes at least {apart}{least.n_decode} decode workers at full speed"
    trial = yield from try_cluster(config, objective)
    bounds_of = config.output.goodput.model_dump(exclude_none=True)
    parts = ", ".join(f"{name.upper()} {100 * trial.attained(name):.1f}%" for name in bounds_of)
    attained = f"attains {100 * trial.attainment.mean:.1f}% ({parts})"
    if trial.verdict is Verdict.MISSES or best.trial is None:
        return f"it {attained}, not {100 * objective.attainment:g}%"
    if trial.verdict is Verdict.UNDECIDED:
        n = len(trial.summaries)
        return f"it {attained}: undecided after {n} seed{'s' if n > 1 else ''}"
    unit = "GPUs" if config.price_per_hour is None else "$ an hour"
    ours, theirs = cost(best.trial.config), cost(config)
    if theirs > ours:
        return f"it {attained} and takes {theirs:g} {unit} where the answer takes {ours:g}"
    how = "as good as" if theirs == ours else "not searched, and cheaper than"
    return f"it {attained} at {theirs:g} {unit}, {how} the answer's {ours:g}"
