"""The MoE layers of ELDR's cluster, from its round-robin cells: what ``mi300x.PUBLISHED`` holds.

A cell gives a rate and a median TPOT, so by Little's law the mean batch of a decode worker. Its
step is all but the MoE layers, at derived times, plus on each layer

    floor + blocks * expert(tile) + tokens * token

whose constants are fitted by non-negative least squares of relative errors: an expert's time a
tile of vLLM's default, or for MXFP4 experts, whose tile does not change, one and a token's. The
union of a batch is that of drawn routing; graphs' padding rows choose experts as the batch does."""

from collections.abc import Sequence

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.kernels.tiled_moe import DEFAULT_TILES, TRITON, expert_blocks
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.sources.mi300x import FittedLayer
from eldr_sim.kernel_profiles.steps.cuda_graphs import grown, padded_sizes
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel, build_step_time_model
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.run_routing import routing_of
from eldr_sim.traces.requests.load import Load
from eldr_sim.traces.requests.request_columns import make_requests
from eldr_sim.traces.routing.statistics import mean_products
from studies.eldr_measured.cells import N_DECODE, Cell, cells_of

CONTEXT = {"task": 450.0, "language": 400.0}  #: mean tokens that a decoding sequence attends to
_OUTPUT_TOKENS, _LARGEST, _DRAWS, _REQUESTS = 512, 256, 400, 400


def drawn_union(model: str, load: str) -> Floats:
    """Expected distinct experts of a layer by batch, 0 to 256, under the load's drawn routing."""
    config = make_config({"model": model, "workload": load, "output_len": _OUTPUT_TOKENS})
    trace = routing_of(config.requests.workload, config.routing, load_model(model))
    asked = Load(load, 60.0, num_requests=_REQUESTS, output_len=_OUTPUT_TOKENS)
    requests = make_requests(trace.texts, asked)
    activation = trace.decode_activation(requests.text).astype(np.float64)
    union: Floats = (1.0 - mean_products(1.0 - activation, _LARGEST)).sum(-1).mean(-1)
    return union


def round_robin_cells(model: str) -> list[Cell]:
    """Return the cells that a model's layer is fitted to: both loads, all rates."""
    both = [cell for figure in ("10", "11") for cell in cells_of(figure, "fitted", quick=False)]
    return [cell for cell in both if (cell.model, cell.policy) == (model, "rr")]


def fit_layer(model: str) -> FittedLayer:
    """Fit the MoE layer of one of the three models to its round-robin cells."""
    from scipy.optimize import nnls  # takes long to import

    steps = build_step_time_model(
        model, "MI300X", max_num_seqs=1024, max_model_len=4096, cudagraph_padding="experts"
    )
    cells = round_robin_cells(model)
    mxfp4 = steps.model.expert_dtype == "mxfp4"
    tiles = {1: TRITON["MI300X"].mxfp4_block_m} if mxfp4 else _tiles_seen(cells)
    unions = {load: drawn_union(model, load) for load in {cell.dataset for cell in cells}}
    rng = np.random.default_rng(0)
    rows, left = [], []
    for cell in cells:
        row, other_s = _of_cell(steps, cell, unions[cell.dataset], tiles, rng)
        rows.append(row if mxfp4 else row[:-1])
        left.append(_tpot_s(cell) - other_s)
    measured = np.array([_tpot_s(cell) for cell in cells])
    design, wanted = np.array(rows), np.array(left)
    found, _ = nnls(design / measured[:, None], wanted / measured)
    error = float(np.median(np.abs(design @ found - wanted) / measured))
    experts = tuple(zip(tiles, found[1 : 1 + len(tiles)].tolist(), strict=True))
    return FittedLayer(float(found[0]), experts, float(found[-1]) if mxfp4 else 0.0, error)


def _tpot_s(cell: Cell) -> float:
    return cell.measured["tpot_p50"] / 1e3


def _batch(cell: Cell) -> float:
    return cell.batch(cell.measured["tpot_p50"])


def _tiles_seen(cells: Sequence[Cell]) -> dict[int, int]:
    """First tokens and rows of the default tiles that the cells' padded batches run in."""
    sizes = padded_sizes(1024, 8192)
    largest = max(int(sizes[round(_batch(cell))]) for cell in cells)
    return {first: tile.block_m for first, tile in DEFAULT_TILES.items() if first <= largest}


def _of_cell(
    steps: StepTimeModel, cell: Cell, union: Floats, tiles: dict[int, int], rng: np.random.Generator
) -> tuple[Floats, float]:
    """Mean over batches of what the constants multiply, of all layers, and of all else in s.
    Batches scatter as workers' do that get every 16th of Poisson arrivals."""
    sizes, firsts = padded_sizes(1024, 8192), np.array(list(tiles))
    top_k, layers = steps.model.top_k, steps.n_moe_layers
    row, other_s = np.zeros(2 + len(tiles)), 0.0
    spread = np.sqrt(_batch(cell) / N_DECODE + 1.0)
    drawn = np.clip(np.round(rng.normal(_batch(cell), spread, _DRAWS)), 1, _LARGEST)
    for batch, count in zip(*np.unique(drawn.astype(int), return_counts=True), strict=True):
        distinct = union[batch : batch + 1]
        parts = steps.parts(
            int(batch), batch * CONTEXT[cell.dataset], activated=distinct.tolist() * layers
        )
        other_s += count * (sum(parts) - parts.moe)
        padded = int(sizes[batch])
        tile = int(np.searchsorted(firsts, padded, side="right")) - 1
        chosen = grown(distinct, steps.n_experts, padded / batch)[0]
        row[0] += count
        row[1 + tile] += count * expert_blocks(padded * top_k, chosen, tiles[firsts[tile]])
        row[-1] += count * padded
    return row * layers / _DRAWS, other_s / _DRAWS
