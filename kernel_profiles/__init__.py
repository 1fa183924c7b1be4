"""How long does a step take on this GPU?

- ``models``, ``gpus``, ``parallel``: what is served, on what, and what one GPU of a worker holds;
- ``tables``: the format of latency tables, those that ship, how far they are off;
- ``kernels``: times of MoE layers, attention, GEMMs, collectives, dispatch and combine;
- ``steps``: the time of a step (``step_cost``), from the tables of one worker (``step_time``);
- ``sources``: makes the shipped tables from what others publish; ``profile`` measures new ones.

Times are seconds, sizes bytes, rates bytes or FLOP per second, unless a name says otherwise."""
