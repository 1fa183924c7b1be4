"""Questions about clusters and policies that take many runs.

- ``runs``: points on processes or on a Ray cluster, sweeps, trials;
- ``compare``: policies and what-ifs, paired over seeds;
- ``search``: the cheapest cluster, the highest rate, the best use of a number of GPUs."""
