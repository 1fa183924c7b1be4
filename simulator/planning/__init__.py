"""Planning: which cluster, which policy? Many runs at once, and what they add up to.

Modules
-------
runner, ray_engine
    Many points (configurations) on many processes of this machine, or on a Ray cluster.
sweep_spec, sweep
    A sweep's YAML as points; the folder that keeps what is done and can be resumed.
"""
