"""Planning: which cluster, which policy? Many runs at once, and what they add up to.

Modules
-------
runner, ray_engine
    Many points (configurations) on many processes of this machine, or on a Ray cluster.
sweep_spec, journal, sweep
    A sweep's YAML as points; the file that keeps what is done; the data set of them all.
"""
