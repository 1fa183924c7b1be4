"""Make the embedded recordings of served models from the files that their authors publish.

``python studies/embedded_recordings.py DIR`` from the root of a checkout; DIR holds
``qwen3_30b_a3b/{a,b}.npz`` and ``gptoss20b/{experts.npz,requests.csv}``, extracts of
soryxie/vllm and AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting. It replaces the folders in
``traces/data``; `tests/traces/test_recordings.py` holds these against the files."""

import sys
import tempfile
from pathlib import Path

import numpy as np

from eldr_sim import __version__
from eldr_sim.traces.routing.calibration import split_calibration
from eldr_sim.traces.routing.imports.importers import import_trace
from eldr_sim.traces.routing.writer import write_trace

OUT = Path(__file__).parents[1] / "traces" / "data"
PROMPT_SHARE = 0.25


def qwen3_30b_a3b(source: Path) -> None:
    """Write the trace of Qwen3-30B-A3B-Instruct-2507: each passage of a prefill is a request."""
    experts, domain, lengths = [], [], []
    for file, name in (("a", "sharegpt"), ("b", "random")):
        with np.load(source / f"{file}.npz") as archive:
            rows, start = archive["prompt_experts"], archive["passage_start"]
        experts.append(np.sort(rows, axis=2))
        lengths += np.diff([*start.tolist(), len(rows)]).tolist()
        domain += [name] * len(start)
    total = np.array(lengths)
    prompt = (total * PROMPT_SHARE + 0.5).astype(np.int64)
    write_trace(
        OUT / "qwen3_30b_a3b",
        experts=np.concatenate(experts),
        request_id=[f"{name}-{i:02d}" for i, name in enumerate(domain)],
        domain=domain,
        prompt_len=prompt,
        output_len=total - prompt,
        # Not half: the longest passages come first.
        is_calibration=split_calibration(domain, 0.4),
        model="Qwen3-30B-A3B-Instruct-2507",
        n_experts=128,
        domains=["sharegpt", "random"],
        captured_by="vLLM 0.10, expert parallelism over 4 ranks, two prefill steps",
        source_data="soryxie/vllm (Apache-2.0), profile_json/ep_states.jsonl @34040020 (domain "
        "sharegpt: prompts of ShareGPT) and token_distri_8.jsonl @568a8cb2 (domain random: "
        "prompts of vllm bench's random data among others). The trace holds expert ids, no text",
        tool_versions={"eldr-sim": __version__, "numpy": np.__version__},
        provenance="imported",
        recorded_phase="prompt",
        prompt_share=PROMPT_SHARE,
        notes="4,010 prompt tokens. A request is a passage of the step's tokens; where one begins "
        "was not recorded but inferred, where the expert counts of the 24 tokens before and after "
        "have a cosine below 0.6. Take no length statistics from it.",
        encoding="xz",
        force=True,
    )


def gpt_oss_20b(source: Path) -> None:
    """Write the trace of gpt-oss-20b, its domain code_cs named as the workload task names it."""
    with tempfile.TemporaryDirectory() as folder:
        read = import_trace(
            source,
            Path(folder) / "trace",
            model="gpt-oss-20b",
            n_experts=32,
            captured_by="one request at a time, greedy, at most 512 tokens",
            source_data="AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting @72b368f6 (Apache-2.0). "
            "The trace holds expert ids, no text",
            tool_versions={},
            prompt_share=PROMPT_SHARE,
            notes="Domain code is the recording's code_cs.",
        )
        about = read.manifest
        names = {name: name.replace("code_cs", "code") for name in about.domains}
        write_trace(
            OUT / "gpt_oss_20b",
            experts=np.sort(read.experts, axis=2),  # without the gate's order: 2.9 MB, with 4.8
            request_id=read.request_id,
            domain=[names[about.domains[d]] for d in read.domain.tolist()],
            prompt_len=read.prompt_len,
            output_len=read.output_len,
            is_calibration=read.is_calibration,
            domains=list(names.values()),
            **about.model_dump(
                include={
                    *("model", "n_experts", "captured_by", "source_data", "tool_versions"),
                    *("provenance", "notes", "recorded_phase", "prompt_share"),
                }
            ),
            encoding="xz",
            force=True,
        )


if __name__ == "__main__":
    qwen3_30b_a3b(Path(sys.argv[1]) / "qwen3_30b_a3b")
    gpt_oss_20b(Path(sys.argv[1]) / "gptoss20b")
