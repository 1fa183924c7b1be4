"""How long a new worker takes until it serves, in seconds each (``--start-up``): ``node`` (until
there is a GPU), ``image`` (of the container), ``imports``, ``weights`` (bytes of the model over
``gb_s``), ``graphs`` (captured) and ``warm_up``. Its caches are empty then."""

from collections.abc import Mapping
from typing import NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.inputs import seconds
from eldr_sim.policies.choice import parse

PARTS = ("node", "image", "imports", "weights", "graphs", "warm_up")
_ALLOWED = "seconds, or NAME[:PART=SECONDS,...] of {names}; parts are {parts} and gb_s"


class Measured(NamedTuple):
    """A measured start-up: its parts, and its source."""

    parts: Mapping[str, float]
    source: str


_VLLM = {"image": 1.8, "imports": 73.0, "gb_s": 61 * 1.073741824 / 130.0, "graphs": 9.0,
         "warm_up": 64.0}  # fmt: skip
_QWEN = "Qwen3-32B under vLLM on an H100, 278 s in all, 61 GiB"
MEASURED: dict[str, Measured] = {
    "vllm": Measured(_VLLM, f"{_QWEN} in 130 s, image streamed"),
    "vllm_pulled": Measured(_VLLM | {"image": 69.0}, f"{_QWEN}, image pulled"),
    "vllm_local": Measured(
        _VLLM | {"gb_s": 61 * 1.073741824 / 43.0}, f"{_QWEN} from local files in 43 s"
    ),
    "llmd_pod": Measured({"warm_up": 105.0}, "llm-d's autoscaling benchmark: 100 to 109 s"),
    "llmd_guide": Measured({"warm_up": 240.0}, "llm-d's guide: Qwen3-8B, one GPU"),
    "peer": Measured({"warm_up": 35.0}, "ModelExpress, weights from another worker: 30 to 40 s"),
    "snapshot": Measured({"warm_up": 18.0}, "Qwen3-32B restored from a snapshot"),
    "sleeping": Measured({"warm_up": 17.0}, "Qwen3-32B woken from vLLM's sleep level 1"),
    "paused": Measured({"warm_up": 2.7}, "Qwen3-32B, a paused process woken"),
}


def check_start_up(text: str | None) -> str | None:
    """Return a spelling as it is; raises InputError if it is none."""
    if text is not None:
        start_up_parts(text, 1.0)
    return text


def start_up_parts(text: str, weight_bytes: float) -> dict[str, float]:
    """Return the seconds of each part for a model, by its bytes; raises InputError."""
    word = str(text).strip()
    allowed = _ALLOWED.format(names=", ".join(MEASURED), parts=", ".join(PARTS))
    if word[:1].isdigit() and ":" not in word:
        return {"warm_up": seconds(word, "start_up")}
    name, given = parse(word, "start_up")
    if name not in MEASURED:
        raise InputError("start_up", repr(text), allowed)
    parts = dict(MEASURED[name].parts)
    for part, what in given.items():
        try:
            value = float(what)
        except ValueError:
            value = -1.0
        if (
            part not in (*PARTS, "gb_s")
            or not 0.0 <= value <= 1e6
            or (part == "gb_s" and value < 1e-3)
        ):
            raise InputError("start_up", f"{part}={what}", allowed)
        parts[part] = value
        if part == "weights":
            parts.pop("gb_s", None)
    if (rate := parts.pop("gb_s", None)) is not None:
        parts["weights"] = weight_bytes / (1e9 * rate)
    return parts
