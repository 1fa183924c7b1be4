"""ELDR sections 3 and 4: latency by active experts, prefill against decode, same-domain batches;
signature quality by transform and layer, and the clusters."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from eldr_sim.charts import lines
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.planning.studies.figures import Claim, Reproduction
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.policies.eldr.signature import Transform
from eldr_sim.policies.eldr.signature_quality import SignatureQuality
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.statistics import distinct_experts
from eldr_sim.traces.routing.synthetic.drawn import Shape, nearest_preset
from eldr_sim.traces.routing.synthetic.presets import preset_model
from eldr_sim.validation.signature_report import (
    draw_layers,
    draw_pca,
    draw_transforms,
    layer_rows,
    measured_fits,
    pca_rows,
    transform_rows,
)

_BATCHES = (16, 32, 64, 128)


def figure_2(model: str, gpu: str) -> Reproduction:
    """Latency of a MoE layer against distinct experts and batch size (section 3.1)."""
    most, kind = max(_BATCHES), (load_model(model), load_gpu(gpu))
    step_time = build_step_time_model(*kind, max_num_seqs=most, max_model_len=1024)
    experts = [8, 16, 32, 48, 64, 96, 128]
    rows = [
        {"batch": b, "active_experts": d, "latency_us": 1e6 * float(step_time.cost.moe_s[b, d])}
        for b in _BATCHES
        for d in experts
    ]
    ratio = float(step_time.cost.moe_s[64, 128] / step_time.cost.moe_s[64, 16])
    by_batch = float(step_time.cost.moe_s[128, 64] / step_time.cost.moe_s[16, 64])
    moe = step_time.provenance["moe"]
    derived = moe["label"] == "derived"
    text = "16 to 128 active experts at batch 64 raise the latency of a layer"
    if derived:
        text += " (the table is derived from this very figure)"
    claims = [
        Claim(text, 4.7, 4.7, ratio, "x", 0.1, f"{moe['label']} table ({moe['origin']})",
              given=derived),
        Claim("batch 16 to 128 at 64 active experts barely moves it", 1.0, 1.0, by_batch, "x",
              0.15, stated=False, neutral=None),
    ]  # fmt: skip
    draw = lines(rows, "active_experts", "latency_us", "batch", title=f"{model} on {gpu}")
    return Reproduction("figure_2", "MoE latency by active experts", rows, claims, draw)


def figure_3(trace: RoutingTrace) -> Reproduction:
    """Prefill against decode activation of each expert, by domain (section 3.3)."""
    requests = np.arange(len(trace.prompt_len))
    prompt = trace.prompt_counts(requests) / trace.prompt_len[:, None, None]
    decode = trace.decode_activation(requests)
    points = []
    for index, domain in enumerate(trace.domains):
        mine = trace.domain == index
        p, d = prompt[mine].mean(axis=0).ravel(), decode[mine].mean(axis=0).ravel()
        points.append((domain, p, d, float(np.corrcoef(p, d)[0, 1])))
    prompts = np.concatenate([p for _, p, _, _ in points])
    decodes = np.concatenate([d for _, _, d, _ in points])
    everyone = float(np.corrcoef(prompts, decodes)[0, 1])
    claims = [
        Claim("prefill and decode activation of an expert correlate (Pearson)", 0.70, 0.92,
              everyone, "", 0.02, "prompts and answers are drawn by one process, and an untrained "
              "model reaches .88 to .95: the figure does not prove domains", neutral=0.0,
              given=one_process(trace))
    ]  # fmt: skip

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for domain, p, d, r in points:
            axes.plot(p, d, ".", markersize=3, alpha=0.5, label=f"{domain} r = {r:.2f}")
        axes.set(xlabel="share of prompt tokens", ylabel="share of generated tokens")

    rows = [{"domain": name, "pearson": r} for name, _, _, r in points]
    return Reproduction("figure_3", "Prefill against decode activation", rows, claims, draw)


def one_process(trace: RoutingTrace) -> bool:
    """Return whether the routing of a drawn trace's prompts and answers follows one law."""
    about = trace.manifest
    shape = Shape(trace.n_layers, trace.n_experts, trace.top_k)
    model = preset_model(nearest_preset(about.model, shape))
    return about.provenance == "synthetic" and model.one_process


def figure_4(trace: RoutingTrace) -> Reproduction:
    """Distinct experts in same-domain and mixed batches (section 3.4)."""
    entries = distinct_experts(trace, (8, 16, 32, 64, 128))
    rows: list[dict[str, Any]] = [
        {"group": e.group, "batch": e.batch, "uniform": e.uniform, "mixed": e.mixed}
        | {"same_domain": float(np.mean(list(e.same_domain.values())))}
        | {"reduction_percent": 100.0 * e.reduction}
        for e in entries
    ]
    claims = []
    for group, low, high in (("task", 17.0, 21.0), ("language", 3.0, 10.0)):
        own = [r["reduction_percent"] for r in rows if r["group"] == group and r["batch"] >= 32]
        span = f"{min(own):.1f} to {max(own):.1f}% over batch 32 to 128" if own else "none"
        claims.append(
            Claim(f"fewer distinct experts in same-domain batches, {group}, batch 32 to 128", low,
                  high, float(np.mean(own)) if own else None,
                  reason=f"{span}; domains explain as much of how requests differ as recorded of "
                  "gpt-oss-20b (--routing-band middle); only the high end of the band is tuned to "
                  "this figure")
        )  # fmt: skip

    kinds = ("uniform", "mixed", "same_domain")
    means = [
        {"group": r["group"], "batch": r["batch"], "kind": kind, "experts": r[kind]}
        for r in rows
        for kind in kinds
    ]
    draw = lines(means, "batch", "experts", "kind", "group")
    return Reproduction("figure_4", "Same-domain against mixed batches", rows, claims, draw)


Fits = dict[str, SignatureQuality]
_COUNTS: tuple[Transform, ...] = ("count-idf", "count", "sqrt")
_GATES: tuple[Transform, ...] = ("gate-prob", "gate-logit")


def fits_of(trace: RoutingTrace, n_decoders: int) -> Fits:
    """Fit and measure both workloads (section 4.2.3: one calibration set each)."""
    calibration = calibration_set(trace, workload="task")
    return measured_fits(trace, "task", calibration, fit(calibration, n_decoders, 0))


def figure_7(scored: Fits, models: Mapping[str, Fits]) -> Reproduction:
    """Rho of each transform on all layers: counts by model, gate scores of a trace that has them.

    ``scored``: fits to a trace with recorded gate scores; ``models``: to the routing of the paper's
    models."""
    cells = {
        f"{model} {name}": quality.rho_by_transform
        for model, fits in models.items()
        for name, quality in fits.items()
    }
    idf, count = ([rho[name] for rho in cells.values()] for name in ("count-idf", "count"))
    gains = 100 * (np.array(idf) - np.array(count))
    each = ", ".join(f"{cell} {gain:+.1f}" for cell, gain in zip(cells, gains, strict=True))
    own = ", ".join(
        f"{100 * (q.rho_by_transform['count-idf'] - q.rho_by_transform['count']):+.1f} ({name})"
        for name, q in scored.items()
    )
    why = (
        f"by cell: {each}; recordings of gpt-oss-20b and Llama-4-Maverick lose 5 to 12 points, too;"
        f" reference-moe: {own}"
    )
    requests = " and ".join(str(len(quality.compared.requests)) for quality in scored.values())
    led = ", ".join(f"{name} {_lead([scored[name]]):+.2f}" for name in scored)
    claims = [
        Claim("count-idf raises mean rho over count", 1.5, 1.5, float(gains.mean()), "points", 0.5,
              why),
        Claim("count-idf raises the worst rho over count", 4.9, 4.9,
              100 * (min(idf) - min(count)), "points", 0.5, why),
        Claim("count variants beat gate scores in mean rho by more than", 3.5, 100.0,
              _lead(list(scored.values())), "points", 0.5,
              f"the weakest of {', '.join(_COUNTS)} over the stronger of {' and '.join(_GATES)}; "
              f"by workload: {led}; reference-moe, {requests} requests that have gate scores: "
              "drawn scores are those by which the experts were chosen"),
    ]  # fmt: skip
    rows = [{"model": "reference-moe", **row} for row in transform_rows(scored)]
    for model, fits in models.items():
        rows += [{"model": model, **row} for row in transform_rows(fits)]
    title = "Signature quality by transform"
    return Reproduction("figure_7", title, rows, claims, lambda f: draw_transforms(f, scored))


def _lead(fits: list[SignatureQuality]) -> float:
    """Return mean rho of the weakest count variant less the strongest gate score's, points."""

    def mean(transform: Transform) -> float:
        return float(np.mean([fit.rho_by_transform[transform] for fit in fits]))

    return 100 * (min(map(mean, _COUNTS)) - max(map(mean, _GATES)))


def figure_8(fits: Fits) -> Reproduction:
    """Cumulative rho over the layers of the greedy selection."""
    claims = []
    for name, quality in fits.items():
        rho, kept = quality.greedy.rho, quality.greedy.n_kept
        claims.append(
            Claim(f"the peak lies before the last layer and above rho of all layers, {name} "
                  f"({kept} of {len(rho)} layers)", 0.005, 0.032, float(rho[kept - 1] - rho[-1]),
                  "", 0.005, f"rho peaks at {rho[kept - 1]:.2f}: a drawn topic is the same in "
                  "prompt and generation", neutral=0.0)
        )  # fmt: skip
    title, rows = "Cumulative rho over layers", layer_rows(fits)
    return Reproduction("figure_8", title, rows, claims, lambda f: draw_layers(f, fits))


def figure_9(fits: Fits) -> Reproduction:
    """Signatures and centroids in their first two principal components."""
    claims = []
    for name, quality in fits.items():
        clusters = quality.artifact.cluster_domains
        purity = 100.0 * float(clusters.max(axis=1).sum() / clusters.sum())
        claims.append(
            Claim("domains occupy distinct regions: calibration requests in a cluster of their own "
                  f"domain's majority, {name}", 50.0, 100.0, purity, stated=False, neutral=None)
        )  # fmt: skip
    title, rows = "Signatures and centroids", pca_rows(fits)
    return Reproduction("figure_9", title, rows, claims, lambda f: draw_pca(f, fits))
