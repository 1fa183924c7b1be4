"""Run vLLM offline on a list of prompts: ``python -m ... JOB``.

In a separate process: vLLM's workers import the main module of their parent again, and vLLM 0.32
on a CPU cannot start where numba has been imported, so nothing here may import numba. ``JOB`` is a
JSON file with ``prompts`` (lists of token ids), ``engine`` (arguments of ``vllm.LLM``) and
``sampling`` (of ``vllm.SamplingParams``; request ``i`` adds ``i`` to the seed). ``outputs.json``
and, where vLLM returned experts, ``experts.npz`` are written beside it."""

import json
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """Run the job named on the command line."""
    import vllm

    file = Path(sys.argv[1])
    job = json.loads(file.read_text(encoding="utf-8"))
    engine = vllm.LLM(**job["engine"])
    seed = job["sampling"].pop("seed")
    sampling = [
        vllm.SamplingParams(**job["sampling"], seed=seed + number)
        for number in range(len(job["prompts"]))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    arrays = {
        str(number): output.outputs[0].routed_experts
        for number, output in enumerate(outputs)
        if output.outputs[0].routed_experts is not None
    }
    if arrays:
        np.savez(file.with_name("experts.npz"), **arrays)
    config = engine.llm_engine.model_config
    about = {
        "request_ids": [output.request_id for output in outputs],
        "generated": [len(output.outputs[0].token_ids) for output in outputs],
        "n_experts": int(config.get_num_experts()),
        "dtype": str(config.dtype).removeprefix("torch."),
        "version": vllm.__version__,
    }
    file.with_name("outputs.json").write_text(json.dumps(about), encoding="utf-8")


if __name__ == "__main__":
    main()
