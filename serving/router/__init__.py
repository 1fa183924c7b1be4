"""The router in front of real engines: ``eldr-sim router``, and the proxy of ``validate vllm``.

``proxy``
    The HTTP server: its routes, its start and its end.
``passage``
    One request's way through: prefill, hand-over, decode, retries, the answer as it comes.
``fleet``
    The engines, in pools with a policy each; releases of KV cache that nobody will fetch.
``engine``, ``upstream``
    What is known of one engine (health, ejection, return), and one question to it with time limits.
``decisions``, ``signals``, ``signatures``
    The policy object, and what it may see: loads, published metrics, expert signatures.
``config``, ``bodies``, ``counters``
    What it is started with, what requests may hold, and what it counts.
"""
