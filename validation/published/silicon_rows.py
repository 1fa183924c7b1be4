"""Measured serving runs that ``aiconfigurator-core`` publishes.

``silicon_sample.csv`` of the package holds end-to-end runs with measured mean TTFT and TPOT. This
module reads the runs of the models in :data:`MEASURED_MODELS`, co-located and disaggregated. The
configuration of a run decides whether it can be predicted; its measured values decide only whether
it is left out of the filtered errors.

What its labels mean, and which launches are assumed, is in ``rows/README.md``: by a rule that sees
no measurement (`MeasuredRun.assumed`)."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import KVDtype, ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.traces.routing.synthetic.drawn import Shape, nearest_preset
from eldr_sim.traces.routing.synthetic.presets import preset_model
from eldr_sim.traces.routing.synthetic.synthesize import synthesize
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation.published import launch_scripts

GPUS = {
    "h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "b300_sxm": "B300",
    "gb200": "GB200", "gb300": "GB300",
}  # fmt: skip
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


@dataclass(frozen=True)
class MeasuredModel:
    """A model with measured runs that can be predicted."""

    model_path: str  #: name in the file
    #: A shipped model, or a file of ``rows``; None: the package's copy of the configuration.
    shipped: str | None
    #: Choices of the MoE kernel, closest to the runs' first (`silicon.predict_rows`).
    moe_kernels: tuple[str, ...]
    precision: str = "fp8"  #: the file's word for the weights of the runs
    checkpoint: str = ""  #: Hugging Face name of what was served, if it is not ``model_path``
    backend: str = "vllm"  #: engine of the runs
    kv_cache_dtype: KVDtype = "bfloat16"  #: of the runs
    #: Whether InferenceX's runs; NVIDIA's for the package say two lengths, taken to be exact.
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
        """What tokenises prompts: the engine, or Dynamo's front end in NVIDIA's own runs."""
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


def _rows(name: str) -> list[dict[str, str]]:
    """Return the lines of a file of ``rows``."""
    text = (resources.files(__package__) / "rows" / name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def _measured_model(line: dict[str, str]) -> MeasuredModel:
    known: dict[str, Any] = line | {"shipped": line["shipped"] or None}
    known |= {"moe_kernels": tuple(line["moe_kernels"].split())}
    return MeasuredModel(**known | {"inferencex": line["inferencex"] == "yes"})


MEASURED_MODELS = {line.pop("name"): _measured_model(line) for line in _rows("models.csv")}


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

    @classmethod
    def of(cls, count: int, spread: Parallelism) -> "Workers":
        """Return workers that are spread so."""
        size = spread.tensor_parallel_size
        return cls(count, size, spread.expert_parallel, spread.data_parallel_size)


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
    #: Version of the engine and date of the measurement; empty where not said.
    version: str
    date: str
    assumed: str = ""  #: the rule that its launch is assumed by; empty where it is known
    #: Why the row is left out of the filtered errors, by measurements alone; or empty.
    excluded: str = ""


#: Models of ``rows/launches.csv``, by a part of their names.
_WORDS = {"DeepSeek": "dsr1", "Kimi": "kimik2.5", "GLM-5": "glm5", "gpt-oss": "gptoss"}

#: By engine: configurations of DeepSeek in FP8 with few streams, and what is fitted to them.
_FITTED: dict[str, dict[Case, str]] = {
    "vllm": {},
    "sglang": {Case("B200", 8, 1024, 1024, 4, drafts=2): "the acceptance of SGLang's drafts"},
    "trtllm": {
        Case(gpu, 8, 1024, 1024, 8, spread, script=script): f"the launch on {gpu}'s hosts"
        for gpu, spread, script in (
            ("B200", False, launch_scripts.Script("TRTLLM")),
            ("H200", True, launch_scripts.Script(least_tokens=0)),
        )
    },
}


def package_folder() -> Path:
    """Return the folder of ``aiconfigurator-core``; raises InputError if it is not installed."""
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
    """Read the measured runs without duplicates, doubtful ones marked, from ``path`` or the
    package's CSV. Raises InputError if there are none, or no package."""
    runs = {row for _, row in _records(path, target) if isinstance(row, MeasuredRun)}
    dated = {(row.case, row.ttft_ms, row.tpot_ms) for row in runs if row.date}
    runs = {r for r in runs if r.date or (r.case, r.ttft_ms, r.tpot_ms) not in dated}
    if not runs:
        what = f"{target.backend} row of {target.model_path} in {target.precision}"
        raise InputError("silicon", f"the file has no {what} that can be predicted")
    return marked(sorted(runs, key=lambda r: (r.case, r.date, r.tpot_ms)), target)


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
    match = re.search(r"silicon_concurrency=(\d+)", source)
    concurrency = int(match[1]) if match else 0
    lengths = int(record["isl"]), int(record["osl"])
    prefill, decode_workers, drafts, assumed = Workers(), 1, 0, ""
    try:
        key = _launch_key(record, day, concurrency)
        launch = None if is_plain(record) else _launches().get(key)
        if launch is not None:
            prefill, workers, drafts, assumed = launch
            layout, decode_workers = workers.parallelism, workers.count
            if prefill.count:
                _check(prefill.parallelism, model)
                record = record | {"mode": "disagg"}  # labels of GB200 say else
        elif "DeepSeek" in record["model_path"] and not is_plain(record):
            return "no configuration of InferenceX starts such a run"
        elif record["mode"] == "disagg":
            n_workers = _n_workers(record, concurrency)
            if isinstance(n_workers, str):
                return n_workers
            n_prefill, decode_workers = n_workers
            layout = _pool(record, "decode", gpu)
            spread = _pool(record, "prefill", gpu)
            _check(spread, model)
            prefill = Workers.of(n_prefill, spread)
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
    launches = {}
    for row in _rows("launches.csv"):
        line = list(row.values())
        drafts, *sizes = map(int, line[12:21])
        pools = []
        for count, gpus, ranks, shared in (sizes[:4], sizes[4:]):
            layout = (1, ranks > 1, gpus) if shared else (gpus, ranks > 1, 1)
            pools.append(Workers(count, *layout) if count else Workers())
        launches[tuple(line[:12])] = pools[0], pools[1], drafts, line[21]
    return launches


def _n_workers(record: dict[str, str], concurrency: int) -> tuple[int, int] | str:
    """Return the prefill and decode workers of a disaggregated run, or why they are not known."""
    counts = [record.get(f"{pool}_num_workers", "") for pool in ("prefill", "decode")]
    if all(counts):
        n_prefill, n_decode = (int(float(count)) for count in counts)
        return n_prefill, n_decode
    if (record["model_path"], record["backend"]) == ("openai/gpt-oss-120b", "trtllm"):
        key = {"isl": record["isl"], "decode_tp_size": record["decode_tp_size"]}
        key |= {"concurrency": str(concurrency)}
        of = next((line for line in _rows("workers.csv") if key.items() <= line.items()), None)
        unknown = "data-parallel attention, or workers not told apart"
        return (int(of["prefill"]), int(of["decode"])) if of else unknown
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

    for row, other in combinations(rows, 2):
        doubled = other.case.concurrency == 2 * row.case.concurrency
        if doubled and other.tpot_ms < 0.9 * row.tpot_ms and setting(row) == setting(other):
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


Routing = Literal["uniform", "drawn"]

#: Requests of a routing trace, and tokens of each that are replayed.
REQUESTS, PROMPT, OUTPUT = 32, 128, 96
#: Prompt tokens of drawn requests: a chunk of a long prompt has more kinds of tokens than 128.
_DRAWN_PROMPT = 1024


def make_routing(folder: Path, routing: Routing, target: MeasuredModel) -> Path:
    """Write a routing trace of a model, ``uniform`` or ``drawn``; returns its folder."""
    return (uniform_trace if routing == "uniform" else drawn_trace)(folder, target=target)


def uniform_trace(folder: Path, seed: int = 0, *, target: MeasuredModel) -> Path:
    """Write a routing trace of tokens that choose experts uniformly at random."""
    model = target.dims()
    rng = np.random.default_rng(seed)
    shape = (PROMPT + OUTPUT, model.n_moe_layers, model.n_experts)
    experts = [
        np.argpartition(rng.random(shape, dtype=np.float32), model.top_k)[..., : model.top_k]
        for _ in range(REQUESTS)
    ]
    write_trace(
        folder,
        experts=np.concatenate(experts),
        request_id=[str(i) for i in range(REQUESTS)],
        domain=["random"] * REQUESTS,
        prompt_len=np.full(REQUESTS, PROMPT),
        output_len=np.full(REQUESTS, OUTPUT),
        is_calibration=np.zeros(REQUESTS, bool),
        model=model.name,
        n_experts=model.n_experts,
        domains=["random"],
        captured_by="drawn uniformly, no model",
        source_data="none",
        tool_versions={},
        provenance="synthetic",
    )
    return folder


def drawn_trace(folder: Path, seed: int = 0, *, target: MeasuredModel) -> Path:
    """Write a routing trace drawn for the model, from the fit to recorded tokens nearest to it. The
    requests are of all domains in turn. Recorded tokens were not random ones: that gates are as
    uneven for these is an assumption."""
    model = target.dims()
    shape = Shape(model.n_moe_layers, model.n_experts, model.top_k)
    preset = nearest_preset(target.shipped or model.name, shape)
    synthesize(
        preset_model(preset, **asdict(shape)),
        folder,
        requests=REQUESTS,
        calibration=0,
        prompt_len=(_DRAWN_PROMPT, _DRAWN_PROMPT),
        output_len=(OUTPUT, OUTPUT),
        seed=seed,
    )
    return folder
