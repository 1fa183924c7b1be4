"""A Hugging Face ``config.json``, read whole or refused.

`fields` says in the words of `models.ModelDims` what a configuration describes, `layers` which of
its layers are of what kind, `attention` what these have, `quantization` how weights and KV cache
are stored. `keys` notes what was read: a key that was not read and has a name that concerns
attention, caches, experts or quantization is refused by name."""
