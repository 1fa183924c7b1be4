"""The reference model: a recipe that trains a small mixture-of-experts model and records it.

``python -m reference_model train`` makes a checkpoint from a folder of text, ``... record`` a
routing trace from a checkpoint and text that its training did not see.
It is no part of the package eldr-sim: run it from the root of a checkout, after
``pip install '.[reference-model]'``."""
