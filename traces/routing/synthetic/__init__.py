"""Synthetic routing traces of any shape, from a generative model of a few terms.

Modules
-------
model
    `RoutingModel`: the terms and their parameters.
sampler
    `sample_experts`: draw the experts of requests.
token_kinds
    Kinds of tokens: clusters of tokens that choose alike.
model_fit
    `fit_routing_model`: a model with the statistics of a real trace.
reshape
    Models of another shape, strength or set of domains.
presets
    `FITTED`: models that come with the package; `PRESETS`: known models made of them.
prompt_lengths
    `draw_prompt_lengths`: how long the prompts of the workloads are.
moments
    `measure`: statistics by which a trace and its twin are compared.
synthesize
    `synthesize`: write a trace folder.
"""
