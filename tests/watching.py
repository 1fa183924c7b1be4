"""What has happened since one looked last, for tests that watch a cluster event by event."""


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
