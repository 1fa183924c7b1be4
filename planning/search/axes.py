"""Axes of a plan: fields of a run, by dot paths, and their values, in every combination.

Those that make the shapes of clusters are searched by themselves (`shapes`); those that say which
requests there are would change the question."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_yaml
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.planning.search.prefill_strategy import prefill_label
from eldr_sim.policies.choice import parse, split
from eldr_sim.policies.registry import canonical
from eldr_sim.simulator.setup.config.launch import LAUNCH
from eldr_sim.simulator.setup.config.requests import RoutingConfig, WorkloadConfig
from eldr_sim.simulator.setup.config.run_config import RunConfig, get_field, make_config, set_field
from eldr_sim.simulator.setup.kv_tiers import parse_sizes
from eldr_sim.simulator.setup.run_routing import servable

MAX_GPUS = 64
DRAFTS = "drafts"  #: drafts of ``speculative_config``, 0 for none: an axis that is no field
#: Fields of a cluster's shape and of what is asked for: of the run, and also of a pool.
_CHOSEN = {"topology", "enable_expert_parallel", "goodput", *LAUNCH}
_SIZES = {
    "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "price_per_gpu_hour",
}  # fmt: skip
_REQUESTS = {name for group in (WorkloadConfig, RoutingConfig) for name in group.model_fields}


@dataclass(frozen=True)
class Axes:
    """Values by the dot path of their field; a field without values keeps the configuration's."""

    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def configs(self, config: RunConfig) -> Iterator[RunConfig]:
        """Yield a configuration for every combination; the last axis changes fastest.

        Raises InputError where a field is no axis, or has a value twice or one that is not allowed.
        """
        axes = {name: list(given) for name, given in self.values.items() if given}
        for name, given in axes.items():
            parts = name.split(".")
            if name in _CHOSEN or parts[-1] in _SIZES or parts[0] in _REQUESTS:
                raise InputError(
                    name, "cannot be an axis of a plan", "fields of engines and policies"
                )
            if parts[-1] == "gpu":
                axes[name] = given = [load_gpu(str(gpu)).name for gpu in given]
            elif name == "policy":
                axes[name] = given = _policies(config, given)
            if len({str(value) for value in given}) < len(given):
                raise InputError(name, f"{', '.join(map(str, given))} names a value twice")
        for combination in product(*axes.values()):
            fields = config.explicit_fields("python")
            for name, value in zip(axes, combination, strict=True):
                if name == DRAFTS:
                    name, value = "speculative_config", _cut(config, value)
                set_field(fields, name, value)
            yield make_config(fields)

    def label(self, config: RunConfig) -> str:
        """Return what tells a configuration from the others on its GPU, the policy first.

        Of prefill workers alone, how they share the model; of a fleet, its autoscaler before it."""
        first = config.policies.policy if config.cluster.generates else prefill_label(config)
        parts = [
            f"{name}={_shown(value_of(config, name))}"
            for name, given in self.values.items()
            if len(given) > 1 and name not in ("policy", "gpu")
        ]
        if config.scaling.scales:
            several = len(self.values.get("policy", ())) > 1
            first = f"{config.scaling.autoscale}, {first}" if several else config.scaling.autoscale
        return ", ".join([first, *parts])


@dataclass(frozen=True)
class Space:
    """What a search chooses from; what is empty is the configuration's own."""

    config: RunConfig
    policies: Sequence[str] = ()  #: decode policies
    gpus: Sequence[str] = ()
    max_gpus: int = MAX_GPUS  #: most GPUs of a cluster
    #: Price of a GPU-hour by GPU. Without prices the cheapest cluster has the fewest GPUs.
    prices: Mapping[str, float] | None = None
    #: GPUs per engine, for each pool; all powers of two up to a node if empty.
    tensor_parallel_sizes: Sequence[int] = ()
    #: Engines per worker, for each pool, more than one of which share experts.
    data_parallel_sizes: Sequence[int] = ()
    #: GPUs that hold the experts beside the engines of a decode worker, 0 for none.
    ffn_ranks: Sequence[int] = ()
    #: How the GPUs of prefill workers alone share the model, `prefill_strategy.KINDS`.
    strategies: Sequence[str] = ()
    #: More values, by the dot path of their field, in every combination; see `Axes`.
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def wanted(self) -> Axes:
        """What candidates differ by."""
        return Axes({"gpu": self.gpus, "policy": self.policies, **self.axes})

    @property
    def engines(self) -> Sequence[int]:
        """Engines per worker, at least one number."""
        return self.data_parallel_sizes or [self.config.cluster.data_parallel_size]

    @property
    def sizes(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Sizes of workers, as `candidates.make_candidate` has them."""
        return self.tensor_parallel_sizes, self.engines, self.ffn_ranks


def parse_axes(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Parse axes such as ``all2all_backend=deepep_ll,pplx``; a field that comes again has more.

    Commas separate numbers and words, which may have parameters; a YAML list holds any values.
    ``default``: the field's own; a KV tier may have a range of bytes. Raises InputError."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, listed = (part.strip() for part in text.partition("="))
        if not (name and equals and listed):
            raise InputError("vary", repr(text), "FIELD=VALUE,... such as kv_load=always,cheaper")
        if name == "kv_tier" and ".." in listed:
            values: list[Any] = [*parse_sizes(listed)]
        elif listed[0] in "[{":
            found = parse_yaml(listed, "vary", repr(text))
            values = found if isinstance(found, list) else [found]
        else:
            words = listed.split(",")
            numbers = [parse_yaml(word, "vary", repr(text)) for word in words if "=" not in word]
            plain = len(numbers) == len(words) and not any(isinstance(n, str) for n in numbers)
            has_parameters = "=" in listed or ":" in listed
            values = numbers if plain else split(listed) if has_parameters else words
        default = make_config({}) if "default" in values else None
        axes.setdefault(name, []).extend(
            get_field(default, name) if value == "default" and default is not None else value
            for value in values
        )
    return axes


def _policies(config: RunConfig, words: Sequence[Any]) -> list[str]:
    """Return decode policies by the names that have them; dense models' need no experts."""
    for word in words:
        if "artifact" in parse(word, "policy").given:
            problem = f"{word!r}: an artifact is fitted for one number of decode workers"
            raise InputError("policy.artifact", problem, "none")
    if not config.cluster.generates:
        raise InputError("policy", "prefill workers alone do not decode", "--prefill-policy")
    return [canonical("decode", word) for word in servable(config.engine.model, words)]


def _cut(config: RunConfig, drafts: int) -> dict[str, Any] | None:
    """Return ``speculative_config`` with the first ``drafts`` of its drafts."""
    speculative_config = config.steps.speculative_config
    if speculative_config is None:
        raise InputError(
            DRAFTS, "no method or model is given", "together with --speculative-config"
        )
    return speculative_config.cut(drafts)


def value_of(config: RunConfig, name: str) -> Any:
    """Return what a run has of an axis."""
    if name == DRAFTS:
        drafting = config.steps.speculative_config
        return 0 if drafting is None else drafting.num_speculative_tokens
    return get_field(config, name)


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " + ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
