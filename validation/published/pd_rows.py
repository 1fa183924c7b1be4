"""Published runs with prefill and decode workers, and one beside them without.

llm-d's guide ``pd-disaggregation``: GPT-OSS-120B on 16 H200, prompts of 5,000 and outputs of 250
tokens, 45 requests/s. Figures alone; what the guide does not say is in :data:`ASSUMED`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: What the guide leaves open, and what is taken for it.
ASSUMED = (
    "arrivals are Poisson, all prompts differ, lengths are exact",
    "vLLM's server defaults for the GPU, bfloat16 KV cache, 0.9 of its memory",
    "the earlier vLLM ran Marlin and tokenised in sequential micro-batches (0.15 to 0.18)",
    "requests go to workers in turn",
)


@dataclass(frozen=True)
class PublishedRun:
    """A published run.

    Attributes
    ----------
    name, source
        What it is, and where it stands.
    topology
        Workers.
    prefill_size, decode_size
        GPUs of a prefill worker, and of a decode or co-located one.
    version
        Of vLLM; empty where it is not given.
    moe_kernel
        ``marlin``, or ``newest`` for the shipped table of a later kernel.
    measured
        Figures, ms, by name: ``mean_ttft``, ``p99_ttft``, ``mean_tpot``, ``mean_e2el``, ...
    derived
        Those among them that follow from others.
    """

    name: str
    source: str
    topology: str
    prefill_size: int
    decode_size: int
    version: str
    moe_kernel: str
    measured: dict[str, float] = field(hash=False)
    derived: tuple[str, ...] = ()


PROMPT, OUTPUT, RATE = 5000, 250, 45.0
_GUIDE = "llm-d, guides/pd-disaggregation"

RUNS = (
    PublishedRun(
        "8P (TP 1) 2D (TP 4)",
        _GUIDE,
        "8P2D",
        1,
        4,
        "",
        "marlin",
        {
            "mean_ttft": 1157,
            "p99_ttft": 2010,
            "mean_tpot": 5.70,
            "p99_tpot": 10.1,
            "mean_e2el": 2775,
        },
    ),
    PublishedRun(
        "8P (TP 1) 2D (TP 4), vLLM 0.27.1",
        _GUIDE,
        "8P2D",
        1,
        4,
        "0.27.1",
        "newest",
        # TPOT is (E2E - TTFT) / 249.
        {"mean_ttft": 518, "mean_tpot": 7.38, "mean_e2el": 2355},
        ("mean_tpot",),
    ),
    PublishedRun(
        "16C (TP 1)",
        _GUIDE,
        "16C",
        1,
        1,
        "",
        "marlin",
        {"mean_ttft": 532, "mean_tpot": 25.0, "mean_e2el": 6700},
    ),
)
