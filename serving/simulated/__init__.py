"""A server of OpenAI's completions whose latencies come from a simulated cluster.

- ``core``: the cluster in the wall clock's time: requests go in as they come, tokens come out when
  the simulation says so; the log, and its replay;
- ``server``: completions, chat, models, health, metrics; what vLLM's `/metrics` says."""
