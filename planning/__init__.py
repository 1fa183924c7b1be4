"""Planning: which cluster, which policy? Many runs at once, and what they add up to.

Modules
-------
runner, ray_engine
    Many points (configurations) on many processes of this machine, or on a Ray cluster.
sweep_spec, journal, sweep
    A sweep's YAML as points; the file that keeps what is done; the data set of them all.
compare
    Policies side by side on the same requests.
what_if
    One change at a time against a base run.
plan, rates
    The cheapest cluster that meets an objective; the highest rate that a cluster carries.
slo, bounds, search, tasks, trial, offers, plan_files
    What a plan is made of: objectives and intervals, arithmetic bounds, the search, its runs.
"""
