"""Published clusters, as fields of a run's configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError


@dataclass(frozen=True)
class Preset:
    """A cluster, its engines and its load."""

    #: ``title``, ``source``: what it is, and where it is described.
    title: str
    source: str
    fields: Mapping[str, Any]  #: fields of a run's configuration
    #: Its models, the first by default, and what they have of their own.
    models: Mapping[str, Mapping[str, Any]]
    seconds: int  #: requests are sent for this time: ``num_requests`` is this times the rate
    notes: tuple[str, ...] = ()  #: what of it the fields cannot say
    #: Fields in place of its rate where the run begins with a warm-up: ``{rate}`` stands for it.
    warm_up: Mapping[str, Any] = field(default_factory=dict)


PRESETS = {
    name: Preset(**about | {"notes": tuple(about["notes"])})
    for name, about in json.loads(
        Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
    ).items()
}
"""By name."""


def preset_fields(text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``NAME`` or ``NAME:MODEL``, and those given, which override them;
    ``+warm-up``: with a load that begins with the preset's warm-up. Raises InputError."""
    whole, plus, extra = text.partition("+")
    name, _, model = whole.partition(":")
    preset = PRESETS.get(name)
    if preset is None:
        raise InputError("preset", f"no preset {name!r}", ", ".join(PRESETS))
    by_lower_name = {one.lower(): one for one in preset.models}
    if model.lower() not in by_lower_name and model:
        raise InputError("preset", f"{name} has no model {model!r}", ", ".join(preset.models))
    if plus and (extra != "warm-up" or not preset.warm_up):
        having = [f"{one}+warm-up" for one, other in PRESETS.items() if other.warm_up]
        raise InputError("preset", f"no preset {text!r}", ", ".join(having))
    chosen = by_lower_name.get(model.lower()) or str(
        given.get("model") or next(iter(preset.models))
    )
    fields = {**preset.fields, "model": chosen, **preset.models.get(chosen, {}), **given}
    rate = fields["request_rate"]
    if plus:
        del fields["request_rate"]
        return {**fields, **preset.warm_up, "load": preset.warm_up["load"].format(rate=rate)}
    if "num_requests" not in given and "duration" not in given and isinstance(rate, int | float):
        fields["num_requests"] = max(1, round(preset.seconds * rate))
    return fields
