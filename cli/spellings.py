"""Options that have more than one spelling: ours, and those that users know from vLLM."""

from __future__ import annotations

#: By field of a run's configuration.
ALIASES = {
    "num_requests": ("--num-prompts",),
    "log_from": ("--from",),
    "log_to": ("--to",),
    "input_len": ("--random-input-len",),
    "output_len": ("--random-output-len",),
    "prefix_len": ("--random-prefix-len", "--prefix-repetition-prefix-len"),
    "num_prefixes": ("--prefix-repetition-num-prefixes",),
    "tensor_parallel_size": ("-tp", "--tp"),
    "data_parallel_size": ("-dp", "--dp"),
}
#: For commands with an option of their own.
TENSOR_PARALLEL_SIZE = ("--tensor-parallel-size", *ALIASES["tensor_parallel_size"])
