"""What a calibration found: latency tables of the engine, and the times outside its steps.

A folder with ``calibration.json`` (:class:`CalibrationInfo`) and ``tables/*.parquet``, the latency
tables of kinds ``moe``, ``attention_decode``, ``attention_prefill`` and ``engine_step``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, list_gpus, load_gpu
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.step_time import StepTimeModel, build_step_time_model
from eldr_sim.kernel_profiles.tables import LatencyTable, load_table, table_name
from eldr_sim.simulator.transfer import TransferModel
from eldr_sim.validation.live.recording import EngineInfo

__all__ = [
    "Calibrated",
    "CalibrationInfo",
    "Delay",
    "model_of",
    "read_calibration",
    "write_calibration",
]

_MUCH = 1 << 50  # what no calibrated component depends on


class Delay(BaseModel):
    """A time that grows with a request's prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_s: float = Field(ge=0)
    """Seconds of an empty prompt."""
    per_token_s: float = Field(ge=0)
    """Seconds more for each token."""

    def of(self, prompt_len: Any) -> Any:
        """Return the seconds of prompts of so many tokens, number or array."""
        return self.base_s + self.per_token_s * prompt_len


class CalibrationInfo(BaseModel):
    """Times outside the engines' steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ingress_s: Delay
    """From the client's post until the request is in the engine's queue."""
    egress_s: float = Field(ge=0)
    """From the end of a step until the client has its tokens."""
    handoff_s: Delay
    """From the end of a prefill until the request is in the decode engine's queue."""
    transfer: TransferModel
    """KV transfers."""
    seconds: float = Field(ge=0)
    """Wall time of the calibration."""
    notes: dict[str, Any] = {}
    """What else it found."""


@dataclass(frozen=True)
class Calibrated:
    """A calibration as read back."""

    info: CalibrationInfo
    tables: Sequence[LatencyTable]

    @property
    def gpu(self) -> GPU:
        """The machine that the tables name: a known GPU, or one of which nothing else is known.

        Raises
        ------
        InputError
            There is no table, or they were taken on several machines.
        """
        names = sorted({table.metadata.gpu for table in self.tables})
        if len(names) != 1:
            raise InputError("calibration", f"tables of {', '.join(names) or 'nothing'}", "one GPU")
        if names[0] in list_gpus():
            return load_gpu(names[0])
        return GPU(
            name=names[0],
            memory_bytes=_MUCH,
            memory_bandwidth=_MUCH,
            bf16_flops=_MUCH,
            fp8_flops=0,
            nic_bandwidth=_MUCH,
            intra_node_bandwidth=_MUCH,
            engine_reserved_bytes=0,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            source="not known: every step time comes from a table",
            engine_reserved_source="not known",
            defaults_source="not known",
        )

    def step_time(self, model: ModelDims, engine: EngineInfo, max_model_len: int) -> StepTimeModel:
        """Return the step times of an engine.

        Raises
        ------
        InputError
            A part of a step has no table.
        """
        step_time = build_step_time_model(
            model,
            self.gpu,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            tables=self.tables,
        )
        missing = {"moe", "attention", "engine_step"} - {
            part for part, entry in step_time.provenance.items() if "framework" in entry
        }
        if missing:
            raise InputError(
                "calibration",
                f"no table of this model for {', '.join(sorted(missing))}",
                "moe, attention_decode, attention_prefill and engine_step",
            )
        return step_time


def model_of(config: dict[str, Any]) -> ModelDims:
    """Return the dimensions of a model, given its ``config.json``."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / str(config.get("model_type", "model")) / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config), encoding="utf-8")
        return load_model(path)


def write_calibration(
    folder: str | os.PathLike[str], info: CalibrationInfo, tables: Sequence[LatencyTable]
) -> None:
    """Write a calibration into an existing folder."""
    base = Path(folder)
    (base / "tables").mkdir(exist_ok=True)
    for table in tables:
        table.save(base / "tables" / table_name(table.metadata))
    text = info.model_dump_json(indent=2) + "\n"
    (base / "calibration.json").write_text(text, encoding="utf-8")


def read_calibration(folder: str | os.PathLike[str]) -> Calibrated:
    """Read a calibration.

    Raises
    ------
    InputError
        If a file is missing or not what it should be.
    """
    base = Path(folder)
    try:
        text = (base / "calibration.json").read_text(encoding="utf-8")
        info = CalibrationInfo.model_validate_json(text)
    except OSError as error:
        raise InputError("calibration", f"cannot read {error.filename}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise InputError("calibration", f"{base} holds no calibration: {line}") from None
    return Calibrated(info, [load_table(path) for path in sorted(base.glob("tables/*.parquet"))])
