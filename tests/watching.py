"""What tests read of a cluster that they watch event by event."""


def new_steps(cluster, seen):
    """Yield the index of the worker among all, and the step, of steps not yielded before.

    ``seen`` is ``[0]`` at first: the steps seen; it is brought up to date.
    """
    n_steps = int(cluster.arrays.clock["n_steps"][0])
    for step in cluster.log[seen[0] : n_steps]:
        yield int(step["worker"]), step
    seen[0] = n_steps


def free_blocks(cluster):
    """Return the free KV blocks of each worker."""
    workers = cluster.arrays.engines.workers
    return (workers["n_blank"] + workers["n_idle"]).tolist()
