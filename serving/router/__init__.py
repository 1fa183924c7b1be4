"""The router in front of real engines: ``eldr-sim router``, and the proxy of ``validate vllm``.

- ``proxy``: the HTTP server; ``passage``: one request's way through it;
- ``fleet``: the engines, in pools with a policy each; releases of KV cache that nobody will fetch;
- ``engine``, ``upstream``: what is known of one engine (health, ejection, return), one question to
  it with time limits;
- ``decisions``: the policy object, and what it may see;
- ``config``, ``bodies``: its start, what requests may hold."""
