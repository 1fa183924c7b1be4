"""Simulator: what happens in a serving cluster over time?

Modules
-------
config, run
    `RunConfig` says what to run; `simulate` runs it and returns a `Result`.
cluster, router
    One run: its arrays, and the routers' decisions (`clock`: SimPy's, for what happens outside).
loop, events
    The compiled event loop; the life of a request stands there. Its queue of events.
engine, queues, kv_cache
    vLLM's scheduler for workers of every role; who waits; KV blocks with prefix caching.
transfer, network
    What a KV transfer costs; transfers in flight over shared links.
expert_union, replay, shared_replay
    Which experts a step activates; the routing trace laid out for that, once for many processes.
state, compiled
    The arrays of a run; how functions are compiled.
memory
    How many KV blocks a worker has.
metrics, tables, results
    What a run leaves behind: figures, tables, the result folder.
paths
    Paths in recorded configurations, relative to the folder of the record.
headline
    A few figures of a result, where Python prints it and in notebooks.
catalogue
    Tag, heading, unit, meaning and direction of every figure.
"""
