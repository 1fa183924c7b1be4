"""A server of OpenAI's completions whose latencies come from a cluster simulated in real time."""
