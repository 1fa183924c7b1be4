"""Write the tables of evaluation.md from the folders that `eldr-sim reproduce eldr` wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

PAGE = Path(__file__).with_name("evaluation.md")
POLICIES = ["random", "round_robin", "jsq", "p2c", "domain", "eldr"]


def tables(folders: list[Path]) -> str:
    """Return a table of all policies for each workload and model: figures 11 and 12."""
    parts = []
    for figure in ("figure_11", "figure_12"):
        runs = pd.concat(
            [pd.read_csv(path) for f in folders if (path := f / f"{figure}.csv").exists()]
        )
        for (workload, model), of in runs.groupby(["workload", "model"], sort=False):
            parts.append(f"### {workload.capitalize()} workload, {model}\n")
            parts.append("| requests/s | " + " | ".join(f"`{p}`" for p in POLICIES) + " |")
            parts.append("|---" * (len(POLICIES) + 1) + "|")
            for rate, at in of.groupby("request_rate"):
                own = at.set_index("policy")
                cells = [
                    f"{own.median_tpot_ms[p]:.2f} / {own.p99_tpot_ms[p]:.2f} / "
                    f"{own.median_ttft_ms[p]:.0f} / {own.mean_active_experts_per_token[p]:.1f}"
                    for p in POLICIES
                ]
                parts.append(f"| {rate:g} | " + " | ".join(cells) + " |")
            parts.append("")
    return "\n".join(parts).rstrip()


def claims(folders: list[Path]) -> str:
    """Return the table of every claim."""
    lines = ["| figure | claim | paper | ours | direction | size | why it differs |"]
    lines.append("|---" * 7 + "|")
    every = pd.concat([pd.read_csv(folder / "claims.csv") for folder in folders])
    number = every.figure.str.extract(r"(\d+)")[0].astype(int)
    every = every.assign(table=every.figure.str.startswith("table"), number=number)
    for row in every.sort_values(["table", "number"], kind="stable").itertuples():
        low, high, unit = row.paper_low, row.paper_high, "" if pd.isna(row.unit) else row.unit
        span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        paper = "no figure" if pd.isna(low) else f"{span} {unit}".strip()
        ours = "-" if pd.isna(row.ours) else f"{row.ours:.2f}"
        reason = "" if pd.isna(row.reason) else row.reason
        name = row.figure.replace("_", " ").capitalize()
        lines.append(
            f"| {name} | {row.claim} | {paper} | {ours} | {row.direction} | {row.size} | {reason} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Replace what stands between the markers of the page."""
    folders = [Path(argument) for argument in sys.argv[1:]]
    page = PAGE.read_text(encoding="utf-8")
    for name, text in {"claims": claims(folders), "tables": tables(folders)}.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = page.split(start)
        after = rest[rest.index(end.lstrip("\n")) + len(end) - 1 :]
        page = before + start + text + end + after
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
