"""Tokenizers of models, by the package ``tokenizers``."""

import os
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError, needed

EXTRA = "pip install 'eldr-sim[frontend]'"


def open_tokenizer(path: Path, field: str = "frontend") -> Any:
    """Open a ``tokenizer.json``.

    Args:
        path: of the file.
        field: the option that names it, for errors.

    Returns:
        A ``tokenizers.Tokenizer`` that works on one core, whatever the batch.

    Raises:
        InputError: the package ``tokenizers`` is missing, or the file cannot be read."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizers = needed("tokenizers", field, EXTRA)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        raise InputError(field, f"cannot read {path}: {error}", "a tokenizer.json") from None
