"""How long a step takes: the kernels of a shard and the one formula that adds them up."""
