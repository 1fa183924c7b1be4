"""Measure the kernels of a GPU, or of a CPU, as latency tables.

Modules, from plan to answer:

- ``grid``: which points to measure, and routing that is forced to exactly so many experts.
- ``timing``: medians and quartiles under graph replay, eager, and on a CPU; past the cache.
- ``device``: what was measured on: driver, clocks, power cap; the ``gpu.json`` of a device.
- ``quantize``, ``reference``: FP8 and MXFP4 storage; a MoE layer in float64.
- ``triton_kernels``, ``triton_moe``: the fused MoE layer in Triton.
- ``moe``: MoE layers to time: Triton, torch (CPU), vLLM's ``fused_experts``.
- ``attention``, ``dense``, ``collectives``, ``nixl_transfer``, ``host_gap``: the other kernels.
- ``measurement_plan``, ``session``: what to measure in which order, within a budget; resumed by its
  journal.
- ``table_fit``, ``table_comparison``, ``plots``: forms fitted with held-out errors, differences,
  pictures.

torch, Triton and NIXL are imported where they are needed: ``grid``, ``table_fit``,
``table_comparison`` and ``plots`` work without them.
"""
