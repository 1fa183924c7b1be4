"""Planning: which cluster, which policy? Many runs at once, and what they add up to.

Modules
-------
runner, ray_backend
    Many points (configurations) on many processes of this machine, or on a Ray cluster.
runs
    The runs of a question, each made once; searches side by side.
intervals, paired
    Student's t; configurations under the same seeds, and how they differ.
sweep_spec, journal, sweep
    A sweep's YAML as points; the file that keeps what is done; the data set of them all.
compare
    Policies side by side on the same requests.
what_if
    One change at a time against a base run.
plan, rates
    The cheapest cluster that meets an objective; the highest rate that a cluster carries.
slo, bounds, search, trial, offers, plan_files
    What a plan is made of: objectives, arithmetic bounds, the search, its files.
"""
