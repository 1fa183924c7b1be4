"""The reference model: a recipe that trains a small mixture-of-experts model and records it.

``python -m studies.reference_model train`` makes a checkpoint from text, ``... record`` a routing
trace, from the root of a checkout, after ``pip install '.[reference-model]'``."""
