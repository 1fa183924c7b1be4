"""Measure the kernels of a GPU, or of a CPU, as latency tables: ``measurement_plan`` and
``session`` say what, in which order and within what budget; ``moe``, ``attention``, ``dense``,
``links``, ``host_gap`` and ``front_end`` time it; ``records``,
``table_fit`` and ``plots`` make tables of it. torch, Triton and NIXL are imported where they are
needed."""
