"""The offline fit and its file: what it must find, and every way in which a file can be broken."""

import dataclasses
import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.eldr import artifact as artifact_module
from eldr_sim.policies.eldr.artifact import RoutingArtifact, fit
from eldr_sim.policies.eldr.router import EldrParameters, EldrPolicy
from eldr_sim.policies.eldr.signature import METHODS, TRANSFORMS, FitOptions, score_of
from eldr_sim.traces.routing.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.gate_scores import GateScores

from ..on_each import on_each


def structured(n=80, n_layers=6, n_experts=16, n_domains=4, seed=0):
    """A calibration set whose domains differ on layers 2 and up."""
    r = np.random.default_rng(seed)
    domain = np.arange(n) % n_domains
    taste = np.ones((n_domains, n_layers, n_experts))
    taste[:, 2:] = r.choice([0.2, 4.0], size=(n_domains, n_layers - 2, n_experts))
    share = taste / taste.sum(axis=2, keepdims=True)
    length = r.integers(40, 200, size=(n, 1, 1))
    counts = r.poisson(share[domain] * length * 2).astype(np.uint16)
    activation = np.minimum(r.poisson(share[domain] * 100) / 50, 1).astype(np.float32)
    return CalibrationSet(
        counts=counts,
        decode_activation=activation,
        domain=domain.astype(np.int16),
        domains=[f"domain-{index}" for index in range(n_domains)],
        requests=np.arange(n),
        trace_checksum="abc123",
        gate_scores=GateScores(
            requests=np.arange(n),
            prob=(share[domain] * length * r.uniform(0.8, 1.2, counts.shape)).astype(np.float32),
            logit=(np.log(share[domain]) * length + r.normal(size=counts.shape)).astype(np.float32),
        ),
    )


@pytest.fixture(scope="module")
def calibration():
    return structured()


@pytest.fixture(scope="module")
def fitted(calibration):
    return fit(calibration, 8, seed=1)


# -- fit ---------------------------------------------------------------------------------------


def test_fit_separates_the_domains(fitted):
    assert fitted.n_decoders == 8
    assert fitted.cluster_sizes.tolist() == [10] * 8
    assert (fitted.cluster_domains.max(axis=1) == 10).all()
    assert (fitted.cluster_domains.sum(axis=0) == 20).all()
    assert fitted.n_calibration == 80
    assert fitted.trace_checksum == "abc123"


def test_fit_keeps_the_peak_of_rho(fitted):
    assert fitted.n_kept == int(np.argmax(fitted.rho)) + 1
    assert fitted.rho[fitted.n_kept - 1] > 0.5
    assert set(fitted.layers.tolist()) <= {2, 3, 4, 5}
    assert np.flatnonzero(fitted.layer_mask).tolist() == fitted.layers.tolist()
    assert fitted.centroids.shape == (8, fitted.n_kept * 16)


def test_fit_is_reproducible_and_seeded(calibration, fitted):
    again = fit(calibration, 8, seed=1)
    for name in ("idf", "layer_order", "rho", "centroids", "cluster_domains", "cluster_activation"):
        assert (getattr(again, name) == getattr(fitted, name)).all(), name
    assert again.summary() == fitted.summary()
    assert fit(calibration, 8, seed=2).seed == 2


def test_cost_is_the_mean_distance_of_the_members(calibration, fitted):
    similar = fitted.signatures(calibration.counts) @ fitted.centroids.T
    # Balanced assignment costs at least as much as nearest-centroid assignment.
    assert fitted.cost >= (1 - similar.max(axis=1)).mean() - 1e-9
    assert fitted.cost < (1 - similar).mean()


def test_activation_of_the_clusters_is_that_of_their_members(calibration, fitted):
    """Equal clusters: the mean over clusters is the mean over requests; domains differ."""
    np.testing.assert_allclose(
        fitted.cluster_activation.mean(axis=0),
        calibration.decode_activation.mean(axis=0),
        atol=1e-6,
    )
    owner = fitted.cluster_domains.argmax(axis=1)
    members = calibration.decode_activation[calibration.domain == owner[0]]
    others = calibration.decode_activation[calibration.domain != owner[0]]
    distance = [abs(fitted.cluster_activation[0] - g.mean(axis=0)).sum() for g in (members, others)]
    assert distance[0] < distance[1]


def test_new_requests_find_the_cluster_of_their_domain(fitted):
    fresh = structured(seed=0)
    r = np.random.default_rng(99)
    mixed = r.permutation(80)
    thinned = r.binomial(fresh.counts, 0.5)[mixed].astype(np.uint16)
    nearest = np.argmax(fitted.signatures(thinned) @ fitted.centroids.T, axis=1)
    owner = fitted.cluster_domains.argmax(axis=1)
    assert np.mean(owner[nearest] == fresh.domain[mixed]) > 0.95


def test_reference_trace_gives_clusters_of_one_domain():
    trace = open_trace("reference-moe")
    calibration = calibration_set(trace, workload="task")
    made = fit(calibration, 8, seed=0)
    purity = made.cluster_domains.max(axis=1).sum() / made.n_calibration
    largest = made.cluster_domains.sum(axis=0).max() / made.n_calibration
    assert purity > 0.85
    assert purity > largest + 0.3  # far from what one big domain would give for nothing
    assert made.cluster_sizes.max() <= -(-made.n_calibration // 8)
    # Serving requests, unseen by the fit, go to clusters of their own domain.
    serving = trace.requests_of(["code", "math", "medical", "legal"], calibration=False)
    nearest = np.argmax(made.signatures(trace.prompt_counts(serving)) @ made.centroids.T, axis=1)
    owner = made.cluster_domains.argmax(axis=1)[nearest]
    assert np.mean(owner == trace.domain[serving]) > 0.85


def test_fit_refuses(calibration):
    with pytest.raises(InputError, match="80 requests cannot make 81 clusters"):
        fit(calibration, 81, seed=0)
    with pytest.raises(InputError, match="n_decoders"):
        fit(calibration, 0, seed=0)
    with pytest.raises(InputError, match="seed"):
        fit(calibration, 2, seed=-1)
    everywhere = dataclasses.replace(calibration, counts=np.full_like(calibration.counts, 3))
    with pytest.raises(InputError, match="all are zero"):
        fit(everywhere, 2, seed=0)


def test_signatures_refuse_another_shape(fitted):
    with pytest.raises(InputError, match=r"counts of 6x15 \(allowed: 6 layers x 16 experts\)"):
        fitted.signatures(np.zeros((1, 6, 15)))


# -- variants ----------------------------------------------------------------------------------

MASKS = ("greedy", "all", (1, 4))


@pytest.fixture(scope="module")
def variants(calibration):
    return {
        (transform, mask, clustering): fit(
            calibration, 8, 1, FitOptions(transform, mask, clustering)
        )
        for transform in TRANSFORMS
        for mask in MASKS
        for clustering in METHODS
    }


def test_every_variant_keeps_what_it_was_asked_for(variants):
    for (transform, mask, clustering), made in variants.items():
        assert (made.transform, made.clustering) == (transform, clustering)
        assert made.mask_rule == ("given" if mask == (1, 4) else mask)
        if mask != "greedy":
            assert made.layers.tolist() == (list(range(6)) if mask == "all" else [1, 4])
        assert made.centroids.shape == (8, len(made.layers) * 16)
        assert made.n_calibration == 80
        if clustering == "balanced":
            assert made.cluster_sizes.max() <= 10
        facts = made.summary()
        assert (facts["signature"], facts["clustering"]) == (transform, clustering)
        assert facts["rho"] == made.rho[made.n_kept - 1]
    # The mask and its rho do not depend on the clustering, all-layer rho not on the mask.
    for transform in TRANSFORMS:
        same = [variants[transform, mask, method] for mask in MASKS for method in METHODS]
        assert len({made.rho[-1] for made in same}) == 1
        assert (same[0].rho == same[1].rho).all()
    assert len({variants[t, "all", "balanced"].rho[-1] for t in TRANSFORMS}) == len(TRANSFORMS)


def test_every_variant_survives_its_file(variants, tmp_path):
    for made in variants.values():
        made.save(tmp_path / "fit.npz")
        back = RoutingArtifact.load(tmp_path / "fit.npz")
        for field in dataclasses.fields(RoutingArtifact):
            np.testing.assert_array_equal(getattr(made, field.name), getattr(back, field.name))


def test_router_sees_requests_as_the_fit_did(calibration, variants):
    """A vanilla cluster holds the requests nearest to its centroid: tau 0 must find it again."""
    for (transform, _, clustering), made in variants.items():
        if clustering == "balanced":
            continue
        context = PolicyContext(8, np.random.default_rng(0), artifact=made)
        policy = EldrPolicy(context, EldrParameters(tau=0.0, refit_s=0.0))
        assert policy.needs.signature == score_of(transform)
        scores = calibration.scores(policy.needs.signature)
        found = np.zeros_like(made.cluster_domains)
        for index in range(80):
            info = RequestInfo(index, 10, 0, signature=scores[index])
            worker = policy.select(info, Workers.idle(np.zeros(8)))
            found[worker, calibration.domain[index]] += 1
        np.testing.assert_array_equal(found, made.cluster_domains)


def test_refit_for_another_pool_changes_the_centroids_alone(calibration, fitted):
    other = fit(calibration, 5, seed=1)
    for name in ("idf", "layer_order", "rho", "n_kept"):
        np.testing.assert_array_equal(getattr(other, name), getattr(fitted, name))
    assert other.n_decoders == 5
    assert other.cluster_sizes.max() == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": "tf-idf"}, "signature: unknown transform 'tf-idf' .*gate-logit"),
        ({"layer_mask": (2, 6)}, "layer_mask: no layer 6 .*0 to 5"),
        ({"layer_mask": "best"}, "layer_mask: 'best'"),
        ({"clustering": "median"}, "clustering: unknown method 'median'"),
    ],
)
def test_unknown_variants_are_refused(calibration, options, message):
    with pytest.raises(InputError, match=message):
        fit(calibration, 4, 0, FitOptions(**options))


@pytest.mark.parametrize("kind", ["prob", "logit"])
def test_gate_transforms_need_gate_scores(calibration, kind):
    counts_only = dataclasses.replace(calibration, gate_scores=None)
    with pytest.raises(InputError, match=f"signature: gate-{kind} needs .* carries no {kind}") as e:
        fit(counts_only, 4, 0, FitOptions(f"gate-{kind}"))
    assert "\n" not in str(e.value)
    gate = dataclasses.replace(calibration.gate_scores, **{kind: None})
    with pytest.raises(InputError, match=f"carries no {kind}"):
        fit(dataclasses.replace(calibration, gate_scores=gate), 4, 0, FitOptions(f"gate-{kind}"))
    part = GateScores(np.arange(70), **{kind: getattr(calibration.gate_scores, kind)[:70]})
    with pytest.raises(InputError, match=r"scores of 80 requests, .* lacks those of 10"):
        fit(dataclasses.replace(calibration, gate_scores=part), 4, 0, FitOptions(f"gate-{kind}"))


def test_options_beside_an_artifact_must_agree(variants):
    made = variants["sqrt", (1, 4), "vanilla"]
    made.check_made_with(None, None, None)
    made.check_made_with("sqrt", (1, 4), "vanilla")
    for given, message in (
        (("count", None, None), "signature: count, but the artifact holds sqrt"),
        ((None, "greedy", None), r"layer_mask: greedy, but the artifact holds \[1, 4\]"),
        ((None, (1, 2), None), r"layer_mask: \[1, 2\], but the artifact holds \[1, 4\]"),
        ((None, None, "balanced"), "clustering: balanced, but the artifact is vanilla"),
    ):
        with pytest.raises(InputError, match=message):
            made.check_made_with(*given)
    made.check_made_with(seedings=1, rounds=None)
    with pytest.raises(InputError, match="rounds: 7, but the artifact was made with 50"):
        made.check_made_with(rounds=7)
    with pytest.raises(InputError, match=r"layer_mask: \[0\], but the artifact holds all"):
        variants["sqrt", "all", "vanilla"].check_made_with(None, (0,), None)


# -- file --------------------------------------------------------------------------------------


def test_save_and_load_are_exact(fitted, tmp_path):
    path = tmp_path / "fit.npz"
    fitted.save(path)
    back = RoutingArtifact.load(path)
    for field in dataclasses.fields(RoutingArtifact):
        mine, theirs = getattr(fitted, field.name), getattr(back, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            assert (mine == theirs).all(), field.name
        else:
            assert mine == theirs, field.name
    assert [entry.name for entry in tmp_path.iterdir()] == ["fit.npz"]


def test_equal_artifacts_are_equal_files(calibration, fitted, tmp_path):
    fitted.save(tmp_path / "a.npz")
    fit(calibration, 8, seed=1).save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_failed_save_leaves_the_old_file_and_nothing_else(fitted, tmp_path, monkeypatch):
    path = tmp_path / "fit.npz"
    path.write_bytes(b"old")

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(artifact_module.np, "savez", fail)
    with pytest.raises(InputError, match="disk full"):
        fitted.save(path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["fit.npz"]


def test_save_makes_the_folder_or_says_why_not(fitted, tmp_path):
    fitted.save(tmp_path / "new" / "fit.npz")
    assert RoutingArtifact.load(tmp_path / "new" / "fit.npz").n_kept == fitted.n_kept
    with pytest.raises(InputError, match="artifact: cannot write"):
        fitted.save(tmp_path / "new" / "fit.npz" / "fit.npz")


def rewritten(source, target, **changes):
    """Copy an artifact file with arrays replaced, facts changed or (by None) left out."""
    with np.load(source) as file:
        arrays = {name: file[name] for name in file.files}
    facts = json.loads(str(arrays["facts"]))
    for name, value in changes.items():
        if name in facts:
            facts[name] = value
        elif value is None:
            del arrays[name]
        else:
            arrays[name] = value(arrays[name])
    arrays["facts"] = np.array(json.dumps(facts))
    np.savez(target, **arrays)


@on_each(
    "changes, message",
    [
        ({"format_version": 1}, "format version 1, not 2"),
        ({"idf": None}, "lacks or garbles 'idf'"),
        ({"idf": lambda a: a[0]}, "idf is not a table"),
        ({"idf": lambda a: a - 100}, "idf is out of range"),
        ({"idf": lambda a: a * np.nan}, "idf is out of range"),
        ({"idf": lambda a: a[:-1]}, "layer_order"),
        ({"layer_order": lambda a: a * 0}, "layer_order"),
        ({"layer_order": lambda a: a.reshape(2, -1)}, "layer_order|rho"),
        ({"rho": lambda a: a[1:]}, "rho"),
        ({"rho": lambda a: a + 3}, "rho"),
        ({"n_kept": 0}, "n_kept=0"),
        ({"n_kept": 99}, "n_kept=99"),
        ({"n_kept": None}, "lacks or garbles"),
        ({"n_kept": 1}, "n_kept=1 is not what mask rule greedy keeps"),
        ({"mask_rule": "all"}, "n_kept=. is not what mask rule all keeps"),
        ({"mask_rule": "best"}, "mask_rule 'best' is none of greedy, all, given"),
        ({"transform": "gate"}, "transform 'gate' is none of count-idf, count, sqrt"),
        ({"clustering": None}, "clustering 'None' is none of balanced, vanilla"),
        ({"centroids": lambda a: a[:, 1:]}, "centroids do not fit"),
        ({"centroids": lambda a: a[:0]}, "centroids do not fit"),
        ({"centroids": lambda a: a * 2}, "unit length"),
        ({"centroids": lambda a: a * np.nan}, "unit length"),
        ({"cluster_domains": lambda a: a[1:]}, "cluster_domains"),
        ({"cluster_activation": lambda a: a[1:]}, "cluster_activation"),
        ({"cluster_activation": lambda a: a[:, :, 1:]}, "cluster_activation"),
        ({"cluster_activation": lambda a: a - 1}, "cluster_activation"),
        ({"cluster_activation": lambda a: a * np.nan}, "cluster_activation"),
    ],
)
def test_load_says_what_is_wrong(fitted, tmp_path, changes, message):
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    fitted.save(good)
    rewritten(good, bad, **changes)
    with pytest.raises(InputError, match=message) as caught:
        RoutingArtifact.load(bad)
    assert "\n" not in str(caught.value)
    assert "bad.npz" in str(caught.value)


def test_load_refuses_what_is_no_artifact(fitted, tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        RoutingArtifact.load(tmp_path / "absent.npz")
    path = tmp_path / "fit.npz"
    fitted.save(path)
    whole = path.read_bytes()
    for content in (b"", b"not an archive", whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a routing artifact"):
            RoutingArtifact.load(path)
    np.save(tmp_path / "plain.npy", np.arange(3))
    with pytest.raises(InputError, match="not a routing artifact"):
        RoutingArtifact.load(tmp_path / "plain.npy")
    np.savez(tmp_path / "other.npz", weights=np.arange(3))
    with pytest.raises(InputError, match="lacks or garbles 'facts'"):
        RoutingArtifact.load(tmp_path / "other.npz")
    with pytest.raises(InputError, match="Is a directory"):
        RoutingArtifact.load(tmp_path)


@on_each("seed", range(60))
def test_a_flipped_byte_is_refused_or_harmless(fitted, tmp_path, seed):
    path = tmp_path / "fit.npz"
    fitted.save(path)
    broken = bytearray(path.read_bytes())
    broken[np.random.default_rng(seed).integers(len(broken))] ^= 0xFF
    path.write_bytes(broken)
    try:
        back = RoutingArtifact.load(path)
    except InputError:
        return
    # A byte of the archive's dates or flags: the checksums cover all that matters.
    assert (back.centroids == fitted.centroids).all()
    assert back.summary() == fitted.summary()
