"""The kernels of one GPU's part of a model, from latency tables or else from rooflines."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels import bounds, moe_latency, roofline
from eldr_sim.kernel_profiles.kernels.all_reduce import norm_reduces
from eldr_sim.kernel_profiles.kernels.kernel_latency import (
    DecodeAttention,
    EngineStepLatency,
    GemmLatency,
    PrefillAttention,
)
from eldr_sim.kernel_profiles.kernels.nearest_shape import label, nearest_moe
from eldr_sim.kernel_profiles.kernels.sibling_tables import gpu_table
from eldr_sim.kernel_profiles.kernels.small_kernels import (
    SMALL_KERNELS,
    dense_linears,
    elementwise_bytes,
    float32_gate_s,
    has_float32_gate,
    launched_kernels,
    layer_kernels,
    quantized_inputs,
    residual_bytes,
    small_kernel_s,
    unfused_gate_s,
    unfused_kernels,
)
from eldr_sim.kernel_profiles.kernels.tiled_moe import TRITON, TUNED_FILES, triton_moe, tuned_tiles
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import MoEBackend, Parallelism
from eldr_sim.kernel_profiles.steps.collectives import Collectives
from eldr_sim.kernel_profiles.stored_weights import WeightDtype
from eldr_sim.kernel_profiles.tables import format
from eldr_sim.kernel_profiles.tables.library import Engine

NORMS_S = 8e-6
"""Norms, rotary embedding and the like of one layer under CUDA graphs, small batches, on H100
and H200. Chosen so that the sum of kernels meets the measured TPOT of GPT-OSS-120B on one H200 at
concurrency 4 to 64: five of the rows that ``validate silicon`` is judged by, hence ``derived``."""

FITTED_KERNELS = 4
"""Small kernels of a layer of GPT-OSS-120B, which :data:`NORMS_S` was chosen with: two norms,
rotary embedding, KV cache write. Each that another model has beside them takes what such a kernel
takes in a CUDA graph (``data/small_kernels.json``)."""

HOST_GAP_S = 0.0
"""Engine time per step that no kernel hides, for engines with asynchronous scheduling.

Derived from the same five rows: measured TPOT less the sum of kernels, mean +0.02 ms, spread 0.5
ms. Engines that schedule a step when the last one has ended wait for the host
(``config.engine_rules.HOST_WAIT_MS``)."""

MOE_KERNELS = 7
"""Kernels of a MoE layer in vLLM's Triton path beside the gate's GEMM: top-k, two that sort tokens
by expert, two GEMMs, activation, sum over a token's experts."""
LINEAR_KERNELS = 14
"""Kernels of a layer of linear attention that computes prompts: the split of its projections, the
convolution, gates, two norms and six of the chunked delta rule, states read and written, a gated
norm (SGLang's ``qwen3_next.py`` and ``gdn_backend.py``, flash-linear-attention's ``chunk.py``)."""


def _without_shared(model: ModelDims) -> ModelDims:
    """The same model without shared experts: what follows each other in its MoE layers."""
    return model.model_copy(update={"shared_intermediate_size": 0})


def _attending_to_all(model: ModelDims) -> ModelDims:
    """The same model without sparse attention: its layers that have none."""
    if not model.index_topk:
        return model
    none = ("index_topk", "index_heads", "index_head_dim", "n_sparse_layers", "n_index_layers")
    return model.model_copy(update=dict.fromkeys(none, 0))


class MoELayer(NamedTuple):
    """A MoE layer as it was measured, on a GPU with all experts or on one of several ranks."""

    latency: moe_latency.MoELatency
    tokens_per_row: int  #: tokens of its batch for a rank's ``pairs / top_k``


class Parts:
    """The kernels of one GPU's part of a model: from tables where there are any, else rooflines."""

    def __init__(
        self,
        whole: ModelDims,
        gpu: GPU,
        parallelism: Parallelism,
        tables: Sequence[format.LatencyTable],
        max_model_len: int,
        moe_backend: MoEBackend = "auto",
        engine: Engine = Engine(),  # noqa: B008
        shared_experts_fused: bool = False,
    ) -> None:
        self.engine = engine
        self.model, self.gpu, self.tables = parallelism.shard(whole), gpu, tables
        self.moe_backend = moe_backend
        self.whole, self.parallelism = whole, parallelism
        self.fused = shared_experts_fused and whole.shared_intermediate_size > 0
        self.provenance: dict[str, dict[str, Any]] = {}
        self.warnings: list[str] = []
        self.missing: list[str] = []  #: parts without a table
        self.moe = self._moe()
        self.engine_step = self._engine_step()
        if self.engine_step is None or self.model.attention == "mla" or self.model.index_topk:
            self.gemms = {dtype: self._gemm(dtype) for dtype in self._dtypes()}
        #: Layers of linear attention with their decode and prefill; None where there are none.
        self.states: tuple[int, DecodeAttention, PrefillAttention] | None = None
        #: Layers that read a prompt's cached tokens again, and their attention.
        self.rereads: list[tuple[int, PrefillAttention]] = []
        self.attention = self._attention(max_model_len)
        if self.engine_step is None:
            self.collectives = Collectives(self.model, gpu, parallelism, tables, engine)
            self.warnings += self.collectives.warnings
            self.provenance |= self.collectives.provenance
            for table in self.collectives.tables:
                self._record("collectives", table)
            if not self.collectives.measured:
                self._record_roofline("collectives")
            self.elementwise = self._elementwise()
            shape = {"n_layers": whole.n_layers, "hidden_size": whole.hidden_size}
            self.host_gaps = self._table("host_gap", shape=shape)
            if residual_bytes(self.model):
                source = roofline.efficiency_of(gpu).source
                self.provenance["residual_streams"] = format.provenance_of("roofline", source)

    def _table(
        self, kind: format.Kind, model: ModelDims | None = None, **asked: Any
    ) -> format.LatencyTable | None:
        """Find a table of the GPU, its own or its sibling's, the engine's before others'."""
        return gpu_table(kind, self.gpu, model, engine=self.engine, extra=self.tables, **asked)

    def _record(self, component: str, table: format.LatencyTable, **more: Any) -> None:
        share = bounds.below(table, self.gpu, self.model) if table in self.tables else 0.0
        if share > 0.01:
            self.warnings.append(
                f"{component}: {share:.0%} of the rows of {format.table_name(table.metadata)} are "
                f"faster than {self.gpu.name} can be; its peaks bound them"
            )
        entry = table.source | {"device": table.metadata.device} | more
        known = self.provenance.get(component)
        if known is None or format.weakest([known["label"], entry["label"]]) != known["label"]:
            self.provenance[component] = entry

    def _record_roofline(self, component: str) -> None:
        efficiency = roofline.efficiency_of(self.gpu)
        if component not in self.missing:
            self.missing.append(component)
        self.provenance[component] = format.provenance_of(efficiency.provenance, efficiency.source)

    def _moe(self) -> moe_latency.MoELatency:
        """A rank's MoE layer: from rows of just that, or else from the layer of all experts."""
        model, ranks = self.model, self.parallelism.n_expert_ranks
        if model.is_dense:
            self.layer = MoELayer(moe_latency.NoExperts(), 1)
            return self.layer.latency

        # vLLM takes AITER's kernels where it is told to.
        untuned = self.moe_backend == "auto" and self.gpu.name in TRITON

        def find(size: int) -> format.LatencyTable | None:
            table = self._moe_table(size, self.moe_backend)
            optional = table is not None and "AITER" in table.metadata.kernel_source
            return None if untuned and optional and table not in self.tables else table

        # Rows of a rank time one that gets the tokens of all. Where tokens are dispatched it gets
        # its own only, as a single GPU does.
        sizes = dict.fromkeys([1, ranks] if self.parallelism.data_parallel_size > 1 else [ranks, 1])
        found = ((find(size), size) for size in sizes)
        table, measured_ranks = next(((t, n) for t, n in found if t is not None), (None, 1))
        if table is None:
            whole = self._no_less(self._moe_of_nearest() or self._moe_without_table())
            self.layer = MoELayer(whole, 1)
            return whole.on_rank(ranks)
        fitted = self._no_less(moe_latency.fit_moe_latency(table))
        self.layer = MoELayer(fitted, measured_ranks)
        # A derived table is its own formula: only its maker knows how far that lies from evidence.
        derived = table.metadata.provenance == "derived"
        errors = table.metadata.fit_error if derived else fitted.fit_error
        self._record("moe", table, fit_error=errors)
        if measured_ranks != ranks:
            entry = self.provenance["moe"]
            entry["label"] = format.weakest([entry["label"], "derived"])
            entry["origin"] += (
                f"; all experts on one GPU, read at the count of one of {ranks} ranks"
            )
        return fitted.on_rank(ranks // measured_ranks)

    def _moe_of_nearest(self) -> moe_latency.MoELatency | None:
        """A layer of all experts by the nearest shape that was measured, if any."""
        if self.moe_backend != "auto" or self.gpu.name in TRITON:
            return None
        dtype = format.MOE_DTYPES[self.model.expert_dtype]
        found = nearest_moe(self.gpu.name, format.moe_shape_of(self.model), dtype, self.engine)
        if found is None:
            return None
        layer, table = found
        self.missing.append("moe")
        self.provenance["moe"] = label(table)
        return layer

    def _moe_table(self, ranks: int, backend: MoEBackend) -> format.LatencyTable | None:
        """Find the rows of a backend's kernel for the experts of one of ``ranks``."""
        kernels: list[str] = ["" if backend == "auto" else backend]
        whole, mxfp4 = self.parallelism.n_expert_ranks == 1, self.model.expert_dtype == "mxfp4"
        if backend == "auto" and self.engine.name == "sglang" and mxfp4 and whole:
            # Of GPT-OSS SGLang takes triton_kernels on Hopper, as vLLM, unless experts are
            # spread (server_args.py: moe_runner_backend); its own rows are of fused_moe_triton.
            kernels.insert(0, "oaitriton")
        if backend == "auto" and self._takes_deep_gemm():
            kernels.insert(0, "deepgemm")
        found = (
            self._table(
                "moe",
                self.model,
                shape=format.moe_shape_of(self.model, ranks),
                dtype=format.MOE_DTYPES[self.model.expert_dtype],
                kernel=kernel,
            )
            for kernel in kernels
        )
        return next((table for table in found if table is not None), None)

    def _takes_deep_gemm(self) -> bool:
        """Whether vLLM multiplies experts of FP8 blocks by DeepGEMM on Blackwell, at any batch.

        It did by default until its list of 0.15 had FlashInfer's kernels first (issue 34249), but
        not where eight GPUs share an expert (pull request 29346; ``get_fp8_moe_backend`` of
        ``fp8.py``). Rows of it are TensorRT-LLM's."""
        blocks = self.model.expert_dtype == "fp8_block" and self.gpu.fp4_flops > 0
        width = self.parallelism.tensor_parallel_size // self.parallelism.n_expert_ranks
        return self.engine.name == "vllm" and self.engine.before(0, 15) and blocks and width < 8

    def _no_less(self, layer: moe_latency.MoELatency) -> moe_latency.MoELatency:
        """Bound a MoE layer from below by what the GPU can read and compute."""
        read_s, pair_s = bounds.expert_s(self.gpu, self.model)
        return replace(layer, least_expert_s=read_s, least_pair_s=pair_s)

    def _moe_without_table(self) -> moe_latency.MoELatency:
        """All experts of a layer on one GPU: by the tiles of vLLM's kernel, or from a roofline."""
        model, efficiency = self.model, roofline.efficiency_of(self.gpu)
        bound = roofline.moe_latency(self.gpu, model)
        rates = TRITON.get(self.gpu.name)
        if rates is not None and self.moe_backend in ("auto", "triton"):
            # vLLM looks for a file of the experts that a GPU holds.
            experts = model.n_experts // self.parallelism.n_expert_ranks
            columns, expert_dtype = model.expert_intermediate_size, model.expert_dtype
            tuned = (
                tuned_tiles(self.gpu.name, experts, columns) if expert_dtype == "bfloat16" else {}
            )
            tiled = triton_moe(model, rates, bound.token_s / model.top_k, tuned)
            if tiled is not None:
                kernel = f"Triton, vLLM's {'tuned' if tuned else 'default'} tiles"
                of = f"; tiles of E={experts},N={columns} among {TUNED_FILES}" if tuned else ""
                source = rates.source + of
                self.provenance["moe"] = format.provenance_of(efficiency.provenance, source, kernel)
                return tiled
        backends = {"auto", "aiter"} if rates is not None else {"auto"}
        if self.moe_backend not in backends:
            problem = f"no rows of {self.moe_backend}'s kernel for {model.name} on {self.gpu.name}"
            size = self.parallelism.tensor_parallel_size
            if size > 1 and self.parallelism.n_expert_ranks == 1:
                problem += f", each expert cut over {size} GPUs"
            for backend in get_args(MoEBackend):
                tables = [self._moe_table(n, backend) for n in (1, self.parallelism.n_expert_ranks)]
                if any(table is not None for table in tables):
                    backends.add(backend)
            allowed = ", ".join(sorted(backends))
            allowed += ", or --tables DIR with rows of that kernel: docs/tables.md"
            raise InputError("moe_backend", problem, allowed)
        self._record_roofline("moe")
        return bound

    def launches_s(self, *, compiled: bool = False) -> float:
        """Host time in which a step without graphs launches its kernels; InputError: not known of
        hosts of this GPU. ``compiled``: those that vLLM compiles. Attention of SGLang and
        TensorRT-LLM rotates and caches."""
        model, gpu = self.whole, self.gpu
        rotates_inside = self.engine.name != "vllm"
        if gpu.launch_s is None:
            problem = f"the kernel launch time of the host of {gpu.name} is not known"
            raise InputError("enforce_eager", problem, "not given, or a gap as host_gap_ms")
        small = layer_kernels(model, compiled=compiled) - (2 if rotates_inside else 0)
        # Layers of linear attention neither attend, rotate, cache, nor norm queries and keys.
        spared = 1 + (0 if rotates_inside else 2) + (model.qk_norm != "none")
        kernels = model.n_linear_layers * (LINEAR_KERNELS - spared)
        if model.attention_gate:  # a sigmoid and a product
            kernels += 2 * model.n_full_layers
        if model.shared_expert_gate:  # likewise, after a GEMM
            kernels += 3 * model.n_moe_layers
        kernels += model.n_layers * (small + 1) + model.n_moe_layers * (1 + MOE_KERNELS)
        n_gpus = self.parallelism.tensor_parallel_size
        kernels += dense_linears(model) + launched_kernels(model, gpu, n_gpus, self.engine)
        if self.fused:  # neither GEMMs of shared experts nor what is between
            each = 2 if model.linear_dtype == "fp8_block" else 1
            kernels -= model.n_moe_layers * (1 + each * len(model.shared_linears))
        seconds = kernels * ((compiled and gpu.compiled_launch_s) or gpu.launch_s)
        if model.expert_dtype == "mxfp4":
            seconds += model.n_moe_layers * roofline.efficiency_of(gpu).mxfp4_launch_s
        return seconds

    def _engine_step(self) -> EngineStepLatency | None:
        """All but MoE layers and attention, where an engine was measured as a whole."""
        model = self.whole
        shape = format.engine_step_shape(model.n_layers, model.hidden_size, model.vocab_size)
        table = self._table("engine_step", shape=shape)
        if table is None:
            return None
        fitted = EngineStepLatency.from_table(table)
        self._record("engine_step", table, fit_error=fitted.fit_error)
        return fitted

    def _gemm(self, dtype: str) -> GemmLatency | None:
        table = self._table("gemm", dtype=dtype)
        if table is None:
            self._record_roofline("gemm")
            return None
        self._record("gemm", table)
        return GemmLatency.from_table(table)

    def _elementwise(self) -> format.LatencyTable | None:
        shape = format.elementwise_shape(self.model)
        table = self._table("elementwise", shape=shape)
        efficiency = roofline.efficiency_of(self.gpu)
        if table is not None:
            self._record("norms", table)
        elif efficiency.small_kernel_s is not None:
            said = format.provenance_of(efficiency.provenance, efficiency.source)
            self.provenance["norms"] = said
        else:
            taken = "" if self.gpu.name in ("H100", "H200") else ", taken over"
            origin = (
                f"8 us a layer on H100 and H200 under CUDA graphs (TPOT less kernels){taken}; "
                "large batches from bytes over bandwidth"
            )
            more = self._more_kernels(self.model)
            if more:
                each = small_kernel_s(self.gpu)
                origin += f"; {more} more kernels of {1e6 * each:.2f} us: {SMALL_KERNELS['source']}"
            said = format.provenance_of("derived", origin)
            if self.model.qk_norm != "none" and more:
                # Fused into the rotary kernel; by AISimulate 0.13's own estimate on H100.
                least = 8.0 + 1e6 * (more - 2) * each
                said["band_us_per_layer"] = [least, max(least, 35.0)]
            self.provenance["norms"] = said
        return table

    def _more_kernels(self, model: ModelDims) -> int:
        """Small kernels of a layer beside those that `NORMS_S` stands for; those of MLA and MSA
        are in the tables of their modules.
        Queries and keys have a norm each (vllm-project/vllm pull requests 38621 and 49744 time and
        count the chain)."""
        if model.attention == "mla" or (model.index_topk and "attention" not in self.missing):
            return 0
        quantized = 0
        if model.linear_dtype == "fp8_block":
            gemm = self._table("gemm", dtype="fp8_block")
            if gemm is None or "trtllm" not in gemm.metadata.framework:
                quantized = quantized_inputs(model)  # TensorRT-LLM's rows have them
        kernels = self._layer_kernels(model) + (model.qk_norm != "none")
        if model.qk_norm == "full_width" and self.parallelism.tensor_parallel_size > 1:
            kernels += 2 * (norm_reduces(self.engine) - 1)
        return quantized + max(kernels - FITTED_KERNELS, 0)

    def _layer_kernels(self, model: ModelDims) -> int:
        return layer_kernels(model, compiled=self.engine.name == "vllm")

    def host_gap(self, given: float | None) -> tuple[float, dict[str, dict[str, Any]]]:
        """Engine time per step, s (given, a profile's median, the default), and its provenance."""
        if self.engine_step is not None:
            if given is not None:
                problem = "an engine_step table contains the host gap"
                raise InputError("host_gap_s", problem, "none given")
            return 0.0, {}
        table = self.host_gaps
        if given is None and table is not None:
            gap_s = float(np.median(table.columns["latency_s"]))
            return gap_s, {"host_gap": table.source | {"device": table.metadata.device}}
        if given is not None:
            return float(given), {"host_gap": format.provenance_of("measured", "given")}
        origin = "GPT-OSS-120B on H200 (TPOT less kernels)"
        return HOST_GAP_S, {"host_gap": format.provenance_of("derived", origin)}

    def collectives_s(self, rows: Floats) -> Floats:
        """What the GPUs of a worker exchange in a step of ``rows`` tokens."""
        if self.engine_step is not None:
            return np.zeros_like(rows)
        return self.collectives.step_s(rows)

    def _attention(self, max_tokens: int) -> list[tuple[int, DecodeAttention, PrefillAttention]]:
        """Layers, decode and prefill attention of every kind of layer."""
        model, attention = self.model, []
        for sliding, layers, shape in format.attention_shapes(model):
            chooses = model.attention == "mla" or "index_topk" in shape
            kind = model if chooses else _attending_to_all(model)
            dtype = model.linear_dtype if format.has_projections(shape) else None
            decode, prefill = self._measured("attention", shape, max_tokens, dtype) or (
                roofline.decode_attention(self.gpu, kind, sliding),
                roofline.prefill_attention(self.gpu, kind, sliding, max_tokens),
            )
            least = bounds.attention(self.gpu, kind, sliding)
            tokens = np.arange(max_tokens + 1.0)
            pairs_s = least.pair_s * bounds.causal_pairs(tokens, least.limit)
            pairs_s += least.index_pair_s * bounds.causal_pairs(tokens)
            decode = replace(decode, least=least)
            prefill = prefill.no_less(pairs_s, least.index_s or least.token_s)
            attention.append((layers, decode, prefill))
            if not sliding:
                self.rereads.append((layers, prefill))
        if model.n_linear_layers:
            shape = format.linear_attention_shape(model)
            both = self._measured("linear_attention", shape, max_tokens)
            decode, prefill = both or roofline.linear_attention(self.gpu, model, max_tokens)
            least_s, token_s = bounds.linear_attention(self.gpu, model)
            raised = np.maximum(decode.seconds, least_s * decode.batch[:, None])
            decode = replace(decode, seconds=raised)
            prefill = prefill.no_less(token_s * np.arange(max_tokens + 1.0), 0.0)
            self.states = model.n_linear_layers, decode, prefill
        return attention

    def _measured(
        self, part: str, shape: dict[str, int], max_tokens: int, dtype: str | None = None
    ) -> tuple[DecodeAttention, PrefillAttention] | None:
        """Decode and prefill of a kind of layer by its tables; None without one of them."""
        decode, prefill = self._attention_tables(shape, dtype)
        if decode is None or prefill is None:
            self._record_roofline(part)
            return None
        self._record(part, decode)
        self._record(part, prefill)
        if format.has_projections(shape):
            decode, prefill = self._without_linears(decode), self._without_linears(prefill)
        fitted = DecodeAttention.from_table(decode)
        return fitted, PrefillAttention.from_table(prefill, max_tokens, fitted.token_s)

    def _attention_tables(
        self, shape: dict[str, int], dtype: str | None
    ) -> list[format.LatencyTable | None]:
        """Decode and prefill attention of a shape; without rows of an FP8 cache, of bfloat16's."""

        def one(kind: format.Kind, of: dict[str, int]) -> format.LatencyTable | None:
            table = self._table(kind, self.model, shape=of, dtype=dtype)
            if table is not None or not format.has_projections(of):
                return table
            # A module with other projections: the attention in it is the same.
            other = self._table(kind, self.model, shape=of)
            if other is None:
                return None
            of_others = f"{other.metadata.origin}, with {other.metadata.dtype} projections"
            return other.saying(provenance="derived", origin=of_others)

        def find(of: dict[str, int]) -> list[format.LatencyTable | None]:
            return [one(kind, of) for kind in format.ATTENTION]

        if self.model.kv_cache_dtype == "bfloat16":
            return find(shape)
        found = find(shape | {"kv_bits": 8})
        if None in found and None not in (found := find(shape)):
            self.warnings.append(
                f"attention: no table of an FP8 KV cache on {self.gpu.name}, times are bfloat16's"
            )
        return found

    def _without_linears(self, table: format.LatencyTable) -> format.LatencyTable:
        """Rows of a whole module (MLA, MSA) less its projections, shared by a step's tokens: alone,
        decodes or prompts take what was measured, a tenth of it at least attention."""
        columns = table.columns
        tokens = columns["batch"].astype(np.float64)
        if table.metadata.kind == "attention_prefill":
            tokens = tokens * columns["new_tokens"]
        linears = np.zeros_like(tokens)
        dtype: Any = table.metadata.dtype
        if dtype not in self.gemms:
            gemm = self._table("gemm", dtype=dtype)
            self.gemms[dtype] = None if gemm is None else GemmLatency.from_table(gemm)
        for n, k in [*self.model.attention_linears(), *self.model.index_linears]:
            linears += self._matrix_s(n, k, tokens, dtype)
        left = np.maximum(columns["latency_s"] - linears, 0.1 * columns["latency_s"])
        return format.LatencyTable(table.metadata, dict(columns) | {"latency_s": left})

    def linear_s(self, n: int, k: int, rows: Floats) -> Floats:
        """One matrix stored like the model's attention."""
        return self._matrix_s(n, k, rows, self.model.linear_dtype)

    def _matrix_s(self, n: int, k: int, rows: Floats, dtype: WeightDtype = "bfloat16") -> Floats:
        table = self.gemms[dtype]
        if table is None:
            return roofline.gemm_s(self.gpu, n, k, rows, dtype)
        return np.maximum(table.time_s(n, k, rows), bounds.linear_s(self.gpu, n, k, rows, dtype))

    def _dtypes(self) -> list[WeightDtype]:
        """How the model's matrices are stored, bfloat16 first."""
        stored = [self.model.dtype_of(part) for part, _, _ in self.model.matrices]
        return list(dict.fromkeys(("bfloat16", *stored, self.model.head_dtype)))

    def dense_part_s(self, rows: Floats) -> Floats:
        """What a step of ``rows`` tokens computes but for routed experts, attention and lm_head."""
        if self.engine_step is not None:
            least = sum(
                layers * bounds.linear_s(self.gpu, n, k, rows, self.model.dtype_of(part))
                for part, layers, linears in self.model.matrices
                for n, k in linears
            )
            return np.maximum(self.engine_step.token_part_s(rows), least)
        if not self.fused:
            return self._dense_s(self.model, rows)
        return self._dense_s(_without_shared(self.model), rows) + self._fused_s(rows)

    def _fused_s(self, rows: Floats) -> Floats:
        """Shared experts inside the kernel of the routed ones: what a GEMM of one row takes beyond
        reading its weights is gone, and so are activations and the quantization of inputs; bytes
        and FLOPs are not."""
        model = self.model
        origin = "in the kernel of the routed ones: GEMMs less what one row takes beyond its bytes"
        self.provenance["shared_experts"] = format.provenance_of("derived", origin)
        total, one, dtype = np.zeros_like(rows), np.ones(1), model.dtype_of("mlp")
        for n, k in model.shared_linears:
            least = bounds.linear_s(self.gpu, n, k, rows, dtype)
            hidden = self._matrix_s(n, k, one, dtype) - bounds.linear_s(self.gpu, n, k, one, dtype)
            total += np.maximum(self._matrix_s(n, k, rows, dtype) - hidden, least)
        return model.n_moe_layers * total

    def _dense_s(self, model: ModelDims, rows: Floats) -> Floats:
        """What follows the routed experts, of the model or of that without shared ones."""
        total = np.zeros_like(rows)
        for part, layers, linears in model.matrices:
            for n, k in linears:
                total += layers * self._matrix_s(n, k, rows, model.dtype_of(part))
        return total + model.n_moe_layers * self._gate_s(rows) + self._elementwise_s(model, rows)

    def _gate_s(self, rows: Floats) -> Floats:
        """The gate of a MoE layer; of float32 no less than what engines take for it."""
        seconds = self._matrix_s(self.model.n_experts, self.model.hidden_size, rows)
        if not has_float32_gate(self.model, self.engine):
            return seconds
        slow, self.provenance["gate"] = float32_gate_s(
            self.gpu, self.model.hidden_size, rows, self.engine
        )
        return np.where(rows > 0, np.maximum(slow, seconds), 0.0)

    def _elementwise_s(self, model: ModelDims, rows: Floats) -> Floats:
        """Norms, rotary embedding, KV cache writes of all layers, and the embedding lookup.

        Small batches take :data:`NORMS_S` a layer, and the kernels that GPT-OSS has not; large ones
        move 2-byte elements: two fused residual norms 8 hidden, rotary embedding queries and keys,
        the cache keys and values. A profile's table replaces both."""
        bandwidth = roofline.efficiency_of(self.gpu).bandwidth * self.gpu.memory_bandwidth
        if self.elementwise is not None:
            columns = self.elementwise.columns
            order = np.argsort(columns["tokens"])
            seconds = moe_latency.monotone_fit(columns["latency_s"][order])
            knots = columns["tokens"][order].astype(np.float64)
            layers = model.n_layers * np.where(
                rows > 0, moe_latency.interpolate(rows, knots, seconds), 0.0
            )
        else:
            moved_s = elementwise_bytes(model) * rows / bandwidth
            gate_s = unfused_gate_s(self.model, self.gpu, self.engine, fused=self.fused)
            kernel_s = roofline.efficiency_of(self.gpu).small_kernel_s
            least_s = (
                NORMS_S + self._more_kernels(model) * small_kernel_s(self.gpu) + gate_s
                if kernel_s is None
                else kernel_s
                * (self._layer_kernels(model) + unfused_kernels(model) / model.n_layers)
            )
            layers = model.n_layers * np.maximum(least_s, moved_s)
        moved = 4 * model.hidden_size + residual_bytes(model)
        return np.asarray(layers + moved * rows / bandwidth, dtype=np.float64)

    def sequence_part_s(self, rows: Floats) -> Floats:
        """What ``rows`` sequences that sample add: lm_head, and GPUs' gather of its logits."""
        if self.engine_step is not None:
            return self.engine_step.sequence_part_s(rows)
        head = self.model.vocab_size, self.model.hidden_size
        seconds = self._matrix_s(*head, rows, self.model.head_dtype)
        if self.parallelism.tensor_parallel_size > 1:
            seconds = seconds + self.collectives.gather_s(2 * self.whole.vocab_size * rows)
        return np.where(rows > 0, seconds, 0.0)
