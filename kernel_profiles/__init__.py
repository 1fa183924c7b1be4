"""How long does a step take on this GPU?

Modules, from facts to answers:

- ``models``: dimensions, parameter and byte counts of the served MoE models.
- ``parallel``: what one GPU of a tensor- or expert-parallel worker holds of a model.
- ``gpus``: memory, bandwidth, compute and engine defaults of each GPU.
- ``tables``: latency table format v1 (Parquet plus provenance) and the shipped tables.
- ``moe_latency``: one MoE layer's time over (batch, distinct experts).
- ``kernel_latency``: attention, GEMM and collective times, interpolated from tables.
- ``all_to_all``: dispatch and combine between expert-parallel GPUs; ``all_to_all_cost`` compiled.
- ``roofline``: what stands in where no table exists.
- ``sources``: makes the shipped tables from what others publish; ``profile`` measures new ones.
- ``flops``: what prompts compute, and the share of the peak that it is (MFU).
- ``communication``: bytes that a GPU sends for a layer under each parallel strategy.
- ``weight_streaming``: experts that arrive from other GPUs or the host while layers compute.
- ``step_time``: ``StepTimeModel``, the tables of all of them for one worker.
- ``step_cost``: the time of a step, from those tables, compiled.

Times are seconds, sizes bytes, rates bytes or FLOP per second, unless a name says otherwise.
"""
