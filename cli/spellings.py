"""Options that have more than one spelling: ours, and those that users know from vLLM."""

from __future__ import annotations

__all__ = ["ALIASES", "TENSOR_PARALLEL_SIZE"]

#: By field of a run's configuration.
ALIASES = {
    "num_requests": ("--num-prompts",),
    "tensor_parallel_size": ("-tp", "--tp"),
    "data_parallel_size": ("-dp", "--dp"),
}
#: For commands with an option of their own.
TENSOR_PARALLEL_SIZE = ("--tensor-parallel-size", *ALIASES["tensor_parallel_size"])
