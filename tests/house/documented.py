"""How the tests run documented command lines: samples of a reader's files, short forms of lines
that take minutes, and the lines that nothing here can run."""

import csv
import json
import shlex
from pathlib import Path

from eldr_sim.validation.published.runs import read_runs

_RATES = {"request_rate": "inf", "completed": 8, "num_prompts": 8, "duration": 2.0}
_BENCH = {
    "input_lens": [200] * 8, "output_lens": [20] * 8, "total_input_tokens": 1600,
    "total_output_tokens": 160, "mean_ttft_ms": 30.0, "mean_tpot_ms": 9.0,
}  # fmt: skip


def _bench(concurrency: int) -> str:
    return json.dumps(_RATES | _BENCH | {"max_concurrency": concurrency})


def _lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _mooncake(gap_ms: int, n: int = 20) -> str:
    rows = ({"input_length": 600, "output_length": 4, "hash_ids": [0, i]} for i in range(n))
    return _lines(*({"timestamp_ms": gap_ms * i} | row for i, row in enumerate(rows)))


_SESSION = {
    "block_size": 64, "models": ["m"], "hash_id_scope": "local",
    "requests": [
        {"t": 2.0 * i, "in": 64 * (i + 4), "out": 8, "api_time": 1.0,
         "hash_ids": list(range(i + 4))} for i in range(6)
    ],
}  # fmt: skip
_EXPERTS = [[[100 + (7 * e + layer) % 50 for e in range(256)] for layer in range(4)]]

#: The files that lines name and readers bring, small.
FILES = {
    "mooncake.jsonl": _mooncake(60_000),
    "mooncake_conversation.jsonl": _mooncake(100, 1500),
    "requests.jsonl": _mooncake(10, 1000),
    "log.csv": "t,prompts,outputs\n" + "".join(f"{i / 10},{40 + i},4\n" for i in range(200)),
    "BurstGPT_1.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "".join(f"{5 * i},ChatGPT,{1 + 37 * i % 950},20,{21 + 37 * i % 950},API log\n"
              for i in range(3000)),
    "incident.csv": "timestamp,input_length,output_length\n"
    + "".join(f"{100 * i},{40 + i},4\n" for i in range(20)),
    "aiconfigurator.csv": "row,ttft_ms,tpot_ms\n0,100,10\n",
    "fleet.csv": "time,worker,event\n0,w-1,start\n0,w-2,start\n1,w-1,fail\n",
    "weka.jsonl": _lines(*(_SESSION | {"id": f"s{i}"} for i in range(64))),
    "monday.json": json.dumps({"logical_count": _EXPERTS[0]}),
    "tuesday.json": json.dumps({"logical_count": _EXPERTS[0]}),
    "result.json": _bench(8),
    "c1.json": _bench(1),
    "c64.json": _bench(64),
    "sweep.yaml": "config: {topology: 1P2D, num_requests: 5, output_len: 4}\n"
    "sweep: {type: grid, parameters: {policy: [jsq, eldr]}}\n"
    "multiRun: {numRuns: 2, confidenceLevel: 0.95}\n",
}  # fmt: skip
#: A reader's trace, as a command makes one.
MY_TRACE = shlex.split(
    "trace synthesize --preset Mixtral-8x7B --requests 8 --calibration 8 --layers 2 --out my-trace"
)


def write_files(folder: Path, measured: bool = False) -> None:
    """Write the files of readers but the trace; ``measured``: rows of published runs have figures,
    which readers fill in after predictions are frozen."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    rows = [run.row for run in read_runs() if run.row["launch"]][:2]
    with (folder / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        unknown = {} if measured else {name: "" for name in rows[0] if name in MEASURED}
        writer.writerows(row | {"requests": "4", "output_len": "4"} | unknown for row in rows)


MEASURED = ("ttft_ms", "tpot_ms", "output_tok_s")

_SHORT_PLAN = "--duration 20 --seeds 2"
#: What is added to a line that takes minutes, or stays until it is stopped, by its beginning; the
#: last value of an option counts.
SHORT = {
    "explore": "--port PORT",
    "serve --topology 2P2D": "--port 0",
    "serve --topology 1P1D": "--engine-ports PORT --port 0",
    "router": "--port 0",
    "plan --slo ttft:500,tpot:30 --attainment": f"{_SHORT_PLAN} --gpu h100 --price h100=2.5",
    "plan --model GPT-OSS-120B": f"{_SHORT_PLAN} --gpu h200 --price h200=3.5",
    "plan --workload log.csv": "",
    "plan --model DeepSeek-R1": f"{_SHORT_PLAN} --request-rate 20 --max-gpus 24 -dp 8,16",
    "plan --request-rate 40": f"{_SHORT_PLAN} --request-rate 5 --attainment 0.9 "
    "--max-gpus 32 -dp 8 --ffn-ranks 0,8",
    "plan --gpus 10 --knobs": f"{_SHORT_PLAN} --gpus 3",
    "plan --slo ttft:500,tpot:25": f"{_SHORT_PLAN} --gpu h100",
    "plan --gpus 10 --slo": f"{_SHORT_PLAN} --gpus 3",
    "plan --topology 2P12D": f"{_SHORT_PLAN} --topology 1P3D",
    "validate published": "--every 200 --most 8 --engine trtllm",
    "validate published --rows": "",
    "sweep docs/sweep_eldr": "--dry-run",
    "sweep sweep.yaml": "",
    "reproduce eldr 2 13": "",
    "reproduce eldr --out": "2 --quick",
    "reproduce eldr 11": "--quick",
    "reproduce eldr map": "--quick",
    "reproduce eldr --measured": "10 --quick",
    "reproduce eldr --measured --kernels": "--quick",
    "reproduce factorial": "--quick",
    "reproduce gimbal --out": "3 --quick",
    "reproduce gimbal --log": "--quick",
    "reproduce grace": "1 --quick",
    "reproduce grace bottleneck": "--quick",
    "reproduce metro --out": "tiles --quick",
    "reproduce metro tiles": "--quick",
    "reproduce moe-prefill --out": "table_1 --quick",
    "reproduce moe-prefill 11": "",
    "study run studies/eldr/study.yaml 13": "--quick",
    "study run studies/route_by_time": "--quick",
}
#: Needs that nothing here meets: lines that name one are run by no test, and stand in `NOT_RUN`.
ABSENT = {
    "a GPU": "a GPU",
    "vLLM": "a package that is not in the test environment",
    "[capture]": "a package that is not in the test environment",
    "[profile]": "a package that is not in the test environment",
    "[aiconfigurator]": "a package that is not in the test environment",
    "/data/log": "a recording of a live vLLM",
    "/models/my-moe": "a recording of a live vLLM",
}
#: Those lines by page: a line that no test runs is a decision.
NOT_RUN = {
    "docs/capture.md": [
        "trace capture transformers", "trace capture collect", "run --model /models/my-moe"
    ],
    "docs/live.md": ["validate vllm --out live --report", "validate vllm --out live --quick"],
    "docs/profiling.md": [
        "profile --model Qwen3-30B-A3B", "run --model Qwen3-30B-A3B", "profile --model mini",
        "run --model mini",
    ],
    "docs/questions.md": [
        "trace capture transformers", "profile --device cuda", "validate silicon", "validate vllm"
    ],
    "studies/agentx/README.md": ["tables import", "run --workload weka.jsonl --arrivals agentx "
                                 "--max-active-sessions 64 --seed 42"],
    "studies/silicon/README.md": ["validate silicon", "validate silicon --forms"],
}  # fmt: skip


def short_form(words: list[str], port: str = "8050") -> list[str] | None:
    """Return a line's words with those that make it short; None where it has no short form."""
    text = " ".join(words)
    known = [one for one in SHORT if f"{text} ".startswith((f"{one} ", f"{one}_", f"{one}."))]
    if not known:
        return None
    return [*words, *SHORT[max(known, key=len)].replace("PORT", port).split()]
