"""The papers' evaluations and the recipe of the reference model: run from a checkout, not installed
(``eldr-sim reproduce PAPER``, ``python -m studies.reference_model``)."""
