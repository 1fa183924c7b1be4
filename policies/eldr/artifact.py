"""ELDR's offline fit: the routing artifact that a router loads at start (Sec. 4.1 and 5)."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from eldr_sim import cache
from eldr_sim.arrays import Array, Bools, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.inputs import check_arrays
from eldr_sim.outputs import whole_file
from eldr_sim.policies.eldr.clustering import kmeans
from eldr_sim.policies.eldr.signature import (
    METHODS,
    TRANSFORMS,
    DecodeOverlap,
    FitOptions,
    LayerMask,
    LayerSelection,
    Method,
    Transform,
    decode_overlap,
    idf_weights,
    parse_layer_mask,
    score_of,
    select_layers,
    signatures,
    transformed,
)
from eldr_sim.traces.routing.calibration import CalibrationSet
from eldr_sim.traces.routing.format import RoutingTrace

FORMAT_VERSION = 2
"""Version of the file format, raised whenever an older reader would misread a newer file."""

_BEFORE = {"seedings": 8, "rounds": 100, "mask_pairs": 20_000}
"""What files that do not say it were made with."""

_ARRAYS: dict[str, Any] = {
    "idf": np.float64, "layer_order": np.int64, "rho": np.float64, "centroids": np.float64,
    "cluster_domains": np.int64, "cluster_activation": np.float32,
}  # fmt: skip
_KINDS: dict[str, Any] = {
    "n_kept": int, "n_pairs": int, "cost": float, "seed": int, "trace_checksum": str,
}  # fmt: skip
_FACTS = (
    "n_kept", "domains", "n_pairs", "cost", "seed", "trace_checksum", "transform", "mask_rule",
    "clustering", *_BEFORE,
)  # fmt: skip

MaskRule = Literal["greedy", "all", "given"]
"""How the kept layers were chosen: by ELDR's greedy selection, all of them, or by hand."""


@dataclass(frozen=True, eq=False)
class RoutingArtifact:
    """Layer mask, IDF weights and one centroid a decode worker, with what they were fit from."""

    #: Shape [L, E]: inverse document frequency of every expert; only ``count-idf`` reads it.
    idf: Floats
    #: Shape [L]: layers as selected greedily; under other masks ascending, the kept ones first.
    layer_order: Ints
    #: Shape [L]: quality (Eq. 1) with the first ``i + 1`` layers of ``layer_order``.
    rho: Floats
    n_kept: int  #: number of layers kept; N* under the greedy rule
    #: Shape [K, n_kept * E]: unit centroids of decode workers, over the kept layers, ascending.
    centroids: Floats
    #: Shape [K, n_domains]: calibration requests by cluster and domain, for reading only.
    cluster_domains: Ints
    #: Shape [K, L, E]: expected decode activation, the mean over a cluster's calibration requests
    #: (all, if it is empty) of the share of steps that chose an expert; what placement balances
    #: (Sec. 5).
    cluster_activation: NDArray[np.float32]
    domains: tuple[str, ...]  #: names of the domains
    n_pairs: int  #: pairs of calibration requests that rho was measured on
    cost: float  #: mean cosine distance between calibration signatures and their centroids
    seed: int  #: seed of the fit
    trace_checksum: str  #: checksum of the routing trace that the calibration requests came from
    #: What a signature holds of each expert; see `policies.eldr.signature.Transform`.
    transform: Transform = "count-idf"
    mask_rule: MaskRule = "greedy"  #: how the kept layers were chosen
    clustering: Method = "balanced"  #: how the calibration signatures were clustered
    #: See :class:`~eldr_sim.policies.eldr.signature.FitOptions`.
    seedings: int = FitOptions().seedings
    rounds: int = FitOptions().rounds
    mask_pairs: int = FitOptions().mask_pairs

    @property
    def n_decoders(self) -> int:
        """K, the number of centroids."""
        return len(self.centroids)

    @cached_property
    def layers(self) -> Ints:
        """The kept layers in ascending order, as the centroids stack them."""
        return np.sort(self.layer_order[: self.n_kept])

    @property
    def layer_mask(self) -> Bools:
        """Shape [L]: whether a layer is kept."""
        mask = np.zeros(len(self.layer_order), dtype=bool)
        mask[self.layers] = True
        return mask

    @property
    def mask_option(self) -> LayerMask:
        """The option of :func:`fit` that the mask came from."""
        if self.mask_rule == "given":
            return tuple(self.layers.tolist())
        return self.mask_rule

    @property
    def cluster_sizes(self) -> Ints:
        """Shape [K]: calibration requests in each cluster."""
        return np.asarray(self.cluster_domains.sum(axis=1))

    @property
    def n_calibration(self) -> int:
        """Calibration requests that the fit used."""
        return int(self.cluster_domains.sum())

    def signatures(self, scores: Array) -> Floats:
        """Return the signatures (Eq. 2) of prefill counts, or gate scores, [n, L, E]."""
        if scores.shape[1:] != self.idf.shape:
            seen = "x".join(map(str, scores.shape[1:]))
            layers, experts = self.idf.shape
            allowed = f"{layers} layers x {experts} experts"
            raise InputError("signature", f"counts of {seen}", allowed)
        return signatures(scores, self.idf, self.layers, self.transform)

    @property
    def options(self) -> FitOptions:
        """The options of :func:`fit` that it was made with."""
        return FitOptions(
            self.transform,
            self.mask_option,
            self.clustering,
            self.seedings,
            self.rounds,
            self.mask_pairs,
        )

    def check_made_with(
        self,
        transform: Transform | None = None,
        layer_mask: LayerMask | None = None,
        clustering: Method | None = None,
        **numbers: int | None,
    ) -> None:
        """Raise InputError if the artifact was made with other options than those given."""
        if transform not in (None, self.transform):
            raise InputError("signature", f"{transform}, but the artifact holds {self.transform}")
        if layer_mask not in (None, self.mask_option):
            masks = (layer_mask, self.mask_option)
            mine, other = (str(list(m)) if isinstance(m, tuple) else m for m in masks)
            raise InputError("layer_mask", f"{mine}, but the artifact holds {other}")
        if clustering not in (None, self.clustering):
            raise InputError("clustering", f"{clustering}, but the artifact is {self.clustering}")
        for name, number in numbers.items():
            if number not in (None, held := getattr(self, name)):
                raise InputError(name, f"{number}, but the artifact was made with {held}")

    def summary(self) -> dict[str, Any]:
        """Return the fit in plain numbers, for reports and results."""
        return {
            "signature": self.transform,
            "layer_mask": self.mask_rule,
            "clustering": self.clustering,
            "n_decoders": self.n_decoders,
            "n_calibration": self.n_calibration,
            "n_layers": len(self.layer_order),
            "n_layers_kept": self.n_kept,
            "layers_kept": self.layers.tolist(),
            "rho": float(self.rho[self.n_kept - 1]),
            "rho_all_layers": float(self.rho[-1]),
            "rho_pairs": self.n_pairs,
            "mean_cosine_distance": self.cost,
            "cluster_sizes": self.cluster_sizes.tolist(),
            "seed": self.seed,
            "trace_checksum": self.trace_checksum,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact to one ``.npz`` file, centroids as float32, which holds them
        exactly."""
        with whole_file(Path(path), "artifact") as temporary, temporary.open("wb") as file:
            self.write(file)

    def write(self, file: BinaryIO) -> None:
        """Write the artifact into an open file; see `save`."""
        facts = {"format_version": FORMAT_VERSION} | {name: getattr(self, name) for name in _FACTS}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        arrays["centroids"] = self.centroids.astype(np.float32)
        np.savez(file, facts=np.array(json.dumps(facts)), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RoutingArtifact":
        """Read and validate an artifact; raises InputError if it is none or contradicts itself."""
        source = check_arrays(path, "artifact")
        try:
            loaded = np.load(source, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            with loaded as file:
                arrays = {name: file[name] for name in file.files}
        except Exception as error:  # zipfile and numpy raise a dozen kinds on foreign bytes
            raise InputError("artifact", f"{source} is not a routing artifact (.npz)") from error
        try:
            return _checked(arrays)
        except (KeyError, TypeError, ValueError) as error:
            detail = error.problem if isinstance(error, InputError) else f"lacks or garbles {error}"
            raise InputError("artifact", f"{source}: {detail}") from error


def calibration_pairs(
    calibration: CalibrationSet, seed: int, n_pairs: int = FitOptions().mask_pairs
) -> DecodeOverlap:
    """Return the ranked pairs of calibration requests on which a fit of this seed measures rho."""
    return decode_overlap(calibration.decode_activation, _streams(seed)[0], n_pairs)


def _streams(seed: int) -> list[np.random.Generator]:
    """Random streams of the pairs and of the clustering, whatever the number of decoders."""
    children = np.random.SeedSequence(seed).spawn(2)
    return [np.random.Generator(np.random.PCG64(child)) for child in children]


@lru_cache(maxsize=8)
def _selection(
    calibration: CalibrationSet,
    seed: int,
    transform: Transform,
    layer_mask: LayerMask,
    n_pairs: int,
) -> LayerSelection:
    """Select the layers; fits for other numbers of workers take the same ones."""
    scores = calibration.scores(score_of(transform))
    idf = idf_weights(calibration.scores("count"))
    pairs = calibration_pairs(calibration, seed, n_pairs)
    return select_layers(transformed(scores, transform, idf), pairs, layer_mask)


def fit(
    calibration: CalibrationSet,
    n_decoders: int,
    seed: int,
    options: FitOptions = FitOptions(),  # noqa: B008 it cannot change
) -> RoutingArtifact:
    """Fit the routing artifact: IDF table, layer mask and, alone of ``n_decoders``, one centroid a
    decode worker. ``seed``: of the sampled pairs and of the clustering's starts.

    Raises InputError with fewer calibration requests than decode workers or than 3, no expert that
    distinguishes them, an unknown option or layer, or gate scores that the trace lacks."""
    counts = calibration.scores("count")
    n = len(counts)
    if n_decoders < 1:
        raise InputError("n_decoders", f"{n_decoders} decode workers", "1 or more")
    if n < n_decoders:
        problem = f"{n} requests cannot make {n_decoders} clusters"
        raise InputError("calibration", problem, f"{n_decoders} requests or more")
    if seed < 0:
        raise InputError("seed", f"{seed}", "0 or more")
    transform = options.transform
    scores = calibration.scores(score_of(transform))
    layer_mask = parse_layer_mask(options.layer_mask)
    idf = idf_weights(counts)
    selection = _selection(calibration, seed, transform, layer_mask, options.mask_pairs)
    points = signatures(scores, idf, selection.layers, transform)
    clusters = kmeans(
        points, n_decoders, _streams(seed)[1], options.clustering, options.seedings, options.rounds
    )
    cluster_domains = np.zeros((n_decoders, len(calibration.domains)), dtype=np.int64)
    np.add.at(cluster_domains, (clusters.labels, calibration.domain), 1)
    return RoutingArtifact(
        idf=idf,
        layer_order=selection.order,
        rho=selection.rho,
        n_kept=selection.n_kept,
        centroids=clusters.centroids,
        cluster_domains=cluster_domains,
        cluster_activation=_mean_activation(
            calibration.decode_activation, clusters.labels, n_decoders
        ),
        domains=tuple(calibration.domains),
        n_pairs=selection.n_pairs,
        cost=clusters.cost / n,
        seed=seed,
        trace_checksum=calibration.trace_checksum,
        transform=transform,
        mask_rule="given" if isinstance(layer_mask, tuple) else layer_mask,
        clustering=options.clustering,
        seedings=options.seedings,
        rounds=options.rounds,
        mask_pairs=options.mask_pairs,
    )


def _mean_activation(
    activation: NDArray[np.float32], labels: Ints, n_clusters: int
) -> NDArray[np.float32]:
    """Mean of [n, L, E] over the members of each cluster; over all where it has none."""
    member = labels == np.arange(n_clusters)[:, None]
    member[~member.any(axis=1)] = True
    means = [activation[rows].mean(axis=0, dtype=np.float64) for rows in member]
    return np.stack(means).astype(np.float32)


def fit_like(artifact: RoutingArtifact, calibration: CalibrationSet) -> RoutingArtifact:
    """Fit other calibration requests with the options, seed and decode workers of an artifact."""
    return fit(calibration, artifact.n_decoders, artifact.seed, artifact.options)


def _checked(arrays: Mapping[str, Array]) -> RoutingArtifact:
    """Build an artifact from the arrays of a file, or say what is wrong with them."""
    facts = json.loads(str(arrays["facts"]))
    version = facts["format_version"]
    if version != FORMAT_VERSION:
        raise InputError("artifact", f"format version {version}, not {FORMAT_VERSION}")
    plain = {name: kind(facts[name]) for name, kind in _KINDS.items()}
    stored: dict[str, Any] = {name: arrays[name].astype(kind) for name, kind in _ARRAYS.items()}
    artifact = RoutingArtifact(
        **stored,
        **plain | {name: int(facts.get(name, before)) for name, before in _BEFORE.items()},
        domains=tuple(str(domain) for domain in facts["domains"]),
        transform=cast("Transform", _one_of("transform", TRANSFORMS, facts)),
        mask_rule=cast("MaskRule", _one_of("mask_rule", get_args(MaskRule), facts)),
        clustering=cast("Method", _one_of("clustering", METHODS, facts)),
    )
    n_layers = len(artifact.layer_order)
    _require(artifact.idf.ndim == 2 and artifact.idf.size > 0, "idf is not a table")
    _require(bool((np.isfinite(artifact.idf) & (artifact.idf >= 0)).all()), "idf is out of range")
    _require(
        len(artifact.idf) == n_layers
        and np.array_equal(np.sort(artifact.layer_order), np.arange(n_layers)),
        "layer_order is not an order of the layers of idf",
    )
    _require(
        artifact.rho.shape == (n_layers,) and bool((np.abs(artifact.rho) <= 1 + 1e-9).all()),
        "rho is not a curve over the layers",
    )
    _require(1 <= artifact.n_kept <= n_layers, f"n_kept={artifact.n_kept} of {n_layers} layers")
    kept_by_rule = {"greedy": int(np.argmax(artifact.rho)) + 1, "all": n_layers}
    _require(
        artifact.n_kept == kept_by_rule.get(artifact.mask_rule, artifact.n_kept),
        f"n_kept={artifact.n_kept} is not what mask rule {artifact.mask_rule} keeps",
    )
    width = artifact.n_kept * artifact.idf.shape[1]
    _require(
        artifact.centroids.ndim == 2
        and len(artifact.centroids) > 0
        and artifact.centroids.shape[1] == width,
        "centroids do not fit the kept layers and experts",
    )
    _require(
        bool(np.allclose((artifact.centroids**2).sum(axis=1), 1.0, rtol=0, atol=1e-5)),
        "centroids are not of unit length",
    )
    _require(
        artifact.cluster_domains.shape == (artifact.n_decoders, len(artifact.domains)),
        "cluster_domains does not fit the centroids and domains",
    )
    activation = artifact.cluster_activation
    _require(
        activation.shape == (artifact.n_decoders, *artifact.idf.shape)
        and bool(((activation >= 0) & (activation <= 1)).all()),
        "cluster_activation is not a fraction of steps by centroid, layer and expert",
    )
    return artifact


def _one_of(name: str, allowed: tuple[str, ...], facts: Mapping[str, Any]) -> str:
    value = str(facts[name])
    _require(value in allowed, f"{name} {value!r} is none of {', '.join(allowed)}")
    return value


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InputError("artifact", otherwise)


#: Modules of which a fit is made: when they change, it is made anew.
_SOURCES = (
    "policies.eldr.artifact", "policies.eldr.clustering", "policies.eldr.signature",
    "policies.eldr.unit", "traces.routing.calibration", "traces.routing.gate_scores",
)  # fmt: skip


def cached_fit(
    trace: RoutingTrace,
    workload: str,
    domain_mix: dict[str, float] | None,
    calibration: Callable[[], CalibrationSet],
    n_decoders: int,
    seed: int,
    options: FitOptions,
) -> RoutingArtifact:
    """Return `fit` of the calibration requests of a trace, from the cache if it is there; else
    ``calibration`` is called, which picks them by ``trace``, ``workload`` and ``domain_mix``."""
    manifest = trace.for_calibration.manifest
    files = [manifest.checksum, manifest.requests_checksum, manifest.gate_scores_checksum]
    mix = None if domain_mix is None else list(domain_mix.items())
    how: list[Any] = [n_decoders, seed, *options]
    key = [files, trace.top_k, workload, mix, how, cache.stamp(_SOURCES)]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode())
    name = f"{digest.hexdigest()[:32]}.npz"
    path = cache.find(cache.FITS, name)
    if path is not None and path.exists():
        try:
            artifact = RoutingArtifact.load(path)
        except InputError:  # it is made anew and replaced
            artifact = None
        if artifact is not None and (
            artifact.trace_checksum,
            artifact.n_decoders,
            artifact.seed,
        ) == (manifest.checksum, n_decoders, seed):
            return artifact
    made = fit(calibration(), n_decoders, seed, options)
    cache.keep(cache.FITS, name, made.write)
    return made
