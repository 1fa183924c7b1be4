"""What to measure: tasks by level, coarse over all kernels first, then finer, so that tables are
usable wherever the budget ends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.profile import attention, dense
from eldr_sim.kernel_profiles.profile.device import Device
from eldr_sim.kernel_profiles.profile.grid import MoEPoint, moe_levels
from eldr_sim.kernel_profiles.profile.host_gap import measure_host_gap
from eldr_sim.kernel_profiles.profile.moe import (
    ERROR_BOUND,
    MoEBench,
    MoEKernel,
    TorchMoE,
    TritonKernel,
    VllmMoE,
)
from eldr_sim.kernel_profiles.profile.records import EAGER, HOT, MAIN, OTHER, WIDE, Record
from eldr_sim.kernel_profiles.profile.timing import Call, Mode, require_torch
from eldr_sim.kernel_profiles.profile.weights import MoEShape
from eldr_sim.kernel_profiles.tables.format import (
    MOE_DTYPES,
    Kind,
    attention_shapes,
    elementwise_shape,
    moe_shape_of,
)

PARTS = ("moe", "moe-vllm", "attention", "gemm", "elementwise", "collectives", "nixl", "host-gap")
"""What ``--only`` chooses from."""

_ROTATION_POINTS = ((0.0, 1), (0.125, 16), (0.25, 8), (0.5, 16), (1.0, 16), (1.0, 128))


@dataclass(frozen=True)
class Target:
    """A model, and how a worker spreads it."""

    model: ModelDims
    parallelism: Parallelism = SINGLE_GPU

    @property
    def shard(self) -> ModelDims:
        """What one GPU computes with."""
        return self.parallelism.shard(self.model)

    @property
    def moe(self) -> MoEShape:
        """One GPU's part of a MoE layer."""
        shard = self.shard
        if shard.expert_dtype not in ERROR_BOUND:
            allowed = ", ".join(ERROR_BOUND)
            raise InputError("model", f"kernels of {shard.expert_dtype} experts", allowed)
        return MoEShape(
            shard.hidden_size,
            shard.expert_intermediate_size,
            shard.n_experts,
            shard.top_k,
            self.parallelism.n_expert_ranks,
            shard.expert_dtype,
        )

    @property
    def moe_identity(self) -> dict[str, int]:
        """Shape of that part as it identifies a table."""
        return moe_shape_of(self.shard, self.parallelism.n_expert_ranks)

    @property
    def attention_shapes(self) -> list[dict[str, int]]:
        """Shapes of the kinds of layers, of grouped-query attention."""
        model = self.shard
        return [own for _, _, own in attention_shapes(model)] if model.attention == "gqa" else []

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Matrices (n, k) that a step multiplies by, but the experts."""
        model = self.shard
        found = [(model.n_experts, model.hidden_size), (model.vocab_size, model.hidden_size)]
        return found + [matrix for _, _, linears in model.matrices for matrix in linears]


@dataclass(frozen=True)
class Outcome:
    """What a task found: rows, and facts beside them."""

    records: Sequence[Record] = ()
    note: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One measurement."""

    key: str  #: names it in the journal
    #: ``part``, ``group``: one of :data:`PARTS`; tasks of a group are given up together.
    part: str
    group: str
    level: int  #: coarser levels come first
    run: Callable[["Workbench"], Outcome]  #: measures


class Workbench:
    """The device, the weights of the MoE layer being measured, and block sizes found
    (``tuned``)."""

    def __init__(self, device: Device, tuned: dict[str, Any] | None = None) -> None:
        self.device = device
        self.tuned = dict(tuned or {})
        self._bench: tuple[str, MoEBench] | None = None

    def bench(self, group: str, shape: MoEShape, kernel: type[Any]) -> MoEBench:
        """Weights of a layer; those of the layer before are freed."""
        if self._bench is None or self._bench[0] != group:
            self.clear()
            made: MoEKernel = kernel(shape, self.device)
            if group in self.tuned:
                made.restore(self.tuned[group])
            self._bench = group, MoEBench(shape, self.device, made)
        return self._bench[1]

    def clear(self) -> None:
        """Free the weights."""
        self._bench = None
        if not self.device.is_cpu:
            require_torch().cuda.empty_cache()


def make_plan(
    targets: Sequence[Target],
    device: Device,
    parts: Iterable[str] = PARTS,
    known_linears: Iterable[tuple[int, int]] = (),
) -> list[Task]:
    """List the tasks for some models on a device, in the order to run them. Raises InputError:
    unknown parts.

    ``parts``: some of :data:`PARTS`; ``known_linears``: matrices of an earlier profile: the grid of
    a table is whole, so new matrices are measured against the old ones' sizes, too."""
    chosen = list(parts)
    for part in chosen:
        if part not in PARTS:
            raise InputError("only", repr(part), ", ".join(PARTS))
    if not targets:
        raise InputError("model", "no model given")
    tasks: dict[str, Task] = {}
    makers: dict[str, Callable[[], Iterator[Task]]] = {
        "moe": lambda: _moe_tasks(targets, device, TorchMoE if device.is_cpu else TritonKernel),
        "moe-vllm": lambda: _moe_tasks(targets, device, VllmMoE),
        "attention": lambda: _attention_tasks(targets, device),
        "gemm": lambda: _gemm_tasks(targets, device, known_linears),
        "elementwise": lambda: _elementwise_tasks(targets, device),
        "collectives": lambda: _once("collectives", 1, _collectives),
        "nixl": lambda: _once("nixl", 0, _nixl),
        "host-gap": lambda: _host_gap_tasks(targets),
    }
    for part in PARTS:
        if part in chosen:
            for task in makers[part]():
                tasks.setdefault(task.key, task)
    return sorted(tasks.values(), key=lambda task: task.level)


def _modes(device: Device, main: str = MAIN) -> list[tuple[Mode, str]]:
    """Modes to time in, and the folder of each: the first is what a run uses."""
    first, *others = device.timer.modes
    return [(first, main)] + [(mode, EAGER) for mode in others if main == MAIN]


def _name(shape: dict[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in shape.items())


def _moe_group(part: str, target: Target) -> str:
    return f"{part} {_name(target.moe_identity)} {target.moe.dtype}"


# -- MoE --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MoELayer:
    """A target's MoE layer in one kernel; its methods are what tasks run."""

    group: str
    identity: dict[str, int]
    shape: MoEShape
    kernel: type[Any]

    def tune(self, workbench: Workbench) -> Outcome:
        bench = workbench.bench(self.group, self.shape, self.kernel)
        workbench.tuned[self.group] = bench.kernel.tune(bench)
        return Outcome(note={"tuned": workbench.tuned[self.group]})

    def check(self, workbench: Workbench) -> Outcome:
        """Compare with float64: one token, all experts, and enough tokens for large blocks."""
        bench, shape = workbench.bench(self.group, self.shape, self.kernel), self.shape
        enough = -(-shape.n_experts // shape.top_k)
        points = [
            MoEPoint(1, min(shape.top_k, shape.owned)),
            MoEPoint(enough, min(shape.owned, enough)),
            MoEPoint(32 * enough, shape.owned),
        ]
        return Outcome(note={"error": max(bench.error(point) for point in points)})

    def measure(
        self, point: MoEPoint, modes: list[tuple[Mode, str]], rotate: bool, workbench: Workbench
    ) -> Outcome:
        bench = workbench.bench(self.group, self.shape, self.kernel)
        kernel, dtype = bench.kernel, MOE_DTYPES[self.shape.dtype]
        about = (self.identity, dtype, kernel.kernel_source, kernel.framework)
        row: dict[str, Any] = {"batch": point.batch, "distinct_experts": point.distinct}
        row["routing"] = point.routing
        timed = ((where, bench.time(point, mode, rotate=rotate)) for mode, where in modes)
        return Outcome([Record(where, "moe", *about, row, timing) for where, timing in timed])


def _moe_tasks(targets: Sequence[Target], device: Device, kernel: type[Any]) -> Iterator[Task]:
    part = "moe-vllm" if kernel is VllmMoE else "moe"
    folder = OTHER if kernel is VllmMoE else MAIN
    large = (1024, 2048) if device.is_cpu else (1024, 2048, 4096, 8192, 16384)
    for target in targets:
        shape, group = target.moe, _moe_group(part, target)
        layer = _MoELayer(group, target.moe_identity, shape, kernel)
        if kernel is TritonKernel:
            yield Task(f"{group} tune", part, group, -1, layer.tune)
        yield Task(f"{group} check", part, group, -1, layer.check)
        levels = moe_levels(shape.n_experts, shape.top_k, shape.n_ranks, large)
        for level, points in enumerate(levels):
            for point in points:
                key = f"{group} {point.batch}x{point.distinct} {point.routing}"
                run = partial(layer.measure, point, _modes(device, folder), True)
                yield Task(key, part, group, level, run)
        if folder == MAIN:
            even = {p for points in levels for p in points if p.skew == 0}
            for share, batch in _ROTATION_POINTS:
                point = MoEPoint(batch, max(round(shape.owned * share), shape.top_k))
                if point in even:
                    key = f"{group} {point.batch}x{point.distinct} warm"
                    warm = partial(layer.measure, point, [(device.timer.modes[0], HOT)], False)
                    yield Task(key, part, group, 2, warm)


# -- the other kernels ------------------------------------------------------------------------


def _timed(
    name: str,
    group: str,
    level: int,
    kind: Kind,
    shape: dict[str, int],
    row: dict[str, Any],
    source: str,
    rounds: Callable[[], Sequence[Sequence[Call]]],
) -> Task:
    """Time a kernel in bfloat16 at one row of its table."""

    def run(workbench: Workbench) -> Outcome:
        timer, made = workbench.device.timer, rounds()
        about = (kind, shape, "bfloat16", source, _torch_version(), row)
        modes = _modes(workbench.device)
        return Outcome([Record(where, *about, timer.time(made, mode)) for mode, where in modes])

    return Task(f"{group} {name}", kind.split("_")[0], group, level, run)


def _torch_version() -> str:
    return f"torch {require_torch().__version__.split('+')[0]}"


def _attention_tasks(targets: Sequence[Target], device: Device) -> Iterator[Task]:
    room = 1 << 27 if device.is_cpu else 1 << 33  # bytes of KV of one call
    longest = 4096 if device.is_cpu else 65536
    prompt = 2048 if device.is_cpu else 16384
    contexts = [c for c in (64, 256, 1024, 4096, 16384, 65536) if c <= longest]
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    source = attention.KERNEL_SOURCE
    for target in targets:
        max_position_embeddings = target.model.max_position_embeddings
        for shape in target.attention_shapes:
            group = f"attention {_name(shape)}"
            for batch, context in product(batches, contexts):
                if (
                    attention.kv_bytes(shape, batch, context) > room
                    or context > max_position_embeddings
                ):
                    continue
                level = 0 if batch in (1, 16, 128) and context in (64, 1024, 16384) else 1
                make = partial(attention.decode_rounds, shape, batch, context, device)
                row = {"batch": batch, "context": context}
                name = f"decode {batch}x{context}"
                yield _timed(name, group, level, "attention_decode", shape, row, source, make)
            for batch, tokens in product((1, 4, 16), (16, 64, 256, 1024, 2048, 4096, 8192, 16384)):
                if batch * tokens > prompt or tokens > max_position_embeddings:
                    continue
                level = 0 if batch == 1 and tokens in (16, 256, 2048, 16384) else 1
                make = partial(attention.prefill_rounds, shape, batch, tokens, device)
                row = {"batch": batch, "new_tokens": tokens}
                name = f"prefill {batch}x{tokens}"
                yield _timed(name, group, level, "attention_prefill", shape, row, source, make)
            for tokens, context in product((64, 512), (1024, 2048, 8192, 32768)):
                if shape["window"] or context > min(longest, max_position_embeddings):
                    continue
                make = partial(attention.chunk_rounds, shape, tokens, context, device)
                row = {"new_tokens": tokens, "context": context}
                name = f"chunk {tokens}of{context}"
                yield _timed(name, group, 2, "attention_chunk", shape, row, source, make)


def _gemm_tasks(
    targets: Sequence[Target], device: Device, known: Iterable[tuple[int, int]]
) -> Iterator[Task]:
    linears = set(known) | {pair for target in targets for pair in target.linears}
    columns = sorted({k for _, k in linears})
    if len(columns) == 1:  # a grid needs two sizes to interpolate between
        columns.append(2 * columns[0])
    narrow = sorted({n for n, _ in linears if n <= WIDE})
    pairs = [(n, k) for n in narrow for k in columns]
    pairs += sorted(pair for pair in linears if pair[0] > WIDE)
    tokens = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    tokens += [] if device.is_cpu else [4096, 8192, 16384]
    for (n, k), m in product(pairs, tokens):
        if n <= WIDE or m <= 1024:
            level = 0 if m in (1, 16, 64, 256, 2048) else 1
            make, row = partial(dense.gemm_rounds, m, n, k, device), {"m": m, "n": n, "k": k}
            yield _timed(f"{m}x{n}x{k}", "gemm", level, "gemm", {}, row, "torch_linear", make)


def _elementwise_tasks(targets: Sequence[Target], device: Device) -> Iterator[Task]:
    tokens = [1, 4, 16, 64, 256, 1024] + ([] if device.is_cpu else [4096, 16384])
    for target in targets:
        model = target.shard
        shape = elementwise_shape(model)
        group = f"elementwise {_name(shape)}"
        source = "torch_elementwise" if device.is_cpu else "eldr_sim_triton_elementwise"
        for count in tokens:
            level = 0 if count in (1, 64, 1024) else 1
            make = partial(dense.elementwise_rounds, model, count, device)
            row = {"tokens": count}
            yield _timed(f"{count}", group, level, "elementwise", shape, row, source, make)


def _once(part: str, level: int, run: Callable[[Workbench], Outcome]) -> Iterator[Task]:
    yield Task(part, part, part, level, run)


def _collectives(workbench: Workbench) -> Outcome:
    torch, device = require_torch(), workbench.device
    count = 0 if device.is_cpu else torch.cuda.device_count()
    if count < 2:
        here = "the CPU" if device.is_cpu else "one GPU is here"
        raise InputError("collectives", f"need several GPUs, and this is {here}")
    from eldr_sim.kernel_profiles.profile.links import measure_collectives

    workbench.clear()
    about = ("float16", "NCCL", f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}")
    records = []
    for ranks in [n for n in (2, 4, 8) if n <= count]:
        for (operation, size), timing in measure_collectives("nccl", ranks).items():
            row = {"operation": operation, "n_gpus": ranks, "message_bytes": size}
            records.append(Record(MAIN, "collective", {}, *about, row, timing))
    return Outcome(records)


def _nixl(workbench: Workbench) -> Outcome:
    from eldr_sim.kernel_profiles.profile.links import measure_transfers, nixl_version

    times, first_contact = measure_transfers(workbench.device.torch_device)
    memory = "dram" if workbench.device.is_cpu else "vram"
    about = ("uint8", f"nixl_ucx_{memory}_two_local_agents", f"nixl {nixl_version()}")
    records = []
    for (size, count), timing in times.items():
        row = {"message_bytes": size, "descriptors": count}
        records.append(Record(MAIN, "kv_transfer", {}, *about, row, timing))
    return Outcome(records, {"first_contact_s": first_contact})


def _host_gap_tasks(targets: Sequence[Target]) -> Iterator[Task]:
    for target in targets:
        size = target.parallelism.tensor_parallel_size
        group = f"host-gap {target.model.name} tp{size}"
        yield Task(group, "host-gap", group, 1, partial(_host_gap, target))


def _host_gap(target: Target, workbench: Workbench) -> Outcome:
    if target.parallelism != SINGLE_GPU:
        raise InputError("host-gap", "is measured on one GPU with the whole layer")
    model, shape, device = target.model, target.moe, workbench.device
    kernel: MoEKernel = (TorchMoE if device.is_cpu else TritonKernel)(shape, device)
    name = _moe_group("moe", target)
    if name in workbench.tuned:
        kernel.restore(workbench.tuned[name])
    workbench.clear()
    gaps = measure_host_gap(model, shape, device, kernel)
    depth = {"n_layers": model.n_layers, "hidden_size": model.hidden_size}
    about = (depth, "bfloat16", "eldr_sim_layer_stack", _torch_version())
    records = [
        Record(MAIN, "host_gap", *about, {"batch": n}, gap.timing) for n, gap in gaps.items()
    ]
    return Outcome(records, {str(batch): gap.to_json() for batch, gap in gaps.items()})
