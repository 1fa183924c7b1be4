"""Dynamo's offline replay on the requests of `speed.EQUAL`, for `speed`: by the Python of another
environment, ``pip install --no-deps ai-dynamo ai-dynamo-runtime`` and ``pydantic``, which
``DYNAMO_PYTHON`` names. Prints the CPU seconds of some rounds for a size of KV blocks.

Its timing is a polynomial of tokens and its engines count no experts.
"""

import sys
import time

from dynamo.replay import run_synthetic_trace_replay  # type: ignore[import-not-found]

KV_TOKENS = 1_600_000  # a worker; as many as ours, none is preempted


def main(requests: int, tokens: int, block: int, rounds: int) -> None:
    """Replay requests of so many tokens in and out, 100 a second over 8P16D, round robin."""
    engines = {
        f"{worker}_engine_args": {
            "engine": {"backend": "vllm", "worker_type": worker, "block_size": block,
                       "num_gpu_blocks": KV_TOKENS // block}
        }
        for worker in ("prefill", "decode")
    }  # fmt: skip
    for _ in range(rounds):
        start = time.process_time()
        report = run_synthetic_trace_replay(
            tokens, tokens, requests, **engines, num_prefill_workers=8, num_decode_workers=16,
            request_rate=100.0, router_mode="round_robin", replay_mode="offline",
        )  # fmt: skip
        took = time.process_time() - start
        assert report.summary["total_output_tokens"] == requests * tokens
        print(took)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
