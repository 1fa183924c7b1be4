"""Planning: questions about clusters and policies that take many runs.

Modules
-------
runner, ray_backend
    Many points (configurations) on processes of this machine or on a Ray cluster.
runs
    Runs shared by searches: each configuration is simulated once.
intervals, paired
    Confidence intervals; configurations paired over seeds.
sweep, sweep_spec, sweep_journal
    Sweeps: the data set of all points, the parser of the YAML, the file of ended runs.
compare
    Policies compared on the same requests.
what_if
    One change at a time compared with a base run.
plan, rates
    The cheapest cluster that meets an objective; the highest rate of a cluster.
prefill, prefill_strategy
    Plans of prefill workers alone: parallel strategy, token budget, chunks of prompts.
slo, bounds, candidates, search, trial, plan_files
    Parts of a plan: objectives, lower bounds, candidates, the search, trials, files.
"""
