"""Prompts from text: what a live model's own tokenizer makes of a folder of files."""

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError, needed

#: Letters of a file that prompts come from: far more than a campaign's loads have.
_LETTERS = 2_000_000


def domains_of(folder: Path) -> list[str]:
    """Return the domains of a folder of texts, a file ``DOMAIN.txt`` each; InputError if none."""
    found = sorted(path.stem for path in folder.glob("*.txt"))
    if not found:
        raise InputError("texts", f"{folder} has no text", "files DOMAIN.txt")
    return found


@lru_cache(maxsize=1)
def read_texts(folder: Path, model: str) -> dict[str, NDArray[np.int32]]:
    """Return the tokens of the beginning of each text, by domain. ``model``: folder of the model,
    with a ``tokenizer.json``. Raises InputError if a file cannot be read, or tokenizers is not
    installed."""
    tokenizers = needed("tokenizers", "texts", "pip install tokenizers")
    path = Path(model) / "tokenizer.json"
    if not path.exists():
        raise InputError("model", f"{path} is not there", "a model with its tokenizer, for --texts")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    found = {}
    for name in domains_of(folder):
        try:
            text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError("texts", f"{name}.txt: {error}", "a text in UTF-8") from None
        ids = tokenizer.encode(text[:_LETTERS], add_special_tokens=False).ids
        found[name] = np.array(ids, np.int32)
    return found
