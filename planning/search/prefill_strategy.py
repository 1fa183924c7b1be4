"""How the GPUs of a prefill worker share a model, in the words of MoE-Prefill."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from eldr_sim.kernel_profiles.parallel import Backend
from eldr_sim.simulator.setup.config.run_config import RunConfig

Kind = Literal["async_ep", "dp_ep", "tp_ep", "tp", "pp"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KIND_LABELS: dict[Kind, str] = {
    "async_ep": "AsyncEP", "dp_ep": "DP+EP", "tp_ep": "TP+EP", "tp": "TP+TP", "pp": "PP+PP",
}  # fmt: skip


@dataclass(frozen=True)
class PrefillStrategy:
    """How a number of GPUs of a node share a model's prompts."""

    #: Tensor parallelism (``tp``, with whole experts ``tp_ep``), attention of each GPU's own with
    #: tokens dispatched (``dp_ep``) or experts gathered (``async_ep``), or stages of layers
    #: (``pp``).
    kind: Kind
    backend: Backend = "nccl_alltoall"  #: of ``dp_ep``: how tokens reach their experts
    #: Of ``async_ep``: layers on the GPU beside the first (0: all), the time that a layer loses for
    #: each second of a gather beside it, and how experts are gathered.
    window: int = 0
    interference: float = 0.0
    gather: Literal["collective", "one_sided", "needed"] = "one_sided"

    def fields(self, n_gpus: int) -> dict[str, Any]:
        """Return the fields of a run with one prefill worker of ``n_gpus`` GPUs."""
        fields: dict[str, Any] = {"topology": "1P"}
        match self.kind:
            case "async_ep":
                if n_gpus > 1:
                    fields |= {"data_parallel_size": n_gpus, "enable_expert_parallel": True,
                               "expert_gather": self.gather}  # fmt: skip
                if self.window:
                    fields["offload_window"] = self.window
                if self.interference:
                    fields["gather_interference"] = self.interference
            case "dp_ep":
                fields |= {"data_parallel_size": n_gpus, "enable_expert_parallel": True,
                           "all2all_backend": self.backend}  # fmt: skip
            case "tp_ep" | "tp":
                fields |= {"tensor_parallel_size": n_gpus,
                           "enable_expert_parallel": self.kind == "tp_ep"}  # fmt: skip
            case "pp":
                fields["pipeline_parallel_size"] = n_gpus
        return fields

    @property
    def label(self) -> str:
        """What tables call it; the words are MoE-Prefill's."""
        name = KIND_LABELS[self.kind]
        if self.kind == "async_ep":
            return f"{name}, window {self.window}" if self.window else name
        return f"{name}, {self.backend}" if self.kind == "dp_ep" else name


def strategy_of(config: RunConfig) -> PrefillStrategy:
    """Return the strategy of the prefill workers of a configuration."""
    pool = config.pool("prefill").parallelism
    window = config.experts.offload_window or 0
    if config.experts.expert_gather is not None or window:
        return PrefillStrategy(
            "async_ep", config.cluster.all2all_backend, window, config.experts.gather_interference,
            config.experts.expert_gather or "one_sided",
        )  # fmt: skip
    if pool.data_parallel_size > 1:
        return PrefillStrategy("dp_ep", config.cluster.all2all_backend)
    if pool.pipeline_parallel_size > 1:
        return PrefillStrategy("pp")
    return PrefillStrategy("tp_ep" if pool.expert_parallel else "tp")


def prefill_label(config: RunConfig) -> str:
    """Return the strategy, GPUs and router of the prefill workers of a configuration."""
    size = config.pool("prefill").parallelism.n_gpus
    name = (
        "one GPU" if size == 1 and not config.experts.offload_window else strategy_of(config).label
    )
    return name if size == 1 else f"{name} on {size} GPUs"


def chunk_label(config: RunConfig) -> str:
    """Return the tokens of a step, and whether prompts are cut."""
    tokens = config.pool("prefill").max_num_batched_tokens
    return f"{tokens}, prompts whole" if config.experts.kv_cache_free else f"{tokens}"
