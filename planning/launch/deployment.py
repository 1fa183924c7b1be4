"""What a configuration says of each pool that real engines must be given."""

import math
from dataclasses import dataclass
from typing import Literal

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.parallel import Backend, Parallelism
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.pools import Engine, WorkerPool
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.config.speculative import SpeculativeConfig
from eldr_sim.simulator.setup.memory import least_block_size
from eldr_sim.simulator.setup.prepare import prepare

#: What a user must put in the place of: names of images, models and secrets are not guessed.
REPLACE = "REPLACE_ME"
#: TCP ports of the engines of each role.
PORTS = {"prefill": 8100, "decode": 8200, "serve": 8000}

#: Fields of a run that no file says.
_NOT_LAUNCHED = (
    "kv_tier", "answer_kv", "conditional_disagg", "kv_reserve", "queue_order",
    "eplb_interval", "frontend", "kv_cache_memory_bytes", "num_gpu_blocks_override",
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    """The workers of one pool; a worker is an instance of an engine, on a node or more."""

    name: Literal["prefill", "decode", "serve"]  #: ``serve``: co-located
    pool: WorkerPool
    spec: EngineSpec  #: as it was simulated
    config: RunConfig
    experts: int  #: of a layer, without the redundant ones
    block_size: int  #: tokens of a KV block in vLLM

    @property
    def layout(self) -> Parallelism:
        """How a worker spreads the model over its GPUs."""
        return self.spec.parallelism

    @property
    def is_group(self) -> bool:
        """Whether engines share experts."""
        return self.layout.data_parallel_size > 1

    @property
    def gpus(self) -> int:
        """GPUs of a worker."""
        return self.layout.n_ranks

    @property
    def nodes(self) -> int:
        """Nodes of a worker."""
        return math.ceil(self.gpus / self.config.cluster.gpus_per_node)

    @property
    def local_engines(self) -> int:
        """Engines of a worker on each of its nodes."""
        return self.layout.data_parallel_size // self.nodes

    @property
    def backend(self) -> Backend:
        """How tokens reach the experts that engines share."""
        return self.pool.all2all_backend or self.config.cluster.all2all_backend

    @property
    def placement(self) -> str:
        """Which experts lie where."""
        return self.pool.expert_placement or "linear"

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The drafts that it verifies."""
        return self.pool.speculative_config if self.pool.decodes else None

    @property
    def port(self) -> int:
        """TCP port of the engines."""
        return PORTS[self.name]

    def unlaunchable(self, target: str) -> list[str]:
        """Say what was simulated and cannot be given to the engine."""
        found = []
        if self.placement not in ("linear", "eplb"):
            found.append(f"expert placement {self.placement}: {target} places experts itself")
        return found

    def share_of(self, engine: Engine) -> str | None:
        """Return the share of memory for an engine; None: its default, as another was simulated."""
        return f"{self.spec.memory_share:g}" if engine == self.spec.engine else None


@dataclass(frozen=True)
class Deployment:
    """A cluster as it is launched."""

    config: RunConfig
    roles: tuple[Role, ...]
    head: tuple[str, ...]  #: first lines of every file: what it is and what it was made from
    max_model_len: int  #: most tokens of a request

    @property
    def apart(self) -> bool:
        """Whether prefill and decode are apart."""
        return len(self.roles) == 2

    @property
    def n_gpus(self) -> int:
        """GPUs of all workers."""
        return sum(role.pool.workers * role.gpus for role in self.roles)

    def comment(self, target: str, mark: str = "#") -> str:
        """Return the first comment of a file for an engine or a platform."""
        lines = [f"For {target}. {self.head[0]}", *self.head[1:]]
        lines += [
            f"{role.name}: {role.pool.workers} worker{'s' if role.pool.workers > 1 else ''} of "
            f"{role.gpus} GPU{'s' if role.gpus > 1 else ''} on {role.nodes} "
            f"node{'s' if role.nodes > 1 else ''} each"
            for role in self.roles
        ]
        lines += [f"total: {self.n_gpus} GPUs"]
        for role in self.roles:
            lines += [f"simulated, not launched: {each}" for each in role.unlaunchable(target)]
        for name in _NOT_LAUNCHED:
            value = self.config.value(name)
            if value != RUN_FIELDS[name].get_default(call_default_factory=True):
                lines += [f"simulated, not launched: {name} {value}"]
        return "".join(f"{mark} {line}\n" for line in lines)


def deployment_of(config: RunConfig, head: tuple[str, ...]) -> Deployment:
    """Return what a cluster's pools are; raises InputError for what no engine is launched as."""
    if not isinstance(config.cluster.topology, str) or not config.cluster.generates:
        raise InputError("emit", f"{config.cluster.topology} is not launched", "xPyD or xC")
    if any(pool.ffn_ranks for pool in config.pools):
        problem = f"separate FFN GPUs of {config.cluster.topology} are not launched"
        raise InputError("emit", problem, "xPyD or xC")
    prepared, roles = prepare(config), []
    for pool, spec in zip(config.pools, prepared.spec.pools, strict=True):
        layout = spec.engine.parallelism
        if layout.data_parallel_size > 1 and layout.n_gpus % min(
            layout.n_gpus, config.cluster.gpus_per_node
        ):
            problem = f"{layout.n_gpus} GPUs of a worker do not fill whole nodes"
            raise InputError("emit", problem, f"multiples of {config.cluster.gpus_per_node}")
        name: Literal["prefill", "decode", "serve"] = "decode" if pool.decodes else "prefill"
        size = least_block_size(layout.shard(prepared.model), config.engine.block_size)
        known = pool, spec.engine, config, prepared.model.n_experts, size
        roles.append(Role(name if config.cluster.n_prefill else "serve", *known))
    return Deployment(config, tuple(roles), head, prepared.spec.max_model_len)
