"""Calibration of a live engine, as a folder: ``calibration.json`` (:class:`CalibrationInfo`),
``tables/*.parquet`` (``moe``, ``attention_decode``, ``attention_prefill``, ``engine_step``) and
``gpu.json``, as ``eldr-sim run --gpu`` takes it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, list_gpus, load_gpu
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel, build_step_time_model
from eldr_sim.kernel_profiles.tables.format import LatencyTable, load_table, save_tables
from eldr_sim.kinds import AnyPath
from eldr_sim.simulator.setup.transfer import TransferModel
from eldr_sim.validation.live.live_run import EngineInfo

_WINDOW = 3  # probes whose median is taken
_ALIKE = 4  # fewest steps of a point that tells how times follow the probe


class DriftModel(BaseModel):
    """How an engine's steps follow the probe; without drift all factors are 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference_s: float = Field(gt=0)  #: probe at the speed of the tables, s
    moe: float  #: exponent of the MoE layers
    attention: float  #: exponent of attention
    rest: float  #: exponent of the other parts
    step: float  #: exponent of whole steps


class Drift:
    """Speed of a core over time, by a probe: one token in one MoE layer before every step.

    Others on a virtual machine's host slow a core by up to a factor of two, for seconds or minutes.
    How parts of a step follow, ``part ~ probe ** exponent``, is fitted on the calibration's steps;
    tables hold times at the reference speed, and a run is predicted with its own probes. ``at_s``,
    ``probe_s``: ascending times of probes, and what they took (NaN left out); ``reference_s``: None
    takes the median."""

    def __init__(self, at_s: Floats, probe_s: Floats, reference_s: float | None) -> None:
        known = np.isfinite(probe_s)
        self.at_s = np.asarray(at_s, np.float64)[known]
        taken = np.asarray(probe_s, np.float64)[known]
        if len(taken):
            near = np.pad(taken, _WINDOW // 2, mode="edge")
            taken = np.median(np.lib.stride_tricks.sliding_window_view(near, _WINDOW), axis=1)
            reference_s = float(np.median(taken)) if reference_s is None else reference_s
        self.reference_s = reference_s
        self.factors = taken if reference_s is None or not len(taken) else taken / reference_s

    def factor(self, at_s: Floats) -> Floats:
        """Return by how much a probe takes longer at these times than at the reference speed."""
        if not len(self.at_s):
            return np.ones_like(at_s)
        return np.interp(at_s, self.at_s, self.factors)


class Clock:
    """A clock on which the machine always has the reference speed. ``at_s``, ``factors``: ascending
    times, and by how much steps take longer there; in between, the geometric mean of both ends.
    Outside, the time-weighted mean of all. None of them: the clock is the wall's."""

    def __init__(self, at_s: Floats, factors: Floats) -> None:
        self._wall = np.asarray(at_s, np.float64)
        self._own = self._wall.copy()
        self.mean = 1.0
        if len(self._wall) > 1:
            own = np.diff(self._wall) / np.sqrt(factors[:-1] * factors[1:])
            self.mean = float((self._wall[-1] - self._wall[0]) / own.sum())
            self._own = self._wall[0] / self.mean + np.concatenate([[0.0], np.cumsum(own)])

    def own_s(self, wall_s: Floats) -> Floats:
        """Return the time on this clock at moments of the wall's."""
        return self._convert(wall_s, self._wall, self._own, 1 / self.mean)

    def wall_s(self, own_s: Floats) -> Floats:
        """Return the wall's time at moments of this clock; the inverse of `own_s`."""
        return self._convert(own_s, self._own, self._wall, self.mean)

    @staticmethod
    def _convert(x: Floats, known: Floats, values: Floats, slope: float) -> Floats:
        x = np.asarray(x, np.float64)
        if len(known) < 2:
            return x
        inside = np.interp(x, known, values)
        before, after = slope * np.minimum(x - known[0], 0), slope * np.maximum(x - known[-1], 0)
        return np.asarray(inside + before + after, np.float64)


def exponent(groups: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Return with which exponent, 0 to 2, equal steps' times follow the probe, by least squares."""
    xy = xx = 0.0
    for seconds, factors in groups:
        if len(seconds) >= _ALIKE:
            x, y = np.log(factors), np.log(seconds)
            dx, dy = x - x.mean(), y - y.mean()
            xy, xx = xy + float(dx @ dy), xx + float(dx @ dx)
    return float(np.clip(xy / xx, 0.0, 2.0)) if xx > 0 else 0.0


_MUCH = 1 << 50  # value of figures that no calibrated component uses


class Delay(BaseModel):
    """A delay that grows linearly with the prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_s: float = Field(ge=0)  #: delay of an empty prompt, s
    per_token_s: float = Field(ge=0)  #: additional delay per prompt token, s

    def of(self, prompt_len: Any) -> Any:
        """Return the delay of prompts of given lengths (number or array), s."""
        return self.base_s + self.per_token_s * prompt_len


class CalibrationInfo(BaseModel):
    """Delays outside the engines' steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ingress_s: Delay  #: from the client's post until the request is in the engine's queue
    egress_s: float = Field(ge=0)  #: from the end of a step until the client has its tokens
    handoff_s: Delay  #: from the end of a prefill until the request is in the decode engine's queue
    transfer: TransferModel  #: KV transfers
    seconds: float = Field(ge=0)  #: wall time of the calibration
    drift: DriftModel | None = None  #: how steps follow the engine's probe; None without one
    doubts: list[str] = []  #: why the tables are not to be trusted, a line each
    notes: dict[str, Any] = {}  #: further figures


@dataclass(frozen=True)
class EngineCalibration:
    """Calibration of the engines of a set-up."""

    info: CalibrationInfo
    tables: Sequence[LatencyTable]

    @property
    def gpu(self) -> GPU:
        """The device of the tables: a known GPU, or a placeholder; raises InputError unless one."""
        names = sorted({table.metadata.gpu for table in self.tables})
        if len(names) != 1:
            raise InputError("calibration", f"tables of {', '.join(names) or 'nothing'}", "one GPU")
        return device_of(names[0])

    def without_drift(self) -> "EngineCalibration":
        """Return the calibration as if the machine had always had the speed of the tables."""
        return EngineCalibration(self.info.model_copy(update={"drift": None}), self.tables)

    def drift(self, at_s: Floats, probe_s: Floats) -> Drift:
        """Return the drift that an engine's probes show, against the speed of the tables."""
        drift = self.info.drift
        if drift is None:
            return Drift(np.empty(0), np.empty(0), None)
        return Drift(at_s, probe_s, drift.reference_s)

    def step_time(self, model: ModelDims, engine: EngineInfo, max_model_len: int) -> StepTimeModel:
        """Return an engine's step times; raises InputError if a part of a step has no table."""
        step_time = build_step_time_model(
            model,
            self.gpu,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            tables=self.tables,
        )
        known = {part for part, entry in step_time.provenance.items() if "framework" in entry}
        if missing := {"moe", "attention", "engine_step"} - known:
            problem = f"no table of this model for {', '.join(sorted(missing))}"
            allowed = "moe, attention_decode, attention_prefill and engine_step"
            raise InputError("calibration", problem, allowed)
        return step_time


def device_of(name: str, engine: EngineInfo | None = None, memory_bytes: int = _MUCH) -> GPU:
    """Return a known GPU, or one of which only tables and ``engine``'s defaults are known."""
    if name in list_gpus():
        return load_gpu(name)
    return GPU(
        name=name,
        memory_bytes=memory_bytes,
        memory_bandwidth=_MUCH,
        bf16_flops=_MUCH,
        fp8_flops=0,
        nic_bandwidth=_MUCH,
        intra_node_bandwidth=_MUCH,
        engine_reserved_bytes=0,
        max_num_seqs=1 if engine is None else engine.max_num_seqs,
        max_num_batched_tokens=1 if engine is None else engine.max_num_batched_tokens,
        source="unknown: every step time comes from a table",
        engine_reserved_source="unknown",
        defaults_source="unknown" if engine is None else "the calibrated engine's options",
    )


def model_of(config: dict[str, Any]) -> ModelDims:
    """Return the dimensions of a model, given its ``config.json``."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / str(config.get("model_type", "model")) / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config), encoding="utf-8")
        return load_model(path)


def write_calibration(
    folder: AnyPath, info: CalibrationInfo, tables: Sequence[LatencyTable]
) -> None:
    """Write a calibration into an existing folder."""
    base = Path(folder)
    (base / "tables").mkdir(exist_ok=True)
    save_tables(tables, base / "tables")
    text = info.model_dump_json(indent=2) + "\n"
    (base / "calibration.json").write_text(text, encoding="utf-8")


def read_calibration(folder: AnyPath) -> EngineCalibration:
    """Read a calibration; raises InputError if a file is missing or not what it should be."""
    base = Path(folder)
    try:
        text = (base / "calibration.json").read_text(encoding="utf-8")
        info = CalibrationInfo.model_validate_json(text)
    except OSError as error:
        raise InputError("calibration", f"cannot read {error.filename}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise InputError("calibration", f"{base} holds no calibration: {line}") from None
    tables = [load_table(path) for path in sorted(base.glob("tables/*.parquet"))]
    return EngineCalibration(info, tables)
