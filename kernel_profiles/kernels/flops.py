"""FLOPs of prefill, and the share of a GPU's peak that they are (MFU).

A prompt's tokens pay for the matrices that they pass, two FLOPs a weight, and for the pairs of a
query and a key under the causal mask. With A active parameters, L layers of H heads of width d,
``s`` new and ``p`` cached tokens (MoE-Prefill, arXiv 2605.02960, Sec. 7.3)::

    F_lin(s) = 2 A s        F_self(s) = 2 L H d s^2        F_cross(s, p) = 4 L H d s p

The paper's ``s^2 / 2`` pairs are ``s (s + 1) / 2`` here, the pairs that the mask leaves: chunks of
a prompt then add up to the whole prompt. Layers with a sliding window stop at it, and MLA counts
its expanded heads (`kernel_profiles.kernels.intensity.pair_flops`). These are the model's
FLOPs: what a kernel computes twice, such as the keys and values that MLA expands again for each
chunk, is not work.

Of the parameters the embedding, which is looked up, and lm_head, which sees the last token of a
prompt alone, are left out. Qwen3-235B-A22B has A = 20.9e9 then, the paper's constant.
"""

from typing import NamedTuple

from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels.intensity import index_flops, pair_flops, state_flops
from eldr_sim.kernel_profiles.models import ModelDims


class PrefillWork(NamedTuple):
    """What a model's prompts cost, and the work a worker needs at once to hide its transfers."""

    #: Of a token, attention's pairs left out: the one constant a token of the paper's App. B.
    token_flops: float
    #: ``pair_flops``, ``sliding_pair_flops``: of a query and a key, over all layers that attend to
    #: everything, and over those with a window.
    pair_flops: float
    sliding_pair_flops: float = 0.0
    window: int = 0  #: tokens of that window; 0 where no layer has one
    #: ``saturation_eq1``, ``saturation_eq3``: FLOPs at which a worker is saturated, by the paper's
    #: Eq. 1 and Eq. 3, margins left out (:mod:`~eldr_sim.kernel_profiles.steps.weight_streaming`);
    #: 0 where no weights are streamed.
    saturation_eq1: float = 0.0
    saturation_eq3: float = 0.0

    def flops(self, new: int, cached: int = 0) -> float:
        """Return the FLOPs of ``new`` tokens after ``cached`` ones."""
        end = cached + new
        pairs = new * cached + new * (new + 1) // 2
        total = self.token_flops * new + self.pair_flops * pairs
        if self.window:
            total += self.sliding_pair_flops * (
                pairs - _beyond(end, self.window) + _beyond(cached, self.window)
            )
        return total


def _beyond(tokens: int, window: int) -> int:
    """Pairs of a prompt that lie farther apart than the window."""
    past = max(tokens - window, 0)
    return past * (past + 1) // 2


def prefill_work(model: ModelDims) -> PrefillWork:
    """Return what a model's prompts cost; it streams no weights.

    Sparse attention scores every pair and attends to a window's worth of each token's.
    """
    full = model.n_full_layers * pair_flops(model, decode=False)
    sliding = model.n_sliding_layers * pair_flops(model, sliding=True, decode=False)
    if model.index_topk:
        full, sliding = model.n_full_layers * index_flops(model), full
    return PrefillWork(
        2.0 * (model.active_params - model.embedding_params - model.lm_head_params)
        + model.n_linear_layers * state_flops(model),
        full,
        sliding,
        model.sliding_window or model.index_topk,
    )


def prefill_flops(model: ModelDims, new: int, cached: int = 0) -> float:
    """Return the FLOPs of ``new`` tokens of a prompt after ``cached`` ones.

    The cached tokens' own FLOPs are not among them: they were computed before.
    """
    return prefill_work(model).flops(new, cached)


def peak_flops(model: ModelDims, gpu: GPU) -> float:
    """Return the peak of one GPU for a model's experts, FLOP/s: FP8 where they are FP8, else BF16.

    Of a dense model for its matrices. Narrower weights (MXFP4, INT4) are computed in bfloat16.
    """
    dtype = model.linear_dtype if model.is_dense else model.expert_dtype
    return gpu.peak_flops(fp8=dtype in ("fp8", "fp8_block"))


def mfu(flops: float, seconds: float, peak_flops: float) -> float:
    """Return the share of ``peak_flops`` FLOPs a second that ``flops`` in ``seconds`` are.

    Model FLOPs utilisation (PaLM, arXiv 2204.02311, App. B). Several GPUs have the sum of their
    peaks. A value above 1 is no error here: what computed faster than the peak was not measured.
    """
    return flops / (seconds * peak_flops)
