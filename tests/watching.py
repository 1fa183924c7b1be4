"""What tests read of a cluster that they watch event by event."""


def new_steps(cluster, seen):
    """Yield the index of the worker among all, and the step, of steps not yielded before.

    ``seen`` is ``[0, 0]`` at first: the steps seen of each pool; it is brought up to date.
    """
    pools = cluster.arrays.engines.pools
    for pool, log in enumerate(cluster.logs):
        n_steps = int(pools["n_steps"][pool])
        for step in log[seen[pool] : n_steps]:
            yield int(pools["first_worker"][pool] + step["worker"]), step
        seen[pool] = n_steps


def free_blocks(cluster):
    """Return the free KV blocks of each worker."""
    workers = cluster.arrays.engines.workers
    return (workers["n_blank"] + workers["n_idle"]).tolist()
