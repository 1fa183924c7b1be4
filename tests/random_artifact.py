"""Routing artifacts of random centroids, as a fit of ELDR's router would make them."""

import numpy as np

from eldr_sim.policies.eldr.artifact import RoutingArtifact
from eldr_sim.policies.eldr.signature import unit_rows


def random_artifact(n_decoders, n_layers, n_experts, seed=0, kept=None):
    """Return an artifact; ``kept`` are the layers of the mask, all where it is None."""
    rng = np.random.default_rng(seed)
    layers = np.arange(n_layers)
    kept = layers if kept is None else np.array(kept)
    return RoutingArtifact(
        idf=rng.random((n_layers, n_experts)) + 0.1,
        layer_order=np.concatenate([kept, np.setdiff1d(layers, kept)]),
        rho=np.where(layers == len(kept) - 1, 0.5, 0.4),  # the mask ends at the peak
        n_kept=len(kept),
        centroids=unit_rows(rng.gamma(0.3, 1.0, (n_decoders, len(kept) * n_experts))),
        cluster_domains=np.ones((n_decoders, 1), np.int64),
        cluster_activation=np.zeros((n_decoders, n_layers, n_experts), np.float32),
        domains=("all",),
        n_pairs=1,
        cost=0.1,
        seed=seed,
        trace_checksum="",
    )
