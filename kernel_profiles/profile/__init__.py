"""Measure the kernels of a GPU, or of a CPU, as latency tables.

- ``measurement_plan``, ``session``: what to measure in which order, within a budget; its journal;
- ``grid``: points of a MoE layer, and routing forced to so many experts; ``timing``; ``device``;
- ``moe`` (``triton_moe``, ``triton_kernels``, ``weights``), ``attention``, ``dense``,
  ``collectives``, ``nixl_transfer``, ``host_gap``, ``front_end``: what is timed;
- ``records``, ``table_fit``, ``plots``: what is made of it.

torch, Triton and NIXL are imported where they are needed.
"""
