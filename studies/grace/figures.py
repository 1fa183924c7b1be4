"""GRACE-MoE's Figures 1, 3, 5 and 6: traffic, load and idle time of placements, counted."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.charts import bars, lines
from eldr_sim.kinds import Row
from eldr_sim.planning.slo import Interval, t_interval
from eldr_sim.planning.studies.figures import Claim, Reproduction, percent, row_of
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.placement.grace import RATIOS, hot_copies
from eldr_sim.traces.routing.coactivation import affinity_of
from studies.expert_traffic import Traffic, measure
from studies.grace.settings import (
    ACROSS,
    AFFINITY,
    DR_TAR,
    DR_WRR,
    FR_WRR,
    HG,
    OTHERS,
    PHASES,
    QWEN,
    SAME,
    SCHEMES,
    SOURCES,
    VANILLA,
    Cluster,
    Evaluation,
    Phase,
    Scheme,
    Source,
    replica_choice,
)

TWO_BY_TWO = Cluster(2, 2)
#: The paper's figures for OLMoE, DeepSeek-V2-Lite and Qwen3-30B-A3B.
_NO_TRACE = (
    "no routing of OLMoE or DeepSeek-V2-Lite token by token is public; the range of the paper's "
    "three models is held against every recorded trace"
)
#: Requests of domains that stand for WikiText, MATH and GitHub.
DOMAINS = {
    "reference-moe": ("en", "math", "code"),
    "gpt-oss-20b": ("humanities_social", "math", "code"),
    "qwen3-30b-a3b": ("sharegpt", "random"),
}


def mean_of(runs: tuple[Traffic, ...], figure: Callable[[Traffic], float]) -> float:
    """Return the mean of a figure over seeds."""
    return float(np.mean([figure(run) for run in runs]))


def between(run: Traffic) -> float:
    """Copies between nodes, a token and layer."""
    return run.per_token(run.between)


def inside(run: Traffic) -> float:
    """Copies between GPUs of a node, a token and layer."""
    return run.per_token(run.inside)


def copies(run: Traffic) -> float:
    """Copies between GPUs, a token and layer."""
    return between(run) + inside(run)


def figure_1a(evaluation: Evaluation) -> Reproduction:
    """Grouping strictness against traffic (Fig. 1a)."""
    ratios = [Scheme(f"r = {r:g}", f"grace:ratio={r:g},replication=none") for r in RATIOS]
    rows = []
    for source in evaluation.sources:
        for scheme in (VANILLA, *ratios, AFFINITY):
            runs = evaluation.measured(source, scheme, TWO_BY_TWO, "prefill")
            rows.append(
                {"trace": source.label, "grouping": scheme.label}
                | {"between": mean_of(runs, between), "inside": mean_of(runs, inside)}
                | {"load_max": mean_of(runs, lambda run: run.load_max)}
            )

    def total(source: Source, label: str) -> float:
        row = row_of(rows, trace=source.label, grouping=label)
        return float(row["between"]) + float(row["inside"])

    claims = []
    for source in evaluation.sources:
        loose = percent(total(source, ratios[-1].label), total(source, ratios[0].label))
        equal = percent(total(source, AFFINITY.label), total(source, "Vanilla"))
        grace = percent(total(source, ratios[-1].label), total(source, "Vanilla"))
        claims.append(
            Claim(f"looser group sizes (r 0 to 1) reduce copies, {source.label}", -100.0, -0.1,
                  loose, tolerance=0.0, stated=False,
                  reason=f"against Vanilla r = 1 sends {grace:+.1f}%; equal groups refined by "
                  f"swaps (affinity) {equal:+.1f}%")
        )  # fmt: skip
    draw = bars(rows, "trace", ("between", "inside", "load_max"), "grouping")
    return Reproduction("figure_1a", "Strictness of groups and traffic", rows, claims, draw)


def figure_1b(evaluation: Evaluation) -> Reproduction:
    """Copies of active against copies of widely collaborative experts (Fig. 1b)."""
    rows: list[Row] = []
    claims = []
    for source in evaluation.sources:
        pairs = evaluation.calibration(source).coactivation()
        load = np.diagonal(pairs, axis1=1, axis2=2).astype(np.float64)
        affinity = affinity_of(pairs)
        groups = evaluation.placements(source, HG.placement, TWO_BY_TWO)[0]
        batches = evaluation.batches(source, TWO_BY_TWO, "prefill")
        node, choice = TWO_BY_TWO.node_of_rank, replica_choice("weighted")
        base = measure(batches, groups, choice, node).load_std
        shares: dict[str, float] = {}
        for name, score in (("active", load), ("collaborative", breadth(affinity))):
            for part in (1 / 32, 1 / 16, 1 / 8, 1 / 4):
                n = max(1, round(part * load.shape[1]))
                copied = copied_everywhere(groups, load, score, n)
                change = percent(measure(batches, copied, choice, node).load_std, base)
                rows.append(
                    {"trace": source.label, "copied": name, "experts": n, "std_change": change}
                )
                shares[name] = min(shares.get(name, np.inf), change)
        ours, best = shares["active"] - shares["collaborative"], "best number of each"
        claims.append(
            Claim("copies of active experts even the load more than of collaborative ones, "
                  f"{best}, {source.label}", -100.0, 0.0, ours, "points", 0.0,
                  f"active {shares['active']:+.1f}%, collaborative {shares['collaborative']:+.1f}%",
                  stated=False)
        )  # fmt: skip
    draw = lines(rows, "experts", "std_change", "copied", "trace", xlabel="experts copied")
    return Reproduction("figure_1b", "Which experts to copy to every GPU", rows, claims, draw)


def breadth(affinity: Floats) -> Floats:
    """Return with how many others each expert is chosen: 2^entropy of its affinities, [L, E]."""
    share = affinity / np.maximum(affinity.sum(axis=2, keepdims=True), 1.0)
    entropy = -(share * np.log2(np.where(share > 0, share, 1.0))).sum(axis=2)
    return np.asarray(np.exp2(entropy))


def copied_everywhere(groups: Placement, load: Floats, score: Floats, n: int) -> Placement:
    """Return groups with copies of each layer's n experts of the highest score on every rank."""
    layers, n_experts = load.shape
    chosen = np.argsort(-np.round(score, 9), axis=1, kind="stable")[:, :n]
    expert = np.empty((layers, n_experts + n * (groups.n_ranks - 1)), np.int64)
    rank, of_rank = np.empty_like(expert), np.zeros((layers, groups.n_ranks))
    for layer in range(layers):
        own = groups.rank[layer, :n_experts]
        more = [(e, r) for e in chosen[layer] for r in range(groups.n_ranks) if r != own[e]]
        expert[layer] = [*range(n_experts), *(e for e, _ in more)]
        rank[layer] = [*own, *(r for _, r in more)]
        count = np.bincount(expert[layer], minlength=n_experts)
        np.add.at(of_rank[layer], rank[layer], (load[layer] / count)[expert[layer]])
    return Placement(expert, rank, groups.n_ranks, of_rank)


def figure_3(evaluation: Evaluation) -> Reproduction:
    """Load of groups, and of experts within the heaviest (Fig. 3)."""
    rows, claims = [], []
    for source in evaluation.sources:
        load, groups = loads_of_groups(evaluation, source)
        n_ranks = TWO_BY_TWO.n_ranks
        heaviest, quarter, skews = [], [], []
        for layer, (own, of) in enumerate(zip(load, groups, strict=True)):
            total = np.bincount(of, weights=own, minlength=n_ranks)
            inner = np.sort(own[of == total.argmax()])[::-1]
            heaviest.append(float(total.max() / total.sum()))
            quarter.append(float(inner[: max(1, len(inner) // 4)].sum() / inner.sum()))
            skews.append(float(total.max() / total.mean()))
            rows.append(
                {"trace": source.label, "layer": layer}
                | {f"group_{i}": float(w / total.sum()) for i, w in enumerate(-np.sort(-total))}
                | {"top_quarter_of_heaviest": quarter[-1]}
            )
        hot = (hot_copies(*each, n_ranks, "dynamic") for each in zip(load, groups, strict=True))
        copies = [len(found.ranks) > 1 for found in hot]
        claims += [
            Claim(f"{what}, {source.label}", low, 100.0, 100 * float(np.mean(ours)), stated=False,
                  tolerance=0.0, reason=reason, neutral=None)
            for what, low, ours, reason in (
                ("a few groups carry most of the load: heaviest of 4", 25.0, heaviest, ""),
                ("a few experts carry the heaviest group: its top quarter", 50.0, quarter,
                 "the load of its experts is flatter"),
                ("layers whose skew gives more than one copy (rho >= 2)", 1.0, copies,
                 f"rho {min(skews):.2f} to {max(skews):.2f}"),
            )
        ]  # fmt: skip
    shares = [
        {"trace": row["trace"], "layer": row["layer"], "group": i, "share": row[f"group_{i}"]}
        for row in rows
        for i in range(TWO_BY_TWO.n_ranks)
    ]
    draw = lines(shares, "layer", "share", "group", "trace", ylabel="share of the load")
    title = "Load of groups after hierarchical grouping"
    return Reproduction("figure_3", title, rows, claims, draw)


def loads_of_groups(evaluation: Evaluation, source: Source) -> tuple[Floats, Ints]:
    """Return the load of every expert in calibration and its rank under HG, [layers, E] each."""
    pairs = evaluation.calibration(source).coactivation()
    placement = evaluation.placements(source, HG.placement, TWO_BY_TWO)[0]
    return np.diagonal(pairs, axis1=1, axis2=2).astype(np.float64), placement.rank


_STATED: dict[str, tuple[str, Scheme, Scheme, tuple[float, float, float]]] = {
    "between": ("copies between nodes", HG, VANILLA, (-3.3, -14.6, -26.0)),
    "inside": ("copies inside nodes", HG, VANILLA, (-10.0, -25.1, -35.8)),
    "all_to_all_ms": ("all-to-all time", HG, VANILLA, (-14.3, -15.2, -7.6)),
    "load_std": ("standard deviation of load", HG, VANILLA, (37.5, 75.2, 11.1)),
    "idle_ms": ("idle time", HG, VANILLA, (13.0, 231.0, 147.0)),
    "load_std/dr": ("standard deviation of load", DR_WRR, HG, (-44.8, -48.0, -58.3)),
    "idle_ms/dr": ("idle time", DR_WRR, HG, (-43.3, -32.3, -37.8)),
    "idle_ms/fr": ("idle time", FR_WRR, HG, (-42.2, -39.1, -35.7)),
    "between/tar": ("copies between nodes", DR_TAR, DR_WRR, (-6.3, -11.6, -35.2)),
    "all_to_all_ms/tar": ("all-to-all time", DR_TAR, DR_WRR, (-2.8, -8.3, -10.0)),
}
#: Means over the three models.
_MEANS: dict[str, tuple[str, Scheme, Scheme, float]] = {
    "between": ("copies between nodes", DR_WRR, HG, 17.7),
    "inside": ("copies inside nodes", DR_WRR, HG, 2.8),
    "inside/tar": ("copies inside nodes", DR_TAR, DR_WRR, -6.7),
    "idle_ms/tar": ("idle time", DR_TAR, DR_WRR, 5.25),
    "load_std/tar": ("standard deviation of load", DR_TAR, DR_WRR, 21.4),
}


def figure_5(evaluation: Evaluation) -> Reproduction:
    """Traffic, all-to-all time, load and idle time of each scheme at 2x2 GPUs (Fig. 5)."""
    rows = component_rows(evaluation, TWO_BY_TWO)

    def changes(
        sources: Sequence[Source], phase: Phase, key: str, new: Scheme, old: Scheme
    ) -> Interval:
        """Return a change over sources and seeds."""
        name, found = key.partition("/")[0], []
        for source in sources:
            each = (counted(evaluation, source, s, TWO_BY_TWO, phase)[name] for s in (new, old))
            ours, theirs = np.broadcast_arrays(*each)
            found += (100 * (ours / theirs - 1)).tolist()
        return t_interval(found)

    claims = []
    for key, (what, new, old, stated) in _STATED.items():
        label = f"{what}, {new.label} against {old.label}"
        each = {"Qwen3-30B-A3B": QWEN, "Qwen3-30B-A3B, the requests it was fitted on": SAME}
        for name, sources in (each | {source.label: (source,) for source in OTHERS}).items():
            # What TAR saves hangs on which experts have copies: the range is all three models'.
            of_model = name in each and not key.endswith("/tar")
            low, high = (stated[2],) * 2 if of_model else (min(stated), max(stated))
            ours = changes(sources, "prefill", key, new, old)
            decode = changes(sources, "decode", key, new, old)
            by = [f"{s.label}: {changes([s], 'prefill', key, new, old).mean:+.1f}" for s in ACROSS]
            why = f"fitted on the other file, {'; '.join(by)}" if name in each else _NO_TRACE
            claims.append(
                Claim(f"{label}, {name}", low, high, ours.mean, tolerance=3.0 if low == high
                      else 1.0, reason=f"decode steps {decode.mean:+.1f}; {why}",
                      interval=ours[1:])
            )  # fmt: skip
    for key, (what, new, old, mean) in _MEANS.items():
        ours = changes((*QWEN, *OTHERS), "prefill", key, new, old)
        claims.append(
            Claim(f"{what}, {new.label} against {old.label}, mean of models", mean, mean,
                  ours.mean, tolerance=3.0, interval=ours[1:])
        )  # fmt: skip
    shown = [row for row in rows if row["phase"] == "prefill"]
    draw = bars(shown, "trace", ("between", "inside", "load_std", "idle_ms"), "scheme")
    return Reproduction("figure_5", "Components at 2 nodes x 2 GPUs", rows, claims, draw)


#: Most active experts of each layer that every GPU has; the paper's text copies fewer, on one more.
COPIED = (8, 16, 32)


def copies_and_locality(evaluation: Evaluation) -> Reproduction:
    """What preferring near copies saves, by how many experts have copies (Qwen3, 2x2 GPUs)."""
    rows: list[Row] = []
    claims = []
    node = TWO_BY_TWO.node_of_rank
    for (label, sources), n in product((("", QWEN), (", the requests it was fitted on", SAME)),
                                       COPIED):  # fmt: skip
        found: dict[str, list[float]] = {"between": [], "inside": []}
        for source in sources:
            pairs = evaluation.calibration(source).coactivation()
            load = np.diagonal(pairs, axis1=1, axis2=2).astype(np.float64)
            batches = evaluation.batches(source, TWO_BY_TWO, "prefill")
            for groups in evaluation.placements(source, HG.placement, TWO_BY_TWO):
                placed = copied_everywhere(groups, load, load, n)
                near, any_ = (
                    measure(batches, placed, replica_choice(scheme.choice), node)
                    for scheme in (DR_TAR, DR_WRR)
                )
                found["between"].append(percent(between(near), between(any_)))
                found["inside"].append(percent(inside(near), inside(any_)))
        spans = {name: t_interval(own) for name, own in found.items()}
        rows.append(
            {"requests": label or "others of the file", "experts_copied": n}
            | {f"{name}_%{end}": value for name, span in spans.items()
               for end, value in zip(("", "_low", "_high"), span, strict=True)}
        )  # fmt: skip
        claims.append(
            Claim(f"copies between nodes, TAR against WRR, the {n} most active experts on every "
                  f"GPU{label}", -35.2, -6.3, spans["between"].mean,
                  interval=spans["between"][1:],
                  reason=f"inside nodes {spans['inside'].mean:+.1f}%")
        )  # fmt: skip
    draw = bars(rows, "requests", ("between_%", "inside_%"), "experts_copied")
    return Reproduction("copies", "TAR against WRR by experts that have copies", rows, claims, draw)


#: What is counted of a scheme.
_COUNTED: dict[str, Callable[[Traffic], float]] = {
    "between": between,
    "inside": inside,
    "between_per_expert": lambda run: run.per_token(run.between_pairs),
    "inside_per_expert": lambda run: run.per_token(run.inside_pairs),
    "load_std": lambda run: run.load_std,
    "load_max": lambda run: run.load_max,
    "busiest_experts": lambda run: run.busiest_experts,
}


def component_rows(evaluation: Evaluation, cluster: Cluster) -> list[Row]:
    """Return a row for each trace, phase and scheme: traffic, load, experts and times."""
    return [
        {"trace": source.label, "phase": phase, "scheme": scheme.label}
        | {
            name: float(np.mean(values))
            for name, values in counted(evaluation, source, scheme, cluster, phase).items()
        }
        for source, phase, scheme in product(SOURCES, PHASES, SCHEMES)
    ]


def counted(
    evaluation: Evaluation, source: Source, scheme: Scheme, cluster: Cluster, phase: Phase
) -> dict[str, Floats]:
    """Return what is counted and priced of a scheme, seed by seed."""
    runs = evaluation.measured(source, scheme, cluster, phase)
    times = evaluation.timed(source, scheme, cluster, phase)
    found = {name: np.array([of(run) for run in runs]) for name, of in _COUNTED.items()}
    for name in ("moe", "all_to_all", "idle", "total"):
        seconds = [getattr(each, f"{name}_s") for each in times]
        found[f"{name.replace('total', 'layer')}_ms"] = 1e3 * np.array(seconds)
    return found


def figure_6(evaluation: Evaluation) -> Reproduction:
    """Placements fitted on one data set and judged on another (Fig. 6)."""
    rows, claims = [], []
    for trace, domains in DOMAINS.items():
        by_seed: dict[tuple[str, str], Floats] = {}  # of each placement on each data set
        for judged, fitted in product(domains, ("Vanilla", *domains, "mixture")):
            on = (fitted,) if fitted in domains else domains
            runs = evaluation.measured(
                Source(fitted, trace, on, judged),
                VANILLA if fitted == "Vanilla" else HG, TWO_BY_TWO, "prefill",
            )  # fmt: skip
            by_seed[fitted, judged] = np.array([copies(run) for run in runs])
        found = {key: float(np.mean(each)) for key, each in by_seed.items()}
        rows += [
            {"trace": trace, "judged_on": judged, "fitted_on": fitted, "copies": value,
             "against_vanilla": percent(value, found["Vanilla", judged])}
            for (fitted, judged), value in found.items()
        ]  # fmt: skip
        cross = {d: [found[f, d] for f in domains if f != d] for d in domains}
        worst = [percent(max(cross[d]), found[d, d]) for d in domains]
        least = [percent(max(cross[d]), found["Vanilla", d]) for d in domains]
        mixed = {d: percent(found["mixture", d], min(cross[d])) for d in domains}
        single = {f: np.mean([by_seed[f, d] for d in domains], axis=0) for f in domains}
        of_mixture = np.mean([by_seed["mixture", d] for d in domains], axis=0)
        best = min(domains, key=lambda f: float(np.mean(single[f])))
        overall = t_interval((100 * (of_mixture / single[best] - 1)).tolist())
        each = ", ".join(f"{domain} {value:+.1f}%" for domain, value in mixed.items())
        claims += [
            Claim(f"another data set's placement adds copies, at most, {trace}", 0.0, 57.1,
                  max(worst), reason="of the paper's three models: 14.2, 20.1 and 57.1"),
            Claim(f"and stays below Vanilla, at least, {trace}", -100.0, -14.6, max(least),
                  reason="of the paper's three models: -17.5, -18.1 and -14.6"),
            Claim(f"the mixture beats the best placement of another data set, {trace}", -100.0,
                  0.0, max(mixed.values()), stated=False, tolerance=0.0,
                  reason=f"judged on {each}"),
            Claim(f"the mixture beats every single placement in the mean of all data sets, {trace}",
                  -100.0, 0.0, overall.mean, stated=False, tolerance=0.0, interval=overall[1:],
                  reason=f"against the placement of {best}"),
        ]  # fmt: skip
    draw = bars(rows, "judged_on", "copies", "fitted_on", "trace", label="copies a token, layer")
    return Reproduction("figure_6", "Placements on other data sets", rows, claims, draw)
