"""Simulator: what happens in a serving cluster over time?

Modules
-------
config, run
    `RunConfig` says what to run; `simulate` runs it and returns a `Result`.
cluster
    The client, the routers and the life of a request, on one clock (`clock`).
prefill, prefix_cache, transfer, decode
    Prefill workers and their prefix cache, KV transfers over shared links, decode workers.
kernel, replay, shared_replay
    The compiled step loop; the routing trace laid out as its bit sets, once for many processes.
request, memory
    A request and how it ended; how many KV blocks a worker has.
metrics, tables, results, plots, timeline
    What a run leaves behind: figures, tables, the result folder, pictures, a Chrome trace.
compare
    Policies side by side on the same requests.
planning
    Many runs at once, and what they add up to: a package of its own.
report
    One HTML page of runs, comparisons, sweeps and plans.
"""
