"""Expert-parallel workers whose engines start and stop one by one: ``--enable-elastic-ep``.

Every GPU holds as many expert instances whatever the width, and so has the same KV cache: what a
wider group has room for are redundant experts. So does vLLM, whose
``ElasticEPScalingExecutor.switch_and_prepare`` sets ``num_redundant_experts`` to the instances of a
rank times the ranks, less the experts (``vllm/distributed/elastic_ep/elastic_execute.py``, read in
November 2026).
"""

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.scaling.metrics import per_pool
from eldr_sim.simulator.setup.config.pools import WorkerPool
from eldr_sim.simulator.setup.config.run_config import RunConfig


def redundant_experts(config: RunConfig, workers: WorkerPool, model: ModelDims) -> int:
    """Return the redundant experts of a whole worker, whose engines come and go.

    Its fewest engines (``min_workers``) hold all experts, and ``num_redundant_experts`` more.

    Raises InputError where that cannot be, or such engines are not simulated.
    """
    pool, parallelism, field = workers.own, workers.own.parallelism, "enable_elastic_ep"
    least = least_engines(config, workers)
    problems = {
        f"{workers.workers} {workers.name} workers": workers.workers > 1,
        "experts are cut": not parallelism.expert_parallel,
        "experts lie on GPUs of their own": bool(parallelism.ffn_ranks),
        "experts move (eplb_interval)": config.eplb_interval is not None,
        "workers fail (fail, events)": bool(config.fail or config.events),
    }
    for problem, is_so in problems.items():
        if is_so:
            allowed = "one worker, such as 1C with --data-parallel-size 16, and nothing else"
            raise InputError(field, problem, allowed)
    if not 2 <= least * parallelism.tensor_parallel_size <= parallelism.n_gpus:
        allowed = f"2 to the {parallelism.n_gpus} GPUs of a worker"
        raise InputError("min_workers", f"{least} {workers.name} engines", allowed)
    instances = model.n_experts + (pool.num_redundant_experts or 0)
    slots, rest = divmod(instances, least * parallelism.tensor_parallel_size)
    if rest:
        problem = f"{least} {workers.name} engines cannot hold {instances} expert instances equally"
        raise InputError("min_workers", problem, "a number of engines that can")
    return slots * parallelism.n_expert_ranks - model.n_experts


def least_engines(config: RunConfig, workers: WorkerPool) -> int:
    """Return the fewest engines of an elastic worker."""
    names = [pool.name for pool in config.pools]
    return per_pool("min_workers", config.min_workers or (1,), names)[workers.name]
