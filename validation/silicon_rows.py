"""Measured serving runs that ``aiconfigurator-core`` publishes.

``silicon_sample.csv`` of the package holds end-to-end runs with measured mean TTFT and TPOT. This
module reads the runs on vLLM of the models in :data:`MEASURED_MODELS`, one engine on 1 to 8 GPUs.
The configuration of a run decides whether it can be predicted; its measured values decide only
whether it is left out of the filtered errors.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism

GPUS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}


@dataclass(frozen=True)
class MeasuredModel:
    """A model whose measured runs can be predicted.

    Attributes
    ----------
    model_path
        Name in the file.
    shipped
        Name among the shipped models; None takes the dimensions from the package's copy of the
        Hugging Face configuration.
    moe_kernels
        Choices of the MoE kernel, the closest to that of the runs first, see
        :func:`~eldr_sim.validation.silicon.predict_rows`.
    """

    model_path: str
    shipped: str | None
    moe_kernels: tuple[str, ...]

    @property
    def model(self) -> str:
        """Name or path for :func:`load_model`."""
        if self.shipped is not None:
            return self.shipped
        name = f"{self.model_path.replace('/', '--')}_config.json"
        return str(package_folder() / "model_configs" / name)

    def dims(self) -> ModelDims:
        """Return the dimensions, under the model's own name."""
        return load_model(self.model).model_copy(update={"name": self.model_path.split("/")[-1]})


MEASURED_MODELS = {
    "gpt-oss-120b": MeasuredModel("openai/gpt-oss-120b", "GPT-OSS-120B", ("marlin", "newest")),
    "minimax-m2.5": MeasuredModel("MiniMaxAI/MiniMax-M2.5", None, ("oldest", "newest")),
    "qwen3-235b": MeasuredModel("Qwen/Qwen3-235B-A22B-FP8", None, ("oldest", "newest")),
}


@dataclass(frozen=True, order=True)
class Case:
    """The configuration of a measured run."""

    gpu: str
    tensor_parallel_size: int
    input_len: int
    output_len: int
    concurrency: int
    expert_parallel: bool = False

    @property
    def parallelism(self) -> Parallelism:
        """Parallelism of the worker."""
        return Parallelism(self.tensor_parallel_size, self.expert_parallel)


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run.

    Attributes
    ----------
    case
        Its configuration.
    ttft_ms, tpot_ms
        Means over its requests.
    version, date
        vLLM version (empty if the file has none), and date of the measurement.
    excluded
        Why the row is left out of the filtered errors, or empty. The reasons use measurements only,
        never a prediction.
    """

    case: Case
    ttft_ms: float
    tpot_ms: float
    version: str
    date: str
    excluded: str = ""


def package_folder() -> Path:
    """Return the folder of the installed package ``aiconfigurator-core``.

    Raises
    ------
    InputError
        If the package is not installed.
    """
    try:
        return Path(str(resources.files("aiconfigurator_core")))
    except ModuleNotFoundError:
        raise InputError(
            "aiconfigurator",
            "the package aiconfigurator-core, which has the measured runs, is not installed",
            "pip install 'eldr-sim[aiconfigurator]'",
        ) from None


def read_rows(
    path: Path | None = None, target: MeasuredModel = MEASURED_MODELS["gpt-oss-120b"]
) -> list[MeasuredRun]:
    """Read the measured runs without duplicates, and mark the doubtful ones.

    Parameters
    ----------
    path
        The CSV; None takes that of the installed package ``aiconfigurator-core``.
    target
        The model.

    Raises
    ------
    InputError
        If the package is not installed, or the file has no such rows.
    """
    found = {row for _, row in _records(path, target) if isinstance(row, MeasuredRun)}
    if not found:
        raise InputError("silicon", f"the file has no vLLM row of {target.model_path}")
    return _marked(sorted(found, key=lambda r: (r.case, r.date, r.tpot_ms)))


def uncovered_rows(target: MeasuredModel, path: Path | None = None) -> Counter[tuple[str, str]]:
    """Count the model's rows on vLLM that cannot be predicted, by GPU and reason."""
    return Counter((gpu, row) for gpu, row in _records(path, target) if isinstance(row, str))


def _records(path: Path | None, target: MeasuredModel) -> Iterator[tuple[str, MeasuredRun | str]]:
    """Yield the GPU and the run, or why it cannot be predicted, of each vLLM record."""
    model: ModelDims | None = None
    file_path = path or package_folder() / "systems" / "silicon_sample.csv"
    with file_path.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            if (record["model_path"], record["backend"]) == (target.model_path, "vllm"):
                model = model or target.dims()
                yield GPUS.get(record["system"], record["system"]), _row(record, model)


def _row(record: dict[str, str], model: ModelDims) -> MeasuredRun | str:
    source = record["silicon_data_source"]
    concurrency = re.search(r"silicon_concurrency=(\d+)", source)
    if record["mode"] != "agg" or concurrency is None:
        return "disaggregated: its workers are not given"
    if record["system"] not in GPUS:
        return "this GPU is not modelled"
    size, moe_size, ranks = (int(record[f"{k}_size"]) for k in ("tp", "moe_tp", "moe_ep"))
    if record["attention_dp_size"] not in ("", "1"):
        return "data-parallel attention inside a worker is not modelled"
    if record["precision"] == "fp4" and model.expert_dtype != "mxfp4":
        return "NVFP4 experts: this dtype is not modelled"
    if size != moe_size * ranks or (moe_size > 1 and ranks > 1):
        return f"labels contradict: attention on {size} GPUs, experts cut {moe_size} x {ranks}"
    parallelism = Parallelism(size, ranks > 1)
    try:
        parallelism.check(model)
    except InputError as error:
        return f"no such kernel: {error.problem}"
    date = re.search(r"measured=([\d-]+)", source)
    lengths = int(record["isl"]), int(record["osl"])
    return MeasuredRun(
        Case(GPUS[record["system"]], size, *lengths, int(concurrency[1]), ranks > 1),
        round(float(record["silicon_ttft_ms"]), 3),
        round(float(record["silicon_tpot_ms"]), 3),
        record["backend_version"],
        date[1] if date else "",
    )


def _marked(rows: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Mark rows that contradict themselves or their neighbours."""
    fallen: set[MeasuredRun] = set()

    def setting(row: MeasuredRun) -> tuple[object, ...]:
        case = row.case
        lengths = case.input_len, case.output_len
        return case.gpu, case.parallelism, *lengths, row.date

    for i, row in enumerate(rows):
        for other in rows[i + 1 :]:
            if setting(row) != setting(other):
                continue
            if other.case.concurrency != 2 * row.case.concurrency:
                continue
            if other.tpot_ms < 0.9 * row.tpot_ms:
                fallen |= {row, other}

    def reason(row: MeasuredRun) -> str:
        if row.case.gpu == "H100" and row.case.concurrency == 512:
            return "H100 at concurrency 512: TTFT of minutes beside TPOT of milliseconds"
        if row.ttft_ms > 0.25 * row.tpot_ms * row.case.output_len:
            return "TTFT over a quarter of the decode time"
        if row in fallen:
            return "TPOT falls by over 10% as concurrency doubles"
        return ""

    return [MeasuredRun(**(vars(row) | {"excluded": reason(row)})) for row in rows]
