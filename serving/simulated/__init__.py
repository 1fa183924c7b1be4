"""A server of OpenAI's completions with latencies from a cluster simulated in real time."""
