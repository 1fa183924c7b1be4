"""Stages of pipeline parallelism: which part of a model's layers each has, and what it sends.

As vLLM does (``--pipeline-parallel-size``): the layers are cut into equal parts
(``vllm/distributed/utils.py``, ``get_pp_indices``), the first stage has the embedding and the last
one lm_head, and a stage sends the hidden states and the residual of its tokens to the next.
"""

from dataclasses import dataclass
from typing import Any

from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.tables.format import provenance_of


@dataclass(frozen=True)
class PipelinePlan:
    """Stages, and how long hidden states take from one to the next."""

    shares: tuple[float, ...]  #: part of the layers that each stage has; their sum is 1
    #: ``send_s``, ``send_token_s``: seconds of a send whatever it holds, and for each token.
    send_s: float
    send_token_s: float
    provenance: dict[str, dict[str, Any]]  #: of the sends: label and origin


def stage_layers(n_layers: int, n_stages: int) -> list[int]:
    """Return the layers of each stage; what is left over goes to the stages before the last."""
    each, left = divmod(n_layers, n_stages)
    last = n_stages - 1
    return [each + (last - left <= stage < last) for stage in range(n_stages)]


def plan_pipeline(model: ModelDims, gpu: GPU, n_stages: int) -> PipelinePlan:
    """Cut a model into stages on GPUs of one node."""
    layers = stage_layers(model.n_layers, n_stages)
    efficiency = roofline.efficiency_of(gpu)
    bandwidth = efficiency.link_bandwidth * gpu.peer_bandwidth(2)
    return PipelinePlan(
        tuple(count / model.n_layers for count in layers),
        efficiency.collective_floor_s,
        2 * 2 * model.hidden_size / bandwidth,  # hidden states and residual, bfloat16
        {"stage_sends": provenance_of("roofline", efficiency.source)},
    )
