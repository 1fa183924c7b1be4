"""Write the tables of evaluation.md.

Takes the folders of `eldr-sim sweep docs/evaluation.yaml` and of `eldr-sim reproduce eldr`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

PAGE = Path(__file__).with_name("evaluation.md")
BALANCERS = ["random", "round_robin", "jsq", "p2c"]
POLICIES = [*BALANCERS, "domain", "eldr"]
P50, P99, EXPERTS = "median_tpot_ms", "p99_tpot_ms", "mean_active_experts_per_step"
#: Workload, what, metric, policy, reference (None: the best load balancer by median TPOT at each
#: rate), and what ELDR's sections 6.1 to 6.3 say.
CLAIMS = [
    ("task", "median TPOT", P50, "eldr", None, "-7.0 to -13.9%"),
    ("task", "p99 TPOT", P99, "eldr", None, "-3.4 to -6.0%"),
    ("task", "median TPOT", P50, "domain", None, "-6.8 to -9.7%"),
    ("task", "median TPOT", P50, "eldr", "domain", "-1.4 to -6.9%"),
    ("task", "p99 TPOT", P99, "eldr", "domain", "-1.6 to -4.5%"),
    ("task", "active experts (Fig. 13)", EXPERTS, "eldr", "round_robin", "-22.0%"),
    ("language", "median TPOT", P50, "eldr", None, "-5.9 to -10.0%"),
    ("language", "p99 TPOT", P99, "eldr", None, "-6.2% (Qwen3)"),
    ("language", "median TPOT", P50, "domain", None, "within 3% of `round_robin`"),
    ("language", "median TPOT", P50, "eldr", "domain", "-5.7 to -9.1%"),
    ("language", "p99 TPOT", P99, "eldr", "domain", "-7.0 to -9.5%"),
]


def difference(runs: pd.DataFrame, metric: str, policy: str, reference: str | None) -> float:
    """Mean over the rates of a policy's difference from the reference, %."""
    mean = runs.groupby(["request_rate", "policy"]).mean(numeric_only=True)
    changes = []
    for rate in sorted(set(runs.request_rate)):
        of = mean.loc[rate]
        best = reference or of.loc[BALANCERS, P50].idxmin()
        changes.append(100 * (of.loc[policy, metric] / of.loc[best, metric] - 1))
    return sum(changes) / len(changes)


def beside_the_paper(runs: pd.DataFrame) -> str:
    """Return the table of differences."""
    gpus = list(dict.fromkeys(runs.gpu))
    lines = [f"| | paper | {' | '.join(gpus)} |", "|---" * (2 + len(gpus)) + "|"]
    for workload, what, metric, policy, reference, paper in CLAIMS:
        cells = []
        for gpu in gpus:
            of = runs[(runs.gpu == gpu) & (runs.workload == workload)]
            cells.append(f"{difference(of, metric, policy, reference):+.1f}%")
        against = f" against `{reference}`" if reference else ""
        name = f"{workload}, {what}, `{policy}`{against}"
        lines.append(f"| {name} | {paper} | {' | '.join(cells)} |")
    at_60 = runs[(runs.workload == "task") & (runs.request_rate == 60) & (runs.policy == "eldr")]
    cells = [f"{at_60[at_60.gpu == gpu].median_ttft_ms.mean():.1f} ms" for gpu in gpus]
    lines.append(f"| task, median TTFT at 60/s, `eldr` | 69 ms | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(runs: pd.DataFrame) -> str:
    """Return a table of all figures for each workload and GPU."""
    parts = []
    for (gpu, workload), of in runs.groupby(["gpu", "workload"], sort=False):
        parts.append(f"### {workload.capitalize()} workload, {gpu}\n")
        parts.append("| requests/s | " + " | ".join(f"`{p}`" for p in POLICIES) + " |")
        parts.append("|---" * (len(POLICIES) + 1) + "|")
        for rate, at in of.groupby("request_rate"):
            mean = at.groupby("policy").mean(numeric_only=True)
            cells = [
                f"{mean.median_tpot_ms[p]:.2f} / {mean.p99_tpot_ms[p]:.2f} / "
                f"{mean.median_ttft_ms[p]:.0f} / {mean.mean_active_experts_per_step[p]:.1f}"
                for p in POLICIES
            ]
            parts.append(f"| {rate:g} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts).rstrip()


def claims(folder: Path) -> str:
    """Return the table of every claim."""
    lines = ["| figure | claim | paper | ours | direction | size | why it differs |"]
    lines.append("|---" * 7 + "|")
    for row in pd.read_csv(folder / "claims.csv").itertuples():
        low, high, unit = row.paper_low, row.paper_high, "" if pd.isna(row.unit) else row.unit
        span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        paper = "no figure" if pd.isna(low) else f"{span} {unit}".strip()
        ours = "-" if pd.isna(row.ours) else f"{row.ours:.2f}"
        agrees = [
            "-" if pd.isna(value) else "agrees" if str(value).lower() == "true" else "differs"
            for value in (row.direction_agrees, row.size_agrees)
        ]
        reason = "" if pd.isna(row.reason) else row.reason
        name = row.figure.replace("_", " ").capitalize()
        lines.append(
            f"| {name} | {row.claim} | {paper} | {ours} | {' | '.join(agrees)} | {reason} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Replace what stands between the markers of the page."""
    runs = pd.read_parquet(Path(sys.argv[1]) / "points.parquet")
    parts = {
        "paper": beside_the_paper(runs),
        "tables": tables(runs),
        "claims": claims(Path(sys.argv[2])),
    }
    page = PAGE.read_text(encoding="utf-8")
    for name, text in parts.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = page.split(start)
        after = rest[rest.index(end.lstrip("\n")) + len(end) - 1 :]
        page = before + start + text + end + after
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
