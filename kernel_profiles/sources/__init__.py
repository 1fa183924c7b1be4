"""Makers of latency tables from what others have measured or published.

- ``aiconfigurator``: the optional package ``aiconfigurator-core``.
- ``marlin``: vLLM's Marlin MoE kernel, derived from its rows of another layer.
- ``mi300x``: MI300X, derived from published MI300X figures."""
