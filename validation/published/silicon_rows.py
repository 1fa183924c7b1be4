"""Measured serving runs that ``aiconfigurator-core`` publishes.

``silicon_sample.csv`` of the package holds end-to-end runs with measured mean TTFT and TPOT. This
module reads the runs of the models in :data:`MEASURED_MODELS`, co-located and disaggregated. The
configuration of a run decides whether it can be predicted; its measured values decide only whether
it is left out of the filtered errors.

**What the labels mean.** Most runs come from InferenceX (github.com/SemiAnalysisAI/InferenceX),
whose launch scripts and ``.github/configs/nvidia-master.yaml`` of the same day say what was
started. The labels often say something else, and the scripts are followed:

- ``tp n, attention dp n, moe ep n * n`` is n GPUs, not n * n: it stands for ``{tp: n, ep: n}`` of
  the configuration, with or without its ``dp-attn: true``. Only the scripts of NVFP4 MiniMax-M2.5
  pass ``--data-parallel-size`` at all, with ``dp-attn`` (:data:`_DATA_PARALLEL`); the others start
  n GPUs with tensor parallelism and ``--enable-expert-parallel``. MiniMax on H100 took the same
  TPOT to 1% on 27 March 2026, labelled ``tp 4, dp 1, ep 4``, and on 28 March, labelled ``tp 4,
  dp 4, ep 16`` (all ten rows of 1k prompts).
- MiniMax-M2.5 on H200, and on B200 up to vLLM 0.17: ``if [ "$EP_SIZE" -ge 1 ]`` enables expert
  parallelism always, as the default of EP_SIZE is 1.
- Kimi-K2.5: the scripts know ``--tensor-parallel-size`` alone.
- Kimi-K2.5 on GB200, disaggregated: prefill workers, and decode workers of 16 GPUs, have ``dp-attn:
  true`` and are labelled ``tp n, dp 1, ep n``.
- Llama-3.1-70B: NVIDIA's FP8 and NVFP4 checkpoints with ``kv-cache-dtype: fp8``, and the seats of
  GPT-OSS (``benchmarks/70b_fp8_h100_slurm.sh``, ``70b_fp8_h200_slurm.sh``,
  ``70b_fp8_b200_docker.sh``, ``70b_fp4_b200_docker.sh``).
- DeepSeek-R1: the dump of InferenceX's database, which calls it V3, has runs without multi-token
  prediction and the workers of disaggregated ones; most of them stand under R1, too. Of the others
  ``rows/launches.csv`` has workers and drafts where the configurations of the sixty days
  before the run (else the first one after it; InferenceX 843c6254f) start the run's GPU, precision,
  lengths, GPUs of a worker and concurrency in one way, or in one with drafts and one without, which
  the dump has of that day. Of the dump's own rows this finds 398 plain and 2 with drafts. Drafts
  are the recipe's (``mtp3``); else those of the scripts, under TensorRT-LLM 3, or 1 where engines
  share experts, under SGLang 2.
- Launches that are not known so are **assumed**, by a rule that sees no measurement
  (`MeasuredRun.assumed`): ``listed``, the first that fits the labels in the newest configuration
  of the day, else of a later day, with drafts where both are listed; ``nearest``, where none has
  the concurrency, the nearest one's; ``labels``, where there is none at all, no drafts. Labels of
  12 GPUs and more on GB200 and the like count all workers of a disaggregated run.
- GPT-OSS on GB200 under TensorRT-LLM, disaggregated: the file has no workers, ``gptoss-fp4-gb200-
  dynamo-trt`` of the configuration has (:data:`_GPT_OSS_WORKERS`). Loads that it starts in several
  ways, or with ``dp-attn: true`` (labelled ``dp 1``), are not told apart.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import KVDtype, ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.validation.published import launch_scripts

GPUS = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
}
#: Where ``dp-attn: true`` was configured for NVFP4 MiniMax-M2.5 on 2 GPUs: GPU, first and last day,
#: prompt length, lowest and highest concurrency (InferenceX 79bd988e9, 13962fcfa, 22d0f12f7,
#: 633fd2377).
_DATA_PARALLEL = (
    ("B200", "2026-04-08", "2026-04-21", 1024, 512, 512),
    ("B200", "2026-04-22", "2026-04-27", 1024, 256, 1024),
    ("B300", "2026-04-17", "2026-04-20", 1024, 512, 512),
    ("B300", "2026-04-21", "2026-04-27", 1024, 256, 2048),
    ("B300", "2026-04-21", "2026-04-27", 8192, 512, 512),
)

#: Prefill and decode workers of GPT-OSS on GB200 by prompt length, GPUs of a decode worker and
#: concurrency; prefill workers have one GPU.
_GPT_OSS_WORKERS = (
    {(1024, 4, c): (1, 1) for c in (1, 2, 4, 16, 32, 64, 128)}
    | {(1024, 2, 16): (1, 4), (8192, 8, 1): (1, 1)}
    | {(8192, 4, c): (1, 1) for c in (2, 4, 8, 16, 32, 64)}
    | {(8192, 4, 512): (2, 1), (8192, 2, 256): (2, 1), (8192, 2, 384): (2, 1)}
)


@dataclass(frozen=True)
class MeasuredModel:
    """A model whose measured runs can be predicted."""

    model_path: str  #: name in the file
    #: Name among the shipped models, or of a file of ``rows``; None takes the dimensions from the
    #: package's copy of the Hugging Face configuration.
    shipped: str | None
    #: Choices of the MoE kernel, the closest to that of the runs first, see
    #: :func:`~eldr_sim.validation.published.silicon.predict_rows`.
    moe_kernels: tuple[str, ...]
    precision: str = "fp8"  #: the file's word for the weights of the runs
    checkpoint: str = ""  #: Hugging Face name of what was served, if it is not ``model_path``
    backend: str = "vllm"  #: engine of the runs
    kv_cache_dtype: KVDtype = "bfloat16"  #: of the runs
    #: Whether the runs are InferenceX's; those that NVIDIA made for the package say of their load
    #: no more than two lengths, which are taken to be exact, beside vLLM's defaults.
    inferencex: bool = True

    @property
    def model(self) -> str:
        """Name or path for :func:`load_model`."""
        if self.shipped is not None and self.shipped.endswith(".json"):
            return str(Path(str(resources.files(__package__))) / "rows" / self.shipped)
        if self.shipped is not None:
            return self.shipped
        name = f"{(self.checkpoint or self.model_path).replace('/', '--')}_config.json"
        return str(package_folder() / "model_configs" / name)

    @property
    def tokenizes(self) -> str:
        """Who tokenises prompts: the engine, or Dynamo's front end in NVIDIA's own runs."""
        return self.backend if self.inferencex else "dynamo"

    @property
    def imported(self) -> bool:
        """Whether its tables are imported: those of GPT-OSS and of dense models ship."""
        return not (self.shipped == "GPT-OSS-120B" or self.dims().is_dense)

    def dims(self) -> ModelDims:
        """Return the dimensions, under the model's own name."""
        name = (self.checkpoint or self.model_path).split("/")[-1]
        named = {"name": name, "kv_cache_dtype": self.kv_cache_dtype}
        return load_model(self.model).model_copy(update=named)


_KERNELS, _NEW_FIRST = ("oldest", "newest"), ("newest", "oldest")
_NEW = ("newest",)  # of dense models whatever is asked for: they have no MoE kernel
_GPT_OSS, _MINIMAX, _KIMI = (
    "openai/gpt-oss-120b", "MiniMaxAI/MiniMax-M2.5", "moonshotai/Kimi-K2.5",
)  # fmt: skip
_QWEN, _QWEN_FP8 = "Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8"
_LARGE_QWEN, _NEXT_QWEN = "Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3.5-397B-A17B"
_LLAMA, _SMALL_LLAMA = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B-Instruct"
#: As the rows of SGLang say (``gemm_quant_mode`` fp8_block).
_IN_BLOCKS = "Llama-3.1-8B-FP8-block.json"
#: The configurations of InferenceX's runs of DeepSeek-R1, which the dump calls V3.
_V3, _V3_FP4, _GLM = (
    "deepseek-ai/DeepSeek-V3", "nvidia/DeepSeek-V3.1-NVFP4", "zhipuai/GLM-5",
)  # fmt: skip
_OF_VLLM = partial(MeasuredModel, inferencex=False)
_SGLANG, _TRTLLM = (partial(MeasuredModel, backend=name) for name in ("sglang", "trtllm"))
_FP8_KV: dict[str, Any] = {"kv_cache_dtype": "fp8"}
MEASURED_MODELS = {
    "gpt-oss-120b": MeasuredModel(_GPT_OSS, "GPT-OSS-120B", ("marlin", "newest"), "fp4"),
    "minimax-m2.5": MeasuredModel(_MINIMAX, None, _KERNELS),
    "minimax-m2.5-nvfp4": MeasuredModel(
        _MINIMAX, None, _KERNELS, "fp4", "nvidia/MiniMax-M2.5-NVFP4"
    ),
    "kimi-k2.5": MeasuredModel(_KIMI, None, _NEW_FIRST, "int4"),
    "kimi-k2.5-nvfp4": MeasuredModel(_KIMI, None, _KERNELS, "fp4", "nvidia/Kimi-K2.5-NVFP4"),
    "kimi-k2.5-nvfp4-trtllm": _TRTLLM(
        _KIMI, None, _NEW, "fp4", "nvidia/Kimi-K2.5-NVFP4", **_FP8_KV
    ),
    "qwen3-32b-trtllm": _TRTLLM(_QWEN, "Qwen3-32B", _NEW, "", inferencex=False),
    "gpt-oss-120b-trtllm": _TRTLLM(_GPT_OSS, None, _NEW, "fp4"),
    "qwen3-235b": _OF_VLLM(_LARGE_QWEN, None, _KERNELS),
    "llama-70b-fp8": MeasuredModel(_LLAMA, "Llama-3.1-70B-FP8", _NEW, **_FP8_KV),
    "llama-70b-nvfp4": MeasuredModel(_LLAMA, "Llama-3.1-70B-NVFP4", _NEW, "fp4", **_FP8_KV),
    "llama-8b-fp8": _OF_VLLM(
        "nvidia/Llama-3.1-8B-Instruct-FP8", "Llama-3.1-8B-FP8", _NEW, **_FP8_KV
    ),
    "qwen3-32b": _OF_VLLM(_QWEN, "Qwen3-32B", _NEW, ""),
    "qwen3-32b-fp8": _OF_VLLM(_QWEN, None, _NEW, checkpoint=_QWEN_FP8),
    "deepseek-v3-sglang": _SGLANG(_V3, None, _NEW_FIRST, **_FP8_KV),
    "deepseek-v3-trtllm": _TRTLLM(_V3, None, _NEW_FIRST, **_FP8_KV),
    "deepseek-v3-nvfp4-sglang": _SGLANG(_V3, None, _NEW, "fp4", _V3_FP4, **_FP8_KV),
    "deepseek-v3-nvfp4-trtllm": _TRTLLM(_V3, None, _NEW, "fp4", _V3_FP4, **_FP8_KV),
    "qwen3-235b-sglang": _SGLANG(_LARGE_QWEN, None, _NEW_FIRST, inferencex=False),
    "qwen3-235b-trtllm": _TRTLLM(_LARGE_QWEN, None, _NEW_FIRST, inferencex=False),
    "llama-70b-fp8-trtllm": _TRTLLM(_LLAMA, "Llama-3.1-70B-FP8", _NEW, **_FP8_KV),
    "llama-70b-nvfp4-trtllm": _TRTLLM(_LLAMA, "Llama-3.1-70B-NVFP4", _NEW, "fp4", **_FP8_KV),
    "llama-8b-trtllm": _TRTLLM(_SMALL_LLAMA, "Llama-3.1-8B", _NEW, "", inferencex=False),
    "llama-8b-fp8-sglang": _SGLANG(_SMALL_LLAMA, _IN_BLOCKS, _NEW, inferencex=False),
    "qwen3-32b-fp8-trtllm": _TRTLLM(_QWEN, None, _NEW, checkpoint=_QWEN_FP8, inferencex=False),
    "glm-5-sglang": _SGLANG(_GLM, None, _NEW, checkpoint="zai-org/GLM-5-FP8"),
    "glm-5-nvfp4-sglang": _SGLANG(_GLM, None, _NEW, "fp4", "nvidia/GLM-5-NVFP4"),
    "qwen3.5-397b-sglang": _SGLANG(_NEXT_QWEN, "Qwen3.5-397B-A17B", _NEW, "bf16"),
    "qwen3.5-397b-fp8-sglang": _SGLANG(_NEXT_QWEN, "Qwen3.5-397B-A17B-FP8", _NEW),
    "qwen3.5-397b-nvfp4-sglang": _SGLANG(_NEXT_QWEN, "Qwen3.5-397B-A17B-NVFP4", _NEW, "fp4"),
    "qwen3-32b-sglang": _SGLANG(_QWEN, "Qwen3-32B", _NEW, "", inferencex=False),
}


@dataclass(frozen=True, order=True)
class Workers:
    """The prefill workers of a disaggregated run; none where workers are co-located."""

    count: int = 0
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    data_parallel_size: int = 1

    @property
    def parallelism(self) -> Parallelism:
        """Parallelism of a worker."""
        return Parallelism(self.tensor_parallel_size, self.expert_parallel, self.data_parallel_size)


@dataclass(frozen=True, order=True)
class Case:
    """The configuration of a measured run. ``tensor_parallel_size``, ``expert_parallel`` and
    ``data_parallel_size`` are those of its ``decode_workers`` decode or co-located workers."""

    gpu: str
    tensor_parallel_size: int
    input_len: int
    output_len: int
    concurrency: int
    expert_parallel: bool = False
    data_parallel_size: int = 1
    decode_workers: int = 1
    prefill: Workers = Workers()
    drafts: int = 0  #: of multi-token prediction, each step
    script: launch_scripts.Script = launch_scripts.SAYS_NOTHING

    @property
    def parallelism(self) -> Parallelism:
        """Parallelism of a decode or co-located worker."""
        return Parallelism(self.tensor_parallel_size, self.expert_parallel, self.data_parallel_size)

    @property
    def kind(self) -> str:
        """How the run was spread over GPUs, in words."""
        words = {
            (False, False): "experts cut",
            (True, False): "experts spread",
            (True, True): "data-parallel attention, experts spread",
            (False, True): "data-parallel attention, experts cut",
        }
        pools = [self.parallelism] + ([self.prefill.parallelism] if self.prefill.count else [])
        spread = any(pool.expert_parallel for pool in pools)
        shared = any(pool.data_parallel_size > 1 for pool in pools)
        drafts = f", {self.drafts} drafts" if self.drafts else ""
        return ("disaggregated, " if self.prefill.count else "") + words[spread, shared] + drafts


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run."""

    case: Case  #: its configuration
    #: ``ttft_ms``, ``tpot_ms``: means over its requests.
    ttft_ms: float
    tpot_ms: float
    #: ``version``, ``date``: version of the engine and date of the measurement, empty where the
    #: file has none.
    version: str
    date: str
    assumed: str = ""  #: the rule that its launch is assumed by; empty where it is known
    #: Why the row is left out of the filtered errors, or empty. The reasons use measurements only,
    #: never a prediction.
    excluded: str = ""


#: Models of ``rows/launches.csv``, by a part of their names.
_WORDS = {"DeepSeek": "dsr1", "Kimi": "kimik2.5", "GLM-5": "glm5", "gpt-oss": "gptoss"}

#: By engine: configurations of DeepSeek in FP8 with few streams, and what is fitted to them.
_FITTED: dict[str, dict[Case, str]] = {
    "vllm": {},
    "sglang": {Case("B200", 8, 1024, 1024, 4, drafts=2): "the acceptance of SGLang's drafts"},
    "trtllm": {
        Case(
            "B200", 8, 1024, 1024, 8, script=launch_scripts.Script("TRTLLM")
        ): "the launch on B200's hosts",
        Case("H200", 8, 1024, 1024, 8, True, script=launch_scripts.Script(least_tokens=0)): (
            "the launch on H200's hosts"
        ),
    },
}


def package_folder() -> Path:
    """Return the folder of the installed package ``aiconfigurator-core``. Raises InputError if the
    package is not installed."""
    try:
        return Path(str(resources.files("aiconfigurator_core")))
    except ModuleNotFoundError:
        raise InputError(
            "aiconfigurator",
            "the package aiconfigurator-core, which has the measured runs, is not installed",
            "pip install 'eldr-sim[aiconfigurator]'",
        ) from None


def target_of(record: Mapping[str, str]) -> str:
    """Return which of :data:`MEASURED_MODELS` a record of the file is of; empty if of none."""
    model = record["model_path"].replace("DeepSeek-R1", "DeepSeek-V3")  # of the same shape
    key = (model, record["backend"], record["precision"])
    for name, target in MEASURED_MODELS.items():
        if (target.model_path, target.backend, target.precision) == key:
            return name
    return ""


def is_plain(record: Mapping[str, str]) -> bool:
    """Whether a run of DeepSeek is known to be without multi-token prediction. Of InferenceX's
    database dump, which labels R1 as V3, holds none with it and has its workers."""
    name, source = record["model_path"], record["silicon_data_source"]
    return name == "deepseek-ai/DeepSeek-V3" and source.startswith("db-dump")


def read_rows(
    path: Path | None = None, target: MeasuredModel = MEASURED_MODELS["gpt-oss-120b"]
) -> list[MeasuredRun]:
    """Read the measured runs without duplicates, and mark the doubtful ones. ``path``: the CSV;
    None takes that of the installed package ``aiconfigurator-core``. Raises InputError if the
    package is not installed, or the file has no such rows."""
    found = {row for _, row in _records(path, target) if isinstance(row, MeasuredRun)}
    dated = {(row.case, row.ttft_ms, row.tpot_ms) for row in found if row.date}
    found = {r for r in found if r.date or (r.case, r.ttft_ms, r.tpot_ms) not in dated}
    if not found:
        what = f"{target.backend} row of {target.model_path} in {target.precision}"
        raise InputError("silicon", f"the file has no {what} that can be predicted")
    return marked(sorted(found, key=lambda r: (r.case, r.date, r.tpot_ms)), target)


def uncovered_rows(target: MeasuredModel, path: Path | None = None) -> Counter[tuple[str, str]]:
    """Count the model's rows that cannot be predicted, by GPU and reason."""
    return Counter((gpu, row) for gpu, row in _records(path, target) if isinstance(row, str))


def _records(path: Path | None, target: MeasuredModel) -> Iterator[tuple[str, MeasuredRun | str]]:
    """Yield the GPU and the run, or why it cannot be predicted, of each of the model's records."""
    model: ModelDims | None = None
    file_path = path or package_folder() / "systems" / "silicon_sample.csv"
    wanted = (target.model_path, target.backend, target.precision)
    with file_path.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            if (record["model_path"], record["backend"], record["precision"]) == wanted:
                model = model or target.dims()
                gpu = GPUS.get(record["system"], record["system"])
                yield gpu, read_record(record, model, target.backend)


def read_record(record: dict[str, str], model: ModelDims, backend: str) -> MeasuredRun | str:
    """Return the run of a record of the file, or why it cannot be predicted."""
    if record["system"] not in GPUS:
        return "this GPU is not modelled"
    gpu, source = GPUS[record["system"]], record["silicon_data_source"]
    date = re.search(r"measured=([\d-]+)", source)
    day = date[1] if date else ""
    given = re.search(r"silicon_concurrency=(\d+)", source)
    concurrency = int(given[1]) if given else 0
    lengths = int(record["isl"]), int(record["osl"])
    prefill, decode_workers, drafts, assumed = Workers(), 1, 0, ""
    try:
        launch = (
            None if is_plain(record) else _launches().get(_launch_key(record, day, concurrency))
        )
        if launch is not None:
            prefill, workers, drafts, assumed = launch
            layout, decode_workers = workers.parallelism, workers.count
            if prefill.count:
                _check(prefill.parallelism, model)
                record = record | {"mode": "disagg"}  # labels of GB200 say else
        elif "DeepSeek" in record["model_path"] and not is_plain(record):
            return "no configuration of InferenceX starts such a run"
        elif record["mode"] == "disagg":
            known = _n_workers(record, concurrency)
            if isinstance(known, str):
                return known
            n_prefill, decode_workers = known
            layout = _pool(record, "decode", gpu)
            spread = _pool(record, "prefill", gpu)
            _check(spread, model)
            prefill = Workers(
                n_prefill,
                spread.tensor_parallel_size,
                spread.expert_parallel,
                spread.data_parallel_size,
            )
            # The batch size is a data-parallel rank's.
            batch = int(record["decode_batch_size"] or 0) * layout.data_parallel_size
            concurrency = concurrency or batch * decode_workers
        elif model.is_dense:
            layout = Parallelism(_sizes(record)[0])
        else:
            layout = _colocated(record, gpu, day, concurrency)
        if record["mode"] != "disagg":
            layout = launch_scripts.chosen_layout(record, gpu, day, concurrency) or layout
        if "Qwen3.5" in record["model_path"]:
            drafts = launch_scripts.qwen_drafts(record, gpu, layout)
        if not concurrency:
            return "its concurrency is not given"
        _check(layout, model)
    except _UnusableError as error:
        return str(error)
    except InputError as error:
        return f"no such kernel or worker: {error.field} {error.problem}"
    return MeasuredRun(
        Case(
            gpu,
            layout.tensor_parallel_size,
            *lengths,
            concurrency,
            layout.expert_parallel,
            layout.data_parallel_size,
            decode_workers,
            prefill,
            drafts,
            launch_scripts.script_of(record, gpu, day, concurrency, layout, drafts),
        ),
        round(float(record["silicon_ttft_ms"]), 3),
        round(float(record["silicon_tpot_ms"]), 3),
        record["backend_version"],
        day,
        assumed,
    )


def _check(layout: Parallelism, model: ModelDims) -> None:
    layout.check(model, copies=redundant_experts(layout, model) > 0)


def redundant_experts(layout: Parallelism, model: ModelDims) -> int:
    """Return the second copies of experts where ranks do not divide them: the recipes' 32.
    ``ep-num-redundant-experts`` of NVIDIA/srt-slurm's ``recipes/gb200-fp8``, for 48 ranks."""
    slots = model.n_experts + 32
    whole = layout.expert_parallel and slots % layout.n_ranks == 0
    return 32 if whole and model.n_experts % layout.n_ranks else 0


def _launch_key(record: Mapping[str, str], date: str, concurrency: int) -> tuple[str, ...]:
    """Return what names a run in ``rows/launches.csv``."""
    pool = "decode_" if record["mode"] == "disagg" else ""
    sizes = (record[f"{pool}{name}_size"] or "0" for name in ("tp", "attention_dp", "moe_ep"))
    names = ("backend", "mode", "system", "precision", "isl", "osl")
    model = next((word for name, word in _WORDS.items() if name in record["model_path"]), "")
    return (model, *(record[name] for name in names), str(concurrency), date, *sizes)


@lru_cache
def _launches() -> dict[tuple[str, ...], tuple[Workers, Workers, int, str]]:
    """Return prefill and decode workers, drafts, and the rule of an assumed launch by its key."""
    text = (resources.files(__package__) / "rows" / "launches.csv").read_text("utf-8")
    found = {}
    for line in list(csv.reader(text.splitlines()))[1:]:
        drafts, *sizes = map(int, line[12:21])
        pools = []
        for count, gpus, ranks, shared in (sizes[:4], sizes[4:]):
            layout = (1, ranks > 1, gpus) if shared else (gpus, ranks > 1, 1)
            pools.append(Workers(count, *layout) if count else Workers())
        found[tuple(line[:12])] = pools[0], pools[1], drafts, line[21]
    return found


def _n_workers(record: dict[str, str], concurrency: int) -> tuple[int, int] | str:
    """Return the prefill and decode workers of a disaggregated run, or why they are not known."""
    counts = [record.get(f"{pool}_num_workers", "") for pool in ("prefill", "decode")]
    if all(counts):
        n_prefill, n_decode = (int(float(count)) for count in counts)
        return n_prefill, n_decode
    if (record["model_path"], record["backend"]) == (_GPT_OSS, "trtllm"):
        key = int(record["isl"]), int(record["decode_tp_size"]), concurrency
        return _GPT_OSS_WORKERS.get(key, "data-parallel attention, or workers not told apart")
    return "disaggregated: its workers are not given"


class _UnusableError(Exception):
    """Why labels say nothing that can be predicted."""


def _sizes(record: dict[str, str], pool: str = "") -> tuple[int, int, int, int]:
    """Return tp, attention dp, moe tp and moe ep of a worker; what is missing counts as 1 or 0."""
    names = ("tp", "attention_dp", "moe_tp", "moe_ep")
    tp, dp, cut, ranks = (int(record.get(f"{pool}{name}_size") or 0) for name in names)
    tp = max(tp, 1)
    return tp, dp or max(cut * ranks // tp, 1), cut, ranks  # NVIDIA's own runs leave dp out


def _colocated(record: dict[str, str], gpu: str, date: str, concurrency: int) -> Parallelism:
    """Return what a co-located worker was started with; see the module's text."""
    tp, dp, cut, ranks = _sizes(record)
    name, fp4 = record["model_path"], record["precision"] == "fp4"
    if name == "moonshotai/Kimi-K2.5":
        return Parallelism(tp)
    if cut == ranks and cut > 1 and cut * ranks in (tp * dp, dp) and record["backend"] != "vllm":
        # n GPUs labelled n * n: attention data-parallel where dp says so, else cut.
        return Parallelism(1, True, ranks) if dp > 1 else Parallelism(cut, True)
    if dp == tp > 1 and (cut, ranks) == (1, tp * tp):
        if name != "MiniMaxAI/MiniMax-M2.5":
            raise _UnusableError(f"labels contradict: {tp} or {tp * tp} GPUs")
        shares = fp4 and any(
            gpu == card and first <= date <= last and low <= concurrency <= high
            for card, first, last, prompt, low, high in _DATA_PARALLEL
            if tp == 2 and int(record["isl"]) == prompt
        )
        return Parallelism(1, True, tp) if shares else Parallelism(tp, True)
    if tp * dp != cut * ranks or (cut > 1 and ranks > 1):
        raise _UnusableError(
            f"labels contradict: attention on {tp} GPUs x {dp}, experts cut {cut} x {ranks}"
        )
    always = name == "MiniMaxAI/MiniMax-M2.5" and not fp4
    always &= gpu == "H200" or (gpu == "B200" and record["backend_version"] == "0.17.0")
    return Parallelism(tp, ranks > 1 or (always and tp > 1), dp)


def _pool(record: dict[str, str], pool: str, gpu: str) -> Parallelism:
    """Return what a worker of a pool was started with."""
    tp, dp, cut, ranks = _sizes(record, f"{pool}_")
    kimi = record["model_path"] == "moonshotai/Kimi-K2.5" and record["backend"] == "vllm"
    if kimi and gpu == "GB200":
        return Parallelism(1, True, tp) if pool == "prefill" or tp > 8 else Parallelism(tp, True)
    if cut == ranks == 0:  # not given: spread where engines share them, as vLLM's recipes do
        return Parallelism(tp, dp > 1, dp)
    if tp * dp != cut * ranks or (cut > 1 and ranks > 1):
        raise _UnusableError(
            f"labels contradict: {pool} on {tp} GPUs x {dp}, experts cut {cut} x {ranks}"
        )
    return Parallelism(tp, ranks > 1, dp)


def marked(rows: Sequence[MeasuredRun], target: MeasuredModel) -> list[MeasuredRun]:
    """Mark rows of a model that contradict themselves or their neighbours, or are fitted to."""
    of_deepseek = "DeepSeek" in target.model_path and target.precision == "fp8"
    fitted = _FITTED[target.backend] if of_deepseek else {}
    fallen: set[MeasuredRun] = set()

    def setting(row: MeasuredRun) -> tuple[object, ...]:
        case = row.case
        lengths = case.input_len, case.output_len
        pools = case.parallelism, case.decode_workers, case.prefill
        return case.gpu, *pools, case.drafts, *lengths, row.date

    for i, row in enumerate(rows):
        for other in rows[i + 1 :]:
            if setting(row) != setting(other):
                continue
            if other.case.concurrency != 2 * row.case.concurrency:
                continue
            if other.tpot_ms < 0.9 * row.tpot_ms:
                fallen |= {row, other}

    def reason(row: MeasuredRun) -> str:
        if row.case in fitted:
            return f"{fitted[row.case]} is fitted to it"
        if row.case.gpu == "H100" and row.case.concurrency == 512:
            return "H100 at concurrency 512: TTFT of minutes beside TPOT of milliseconds"
        if row.ttft_ms > 0.25 * row.tpot_ms * row.case.output_len:
            return "TTFT over a quarter of the decode time"
        if row in fallen:
            return "TPOT falls by over 10% as concurrency doubles"
        return ""

    return [MeasuredRun(**(vars(row) | {"excluded": reason(row)})) for row in rows]
