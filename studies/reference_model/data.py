"""Text of the reference model: folders of documents by domain, their split, the tokenizer."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from eldr_sim.errors import InputError

SEPARATOR = "<|endoftext|>"  #: line between two documents, and the token that ends one (id 0)

# Newlines, runs of blanks, words with the blank before them, single digits, punctuation: similar
# to the pattern of GPT-4's tokenizer, and independent of the script.
_PATTERN = r"\n+|[ ]{2,}(?=[ ])|[^\S\n]?[\p{L}\p{M}]+|\p{N}|[^\S\n]?[^\s\p{L}\p{N}]+|\s+"
_BOUNDARY = re.compile(rf"^{re.escape(SEPARATOR)}$", re.MULTILINE)
_TOKENIZER_BYTES = 1_500_000
_ENCODE_DOCUMENTS = 64


@dataclass(frozen=True)
class Documents:
    """Documents by domain, split so that no document is in two parts."""

    train: dict[str, list[str]]
    calibration: dict[str, list[str]]
    serving: dict[str, list[str]]
    held_out: float  #: share of documents that are held out of training
    seed: int  #: salt of the split

    @property
    def domains(self) -> list[str]:
        """Domain names."""
        return list(self.train)

    def description(self) -> dict[str, Any]:
        """Return the settings that repeat the split, and each part's documents by domain."""
        parts = {"train": self.train, "calibration": self.calibration, "serving": self.serving}
        return {
            "domains": self.domains,
            "held_out": self.held_out,
            "seed": self.seed,
            "count": {part: {d: len(t) for d, t in of.items()} for part, of in parts.items()},
        }


def read_documents(folder: Path, domains: list[str] | None = None) -> dict[str, list[str]]:
    """Read ``<domain>.txt`` files, documents between lines `SEPARATOR`, of ``domains`` in order, or
    all. Raises InputError: no such folder or file, or a file without a document."""
    if not folder.is_dir():
        raise InputError("text", f"{str(folder)!r} is not a folder", "a folder of <domain>.txt")
    names = domains or sorted(p.stem for p in folder.glob("*.txt"))
    if not names:
        raise InputError("text", f"no .txt file in {folder}", "one <domain>.txt a domain")
    out = {}
    for name in names:
        path = folder / f"{name}.txt"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(str(path), error.strerror or "cannot be read") from None
        except UnicodeDecodeError as error:
            raise InputError(str(path), f"not UTF-8 at byte {error.start}") from None
        parts = [part.strip("\n") for part in _BOUNDARY.split(text)]
        out[name] = [part for part in parts if part.strip()]
        if not out[name]:
            raise InputError(str(path), "holds no document")
    return out


def split_documents(documents: dict[str, list[str]], held_out: float, seed: int = 0) -> Documents:
    """Split documents into training, calibration and serving text by a hash of their words (salt:
    ``seed``): equal ones together, each always in its part. ``held_out``: share never trained on,
    half for each other part. Raises InputError: a share not in (0, 1), or a domain without a
    document in a part."""
    if not 0 < held_out < 1:
        raise InputError("held_out", f"got {held_out}", "a number between 0 and 1")
    parts: tuple[dict[str, list[str]], ...] = ({}, {}, {})
    for name, texts in documents.items():
        for part in parts:
            part[name] = []
        for text in texts:
            digest = hashlib.sha256(f"{seed}:{' '.join(text.split())}".encode()).digest()
            u = int.from_bytes(digest[:8], "big") / 2**64
            parts[0 if u >= held_out else 1 if u < held_out / 2 else 2][name].append(text)
        if not all(part[name] for part in parts):
            raise InputError(
                f"{name}.txt",
                f"{len(texts)} documents leave one of the parts empty",
                "more documents, or another share of held-out ones",
            )
    train, calibration, serving = parts
    return Documents(train, calibration, serving, held_out, seed)


def train_tokenizer(documents: dict[str, list[str]], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on the first 1.5 MB of each domain; id 0 is `SEPARATOR`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    sample = []
    for texts in documents.values():
        size = 0
        for text in texts:
            sample.append(text)
            size += len(text.encode())
            if size > _TOKENIZER_BYTES:
                break
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[NDArray[np.uint16]]:
    """Return the token ids of each document, without the separator."""
    out = []
    for start in range(0, len(texts), _ENCODE_DOCUMENTS):  # an encoding is far larger than its ids
        batch = tokenizer.encode_batch_fast(texts[start : start + _ENCODE_DOCUMENTS])
        out += [np.array(encoding.ids, dtype=np.uint16) for encoding in batch]
    return out
