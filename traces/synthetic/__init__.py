"""Synthetic routing traces of any shape, from a generative model of a few terms.

Modules
-------
model
    `RoutingModel`: the terms and their parameters.
sampler
    `sample_experts`: draw the experts of requests.
presets
    `random_model`: a model from a handful of strengths; `PRESETS`: shapes of known models.
moments
    `measure`: the statistics that a model is fitted to.
fit
    `fit_routing_model`: a model with the moments of a real trace.
synthesize
    `synthesize`: write a trace folder.
"""
