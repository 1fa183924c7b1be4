"""The router in front of real engines: ``eldr-sim router``, and the proxy of ``validate vllm``.
``proxy``: the HTTP server; ``request_handler``: one request; ``fleet``, ``engine``, ``upstream``:
pools of engines, their health, one question; ``decisions``: the policy; ``config``, ``bodies``."""
