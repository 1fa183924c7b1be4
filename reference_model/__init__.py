"""The reference model: a recipe that trains a small mixture-of-experts model and records it.

``python -m reference_model train`` makes a checkpoint from a folder of text, ``... record`` a
routing trace from a checkpoint and text that its training did not see.
It is no part of the package eldr-sim: run it from the root of a checkout, after
``pip install '.[reference-model]'``.

Modules
-------
data
    Text by domain, split by document; the tokenizer.
model
    `Qwen3Moe`: the architecture of Qwen3-MoE.
train
    `train`: from text to a checkpoint.
evaluate
    Held-out loss, dead experts, domains' preference for experts of their own.
export
    Checkpoints that load in transformers and vLLM.
record
    Prompts, sampled continuations, and the experts and gate scores of every token.
"""
