"""Prescribed acceptance of drafts on a CPU, which vLLM 0.32's kernels for CPUs refuse.

``rejection_sample_method: synthetic`` has a Triton kernel alone. Here the kernel for CPUs gets
probabilities that make it accept what Triton's would: the draft at place ``i``, if those before it
are accepted, with the conditional rate of that place. What is rejected is sampled again by vLLM.
"""

import functools
import inspect
from typing import Any

_KERNEL = "vllm.v1.sample.rejection_sampler.rejection_random_sample_kernel"


def prescribe_acceptance() -> None:
    """Let vLLM's sampler on a CPU take ``synthetic_acceptance_rates``."""
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    sample = cpu_triton_utils._rejection_random_sample_kernel_impl
    signature = inspect.signature(sample)

    @functools.wraps(sample)
    def sample_or_prescribe(*given: Any, **named: Any) -> None:
        told = signature.bind(*given, **named).arguments
        if told.get("SYNTHETIC_MODE"):
            told["target_probs"], told["uniform_probs"] = accepting(
                told["cu_num_draft_tokens"], told["draft_token_ids"], told["uniform_probs"],
                told["synthetic_conditional_rates"], told["vocab_size"],
            )  # fmt: skip
            told |= {"draft_probs": None, "NO_DRAFT_PROBS": True, "SYNTHETIC_MODE": False}
        sample(**told)

    register_kernels({_KERNEL: sample_or_prescribe})


def accepting(ends: Any, drafts: Any, uniform: Any, rates: Any, vocab_size: int) -> tuple[Any, Any]:
    """Return probabilities of tokens and draws with which a draft is accepted at its rate.

    ``ends``: drafts up to each request's last, int ``[requests]``; ``drafts``, ``uniform``: tokens
    and draws, ``[drafts]``; ``rates``: conditional, by place. A draft is accepted if its
    probability is not below the draw.
    """
    import torch

    counts = torch.diff(ends.to(torch.int64), prepend=torch.zeros(1, dtype=torch.int64))
    starts = torch.repeat_interleave(ends.to(torch.int64) - counts, counts)
    place = torch.arange(len(drafts)) - starts
    target = torch.zeros(len(drafts), vocab_size)
    tokens = drafts.to(torch.int64)
    accepted = (uniform < rates[place]) & (tokens >= 0)  # places without a draft hold -1
    target[torch.arange(len(drafts)), tokens.clamp(min=0)] = accepted.to(torch.float32)
    return target, torch.full_like(uniform, 0.5)
