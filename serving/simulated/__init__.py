"""A server of OpenAI's completions whose latencies come from a simulated cluster.

Modules
-------
core
    The cluster in the wall clock's time: requests go in as they come, tokens come out when the
    simulation says so; the log, and its replay.
server
    HTTP: completions, chat, models, health, metrics.
metrics
    What vLLM's `/metrics` says, of the simulated engines.
"""
