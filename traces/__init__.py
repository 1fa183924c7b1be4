"""Request and routing traces: what requests ask for (``requests``), which experts a model chose for
them (``routing``: format, ``capture``, ``synthetic``, ``imports``), both joined (``workload``,
``prompts``), and random ``streams``, so policies under one seed see the same requests."""
