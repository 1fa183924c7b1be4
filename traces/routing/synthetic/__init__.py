"""Synthetic routing traces of any shape, from a generative model of a few terms.

- ``model``: `RoutingModel`, the terms and their parameters; ``sampler`` draws requests' experts;
- ``model_fit``: a model with the statistics of a real trace (``moments``, ``token_kinds``);
- ``presets``: models that come with the package; ``reshape``: other shapes, strengths, domains;
- ``synthesize``: write a trace folder; ``drawn``: the traces of runs that name none.
"""
