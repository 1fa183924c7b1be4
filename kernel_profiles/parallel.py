"""How a model is spread over GPUs: tensor, expert, data and pipeline parallelism.

As vLLM does (``--tensor-parallel-size``, ``--enable-expert-parallel``, ``--data-parallel-size``):

- Attention heads, the QKV and output projections, dense and shared MLPs, embedding and lm_head are
  sharded over all GPUs. KV heads are sharded while there are enough of them and replicated beyond
  (``vllm/model_executor/models/qwen3_moe.py``). The MoE gate, norms, and MLA's compressed cache
  with its projections stay whole on every GPU.
- Without expert parallelism every expert is sharded over its intermediate width.
- With it every GPU holds whole experts, equally many. All GPUs see all tokens, each computes its
  own experts' part, and an all-reduce sums the parts: there is no all-to-all
  (``FusedMoEParallelConfig.use_all2all_kernels`` needs data parallelism or sequence parallelism).
- An engine of several nodes reduces inside each and then between them, GPUs of the same place.
- With pipeline parallelism (``--pipeline-parallel-size``) the layers are cut into stages of that
  many times the GPUs (:mod:`~eldr_sim.kernel_profiles.steps.step_time`).
- With data parallelism as many engines, of ``tensor_parallel_size`` GPUs each, have separate
  attention, dense layers and KV caches and share the experts, which lie on the GPUs of all of
  them: ``FusedMoEParallelConfig.make`` spreads (or cuts) them over data times tensor parallel
  ranks. Tokens are dispatched to them and combined back
  (`kernel_profiles.kernels.all_to_all`); each rank with a part of every expert gets all. The ranks
  of an engine dispatch a part of its tokens each and gather the outputs (sequence parallel MoE,
  ``use_sequence_parallel_moe``).
- With attention-FFN disaggregation (``ffn_ranks``) the routed experts lie on separate GPUs, not on
  those of the engines, which have all else: gates, shared experts and dense layers, too."""

from dataclasses import dataclass
from typing import Literal

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.stored_weights import FP8_BLOCK

#: How tokens reach experts on other GPUs, vLLM's ``--all2all-backend``; see `all_to_all`.
Backend = Literal[
    "allgather_reducescatter",
    "nccl_alltoall",
    "allgather_alltoall",
    "pplx",
    "deepep_ll",
    "deepep_ht",
]

#: What the padding rows of CUDA graphs compute; see `cuda_graphs`.
Padding = Literal["none", "dense", "experts"]

#: Whose kernel computes the experts (vLLM's ``--moe-backend``).
MoEBackend = Literal["auto", "triton", "aiter", "marlin", "flashinfer_cutlass", "flashinfer_trtllm"]

#: GPUs of a node. An engine has a part of one, or whole ones.
NODE_GPUS = 8


@dataclass(frozen=True)
class Parallelism:
    """GPUs of one engine, engines that share experts, and what becomes of the experts."""

    tensor_parallel_size: int = 1  #: GPUs of an engine
    #: Whether the experts stay whole and are spread over the GPUs. Says nothing on one GPU.
    expert_parallel: bool = False
    data_parallel_size: int = 1  #: engines that share experts
    #: Stages of an engine, each of ``tensor_parallel_size`` GPUs and a part of the layers.
    pipeline_parallel_size: int = 1
    ffn_ranks: int = 0  #: GPUs beside the engines' that hold all routed experts; 0: these do

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        if size < 1 or (size > NODE_GPUS and size % NODE_GPUS):
            allowed = f"1 to {NODE_GPUS}, the GPUs of a node, or whole nodes"
            raise InputError("tensor_parallel_size", f"{size}", allowed)
        if self.data_parallel_size < 1:
            raise InputError("data_parallel_size", f"{self.data_parallel_size}", "1 or more")
        most = max(NODE_GPUS // size, 1)
        if not 1 <= self.pipeline_parallel_size <= most:
            problem = f"{self.pipeline_parallel_size} stages of {size} GPUs"
            allowed = f"1 to {most}: a node has {NODE_GPUS} GPUs"
            raise InputError("pipeline_parallel_size", problem, allowed)
        if self.pipeline_parallel_size > 1 and self.data_parallel_size > 1:
            problem = "stages of engines that share experts are not simulated"
            raise InputError("pipeline_parallel_size", problem, "--data-parallel-size 1")

    @property
    def n_gpus(self) -> int:
        """GPUs of all engines that share experts."""
        return self.n_ranks * self.pipeline_parallel_size + self.ffn_ranks

    @property
    def engine_gpus(self) -> int:
        """GPUs of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def n_ranks(self) -> int:
        """GPUs of a stage: those that a layer is spread over."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def n_expert_ranks(self) -> int:
        """GPUs that the experts are spread over; 1 where each of them holds a part of every one."""
        return self.ffn_ranks or (self.n_ranks if self.expert_parallel else 1)

    @property
    def first_expert_rank(self) -> int:
        """The number of the first of them, in the numbering of all GPUs that exchange tokens."""
        return self.n_ranks if self.ffn_ranks else 0

    def check(self, model: ModelDims, copies: bool = False) -> None:
        """Raise InputError unless the model can be spread so. ``copies``: some experts have
        several; `ExpertGroup` then knows if ranks hold equally many."""
        size, ranks = self.tensor_parallel_size, self.n_ranks
        if self.pipeline_parallel_size > model.n_layers:
            problem = f"{self.pipeline_parallel_size} stages of the {model.n_layers} layers"
            raise InputError("pipeline_parallel_size", problem, "at least one layer per stage")
        if ranks == 1:
            return
        if model.is_dense:
            for name, given in (
                ("enable_expert_parallel", self.expert_parallel),
                ("data_parallel_size", self.data_parallel_size > 1),
            ):
                if given:
                    problem = f"{model.name} is dense: there are no experts to share"
                    raise InputError(name, problem, "tensor parallelism, or more workers")

        def divide(what: str, count: int, unit: int = 1, by: int = size, name: str = "") -> None:
            if count % (by * unit):
                blocks = f" in FP8 blocks of {unit}" if unit > 1 else ""
                raise InputError(
                    name or ("tensor_parallel_size" if by == size else "data_parallel_size"),
                    f"{by} does not divide the {count} {what} of {model.name}{blocks}",
                    "a size that does",
                )

        divide("attention heads", model.n_heads)
        if model.attention == "gqa":
            for heads in {model.n_kv_heads, model.global_n_kv_heads or model.n_kv_heads}:
                if size % heads:  # else each GPU holds a copy of one KV head
                    divide("KV heads", heads)
        states = {model.linear_key_heads, model.linear_value_heads}
        if model.linear_kind == "mamba2":  # GPUs beyond its groups hold copies, as of KV heads
            states = {model.linear_value_heads}
            if model.linear_key_heads % size and size % model.linear_key_heads:
                divide("groups of Mamba-2", model.linear_key_heads)
        for heads in filter(None, states):
            divide("heads of linear attention", heads)
        divide("query heads of sliding layers", model.sliding_n_heads)
        linear = FP8_BLOCK if model.dtype_of("mlp") == "fp8_block" else 1
        divide("features of a dense layer's MLP", model.dense_intermediate_size, linear)
        divide("features of the shared experts", model.shared_intermediate_size, linear)
        if self.expert_parallel:
            of_ffn = "ffn_ranks" if self.ffn_ranks else ""
            if not copies:
                divide("experts", model.n_experts, by=self.n_expert_ranks, name=of_ffn)
        else:
            expert = FP8_BLOCK if model.expert_dtype == "fp8_block" else 1
            divide("features of an expert", model.expert_intermediate_size, expert, by=ranks)

    def shard(self, model: ModelDims) -> ModelDims:
        """Return the dimensions that one GPU computes with; InputError if it cannot be spread
        so."""
        self.check(model, copies=True)
        size = self.tensor_parallel_size
        if self.n_ranks == 1:
            return model
        fields = model.model_dump()
        for name in ("n_heads", "sliding_n_heads", "dense_intermediate_size",
                     "shared_intermediate_size", "linear_value_heads"):  # fmt: skip
            fields[name] //= size
        for name in ("n_kv_heads", "global_n_kv_heads", "linear_key_heads"):
            if fields[name]:
                fields[name] = max(1, fields[name] // size)
        fields["vocab_size"] = -(-model.vocab_size // size)
        if not self.expert_parallel:
            fields["expert_intermediate_size"] //= self.n_ranks
        return ModelDims(**fields)

    def weight_bytes(self, model: ModelDims, instances: int | None = None) -> int:
        """Bytes of the weights on one GPU, of several stages on the fullest. ``instances``: experts
        of all MoE layers on it, if not an equal share of each layer's."""
        shard = self.shard(model)
        share = model.n_moe_layers * (model.n_experts // self.n_expert_ranks)
        if self.ffn_ranks:
            share = 0
        own = share if instances is None else instances
        elsewhere = model.n_moe_layers * model.n_experts - own
        total = shard.weight_bytes - elsewhere * shard.bytes_per_expert
        ends = 2 * shard.embedding_params, 2 * shard.lm_head_params
        return self.of_stage(model, total - sum(ends)) + (
            sum(ends) if self.pipeline_parallel_size == 1 else max(ends)
        )

    def kv_bytes_per_token(self, model: ModelDims) -> int:
        """Bytes of KV cache of one token on one GPU, over all its layers."""
        return self.of_stage(model, self.shard(model).kv_bytes_per_token)

    def of_stage(self, model: ModelDims, total: int) -> int:
        """Return what of a sum over all layers the fullest stage has."""
        layers = -(-model.n_layers // self.pipeline_parallel_size)
        return -(-total * layers // model.n_layers)


SINGLE_GPU = Parallelism()  #: a worker of one GPU
