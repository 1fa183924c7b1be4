"""The reference model: a recipe, not in the package, that trains a small mixture-of-experts model
and records it: ``python -m reference_model train`` a checkpoint from text, ``... record`` a routing
trace, from the root of a checkout, after ``pip install '.[reference-model]'``."""
