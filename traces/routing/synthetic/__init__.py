"""Synthetic routing traces of any shape, from a generative model of a few terms: `RoutingModel`
(``model``), drawn by ``sampler``, fitted to a trace (``model_fit``), shipped (``presets``), made
another (``reshape``), written (``synthesize``), and drawn for runs that name no trace (``drawn``).
"""
