"""Render the pages' tables: of claims, of data, of commands and of names.

``python docs/render.py`` fills in the verdicts of ``docs/claims.csv`` and writes what stands
between the markers ``<!-- KIND: WHAT -->`` and ``<!-- end of KIND -->`` of every page: ``claims``
rows of that table, ``data`` a table of ``docs/data``, ``commands`` and ``python`` what the package
has.
``python docs/render.py take STUDY DIR ...`` first takes over the claims of folders that ``eldr-sim
reproduce`` wrote; ``python docs/render.py pictures`` draws ``docs/images/claims_*.png``. A test
fails where a page, a verdict and the data differ.

Columns of a claim: ``page`` is the study, whose page is ``studies/PAGE/README.md``. ``low`` and
``high`` are the ends of the published range (equal for one figure; of an error 0 and its goal),
``stated`` whether the publication gives them or we read them from its words, ``ours`` our value
with its 95% interval, ``neutral`` the value of no effect (``by unit``: 0 of % and points, 1 of x;
``none``: a count, a time or a share has no direction), ``tolerance`` the distance from the range at
which a size still agrees (none: it is not judged), ``noise`` the difference between repeats of the
measurement, ``shown`` whether the row stands on its page. ``role`` is ``claim``, ``trend`` (a claim
about how an effect changes, judged by its size), ``input`` (the figure went into the simulator),
``error`` (of a prediction) or ``other`` (another simulator's error)."""

import csv
import re
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import click

import eldr_sim
from eldr_sim.charts import PALETTE, SMALLEST
from eldr_sim.cli import api, api_many
from eldr_sim.cli.main import cli
from eldr_sim.outputs import write_rows
from eldr_sim.planning.studies.figures import Claim
from eldr_sim.traces.requests.logs.formats import known_formats

DOCS = Path(__file__).parent
TABLE = DOCS / "claims.csv"
DATA = DOCS / "data"
MARKED = re.compile(r"(<!-- (\w+): ([^>]*) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
_GOOD, _FAIR, _BAD, _OTHER = PALETTE[2], PALETTE[1], PALETTE[4], PALETTE[7]
#: Colours of verdicts in pictures.
COLOURS = {"agrees": _GOOD, "direction agrees": PALETTE[0], "met": _GOOD,
           "within the noise": PALETTE[0], "input": _OTHER, "size differs": _FAIR,
           "missed": _FAIR, "no effect": _FAIR, "contradicts": _BAD}  # fmt: skip
Row = dict[str, str]


def number(text: str) -> float | None:
    """Return the number of a cell, if it has one."""
    return float(text) if text else None


def judged(row: Row) -> tuple[str, str]:
    """Return the verdicts on direction and size of a row."""
    low, high, ours = number(row["low"]), number(row["high"]), number(row["ours"])
    if row["role"] == "other" or low is None or high is None or not row["tolerance"]:
        return "-", "-"
    if row["role"] == "error":
        if ours is None or ours <= high:
            return "-", "-" if ours is None else "met"
        return "-", "within the noise" if ours <= (number(row["noise"]) or 0.0) else "missed"
    neutral: Any = {"none": None, "by unit": "by unit"}.get(row["neutral"], row["neutral"])
    ends = number(row["ours_low"]), number(row["ours_high"])
    claim = Claim(
        row["claim"], low, high, ours, row["unit"], float(row["tolerance"]),
        stated=row["stated"] == "yes", given=row["role"] == "input",
        neutral=neutral if neutral in (None, "by unit") else float(neutral),
        interval=None if ends[0] is None or ends[1] is None else (ends[0], ends[1]),
        trend=row["role"] == "trend",
    )  # fmt: skip
    return claim.direction, claim.size


def verdict(row: Row) -> str:
    """Return both verdicts in a word or two."""
    direction, size = row["direction"], row["size"]
    if not row["ours"]:
        return "not tested"
    if direction in ("contradicts", "no effect", "input"):
        return direction
    if direction == "agrees":
        return "agrees" if size == "agrees" else "direction agrees"
    return "size differs" if size == "differs" else size


def read() -> list[Row]:
    """Read the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def figure(text: str) -> str:
    """Return a number as pages print it: three digits, or all before the point."""
    value = float(text)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_unit(text: str, unit: str) -> str:
    """Return a value or a range with its unit."""
    return text + unit if unit in ("", "%") else f"{text} {unit}"


def theirs(row: Row) -> str:
    """Return what the paper or publication says."""
    if row["stated"] != "yes":
        return "in words"
    if not row["high"]:
        return ""
    if row["role"] == "error":
        return with_unit(f"at most {figure(row['high'])}", row["unit"])
    ends = dict.fromkeys(figure(row[end]) for end in ("low", "high"))
    return with_unit(" to ".join(ends), row["unit"])


def ours(row: Row) -> str:
    """Return our value, with its interval, or the noise of what an error is of."""
    if not row["ours"]:
        return ""
    value = with_unit(figure(row["ours"]), row["unit"])
    if row["ours_low"]:
        return f"{value} [{figure(row['ours_low'])}, {figure(row['ours_high'])}]"
    return f"{value} (noise {figure(row['noise'])}%)" if row["noise"] else value


def table(rows: list[Row]) -> str:
    """Return a Markdown table of rows."""
    errors = all(row["role"] in ("error", "other") for row in rows)
    head = ["where", "what", "goal" if errors else "theirs", "ours", "verdict"]
    lines = [head, ["---"] * len(head)]
    lines += [[r["where"], r["claim"], theirs(r), ours(r), verdict(r)] for r in rows]
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """Return lines of cells, the head first, as a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


#: Verdicts on claims, each claim one, and what summaries say of so many.
VERDICTS = {"agrees": "agree in size", "direction agrees": "in direction",
            "no effect": "show no effect", "contradicts": "contradict",
            "size differs": "differ", "not tested": "not tested"}  # fmt: skip


def summary(rows: list[Row]) -> str:
    """Return how many claims agree."""
    said = Counter(verdict(r) for r in rows if r["role"] in ("claim", "trend"))
    parts = []
    each = [f"{said[name]} {words}" for name, words in VERDICTS.items() if said[name]]
    if each:
        parts.append(f"Of {sum(said[name] for name in VERDICTS)} claims {', '.join(each)}.")
    goals = Counter(r["size"] for r in rows)
    met = [goals[name] for name in ("met", "within the noise", "missed")]
    if any(met):
        words = "Of {} goals {} are met, {} missed by less than the noise, {} missed."
        parts.append(words.format(sum(met), *met))
    inputs = sum(row["role"] == "input" for row in rows)
    return " ".join(parts + [f"{inputs} figures are inputs."] * bool(inputs))


def claims(what: str, rows: list[Row]) -> str:
    """Return the rows of ``STUDY[/TABLE] [summary]`` that its page shows, or how many agree."""
    of, _, how = what.partition(" ")
    page, _, part = of.partition("/")
    own = [r for r in rows if r["page"] == page and part in ("", r["table"])]
    assert own, f"no rows of {what}"
    return summary(own) if how == "summary" else table(chosen(own))


def chosen(rows: list[Row]) -> list[Row]:
    """Return the rows that a page shows: those marked, and all that fail."""
    return [r for r in rows if r["shown"] or r["direction"] in ("contradicts", "no effect")]


def studies(_: str, rows: list[Row]) -> str:
    """Return the studies that have claims, with the title of each and how many agree."""
    lines = [["study", "page", "claims"], ["---"] * 3]
    for study in sorted({row["page"] for row in rows}):
        title = home(study).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        own = [row for row in rows if row["page"] == study]
        lines.append([f"`{study}`", title, summary(own)])
    return markdown(lines)


def data(name: str, _: list[Row]) -> str:
    """Return a table of ``docs/data``."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *lines = csv.reader(file)
    return markdown([head, ["---"] * len(head), *lines])


def commands(*_: object) -> str:
    """Return every command with its first sentence."""
    lines = [["command", "what it does"], ["---", "---"]]

    def add(group: click.Group, path: str) -> None:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                add(command, f"{path} {name}")
            elif command is not None and not command.hidden:
                lines.append([f"`{path} {name}`", command.get_short_help_str(limit=200)])

    add(cli, "eldr-sim")
    return markdown(lines)


def formats(name: str, _: list[Row]) -> str:
    """Return a table of ``docs/data/formats.csv``, or of the formats of request logs."""
    if name != "request logs":
        with (DATA / "formats.csv").open(encoding="utf-8", newline="") as file:
            lines = [line[1:] for line in csv.reader(file) if line[0] == name]
        width = sum(map(bool, lines[0]))
        head, *rest = [line[:width] for line in lines]
        return markdown([head, ["---"] * width, *rest])
    lines = [["format", "what it is", "read by"]]
    for known in known_formats():
        use = f"`--{known.use}`" if known.use else f"not read: {known.way}"
        lines.append([f"`{known.name}`", known.about.replace("|", ","), use])
    return markdown(lines)


def python(what: str, _: list[Row]) -> str:
    """Return every public name with its first sentence; of ``results`` what each result has."""
    if what == "results":
        lines = [
            [f"`{kind.__name__}.{name}`", _sentence(getattr(kind, name))]
            for kind in (api.Run, api_many.Comparison, api_many.Plan, api_many.WhatIf)
            for name in _members(kind)
        ]
        return markdown([["member", "what it is"], ["---", "---"], *lines])
    names = {name: getattr(eldr_sim, name) for name in eldr_sim.__all__}
    first = {name: (own.__doc__ or "").strip().split("\n\n")[0] for name, own in names.items()}
    first["__version__"] = "The version of the installed package, as text."
    lines = [[f"`{name}`", " ".join(text.split())] for name, text in first.items()]
    return markdown([["name", "what it is"], ["---", "---"], *lines])


def _members(kind: type) -> list[str]:
    """Return the public members of a result that its own classes of the Python API declare."""
    own = [each for each in kind.__mro__ if each.__module__ in (api.__name__, api_many.__name__)]
    return sorted({name for each in own for name in vars(each) if not name.startswith("_")})


def _sentence(member: object) -> str:
    return " ".join((member.__doc__ or "").strip().split("\n\n")[0].split())


#: What was checked, `SHORT` in the README: words, page, where, and the claim with {m} the metric.
CHECKED = [
    ("101 published runs of GPT-OSS-120B on vLLM, 1 to 8 GPUs, H100 and H200", "silicon",
     "all (101 rows)", "mean {m}, {q} of the error"),
    ("ELDR's own cluster, 24 MI300X, cells that nothing was fitted to", "eldr_measured",
     "all cells", "{m} p50, fitted kernels, {q} of the error"),
    ("the same, kernels from public figures alone", "eldr_measured", "all cells",
     "{m} p50, derived kernels, {q} of the error"),
    ("12 stages of Mixtral on vLLM, from recorded requests", "silicon",
     "ours, graphs padded as vLLM 0.15 did (`experts`)",
     "mean {m}, {q} of the error over 12 stages"),
    ("a live vLLM 0.32 on two CPU cores, one engine", "live",
     "AMD EPYC, before the probe: colocated", "{m} p50"),
    ("the same, prefill and decode apart", "live", "AMD EPYC, before the probe: 1P1D", "{m} p50"),
    ("the same, two decode engines that share the two cores", "live",
     "AVX-512, calibrated together: 1P2D", "{m} p50"),
]  # fmt: skip


SHORT = CHECKED[:2] + CHECKED[4:5]


def checked(which: str, rows: list[Row]) -> str:
    """Return the errors against what others measured, median and 90th percentile."""
    known = {(r["page"], r["where"], r["claim"].lower()): f"{float(r['ours']):.1f}%"
             for r in rows if r["ours"]}  # fmt: skip
    lines = [["held against", "TPOT errs by", "TTFT errs by"], ["---"] * 3]
    for words, page, where, claim in CHECKED if which == "all" else SHORT:
        asked = [[claim.format(m=m, q=q).lower() for q in ("median", "90th percentile")]
                 for m in ("TPOT", "TTFT")]  # fmt: skip
        found = [[known.get((page, where, c)) for c in dict.fromkeys(each)] for each in asked]
        assert all(each[0] for each in found), f"no rows of {where}: {asked}"
        lines.append([words, *("; ".join(filter(None, each)) for each in found)])
    return markdown(lines)


KINDS: dict[str, Callable[[str, list[Row]], str]] = {
    "claims": claims, "data": data, "commands": commands, "python": python, "formats": formats,
    "checked": checked, "studies": studies,
}  # fmt: skip


def page_with_tables(text: str, rows: list[Row]) -> str:
    """Return a page with what stands between its markers made again."""

    def made(found: re.Match[str]) -> str:
        if found[2] not in KINDS:
            return found[0]
        return f"{found[1]}{KINDS[found[2]](found[3], rows)}\n{found[4]}"

    return MARKED.sub(made, text)


def picture(page: str, rows: list[Row]) -> None:
    """Draw the percentages that a page shows: what is claimed, or a goal, and ours."""
    import matplotlib.pyplot as plt

    own = [r for r in chosen(rows) if r["page"] == page and r["unit"] in ("%", "points")]
    own = [r for r in own if r["ours"] and r["high"] and r["stated"] == "yes"][:30]
    if not own:  # tables of other units, or of what only we state
        return
    figure_, axes = plt.subplots(figsize=(9, 1 + 0.27 * len(own)), layout="constrained")
    for y, row in enumerate(own):
        low, high = float(row["low"]), float(row["high"])
        axes.plot([low, high], [y, y], color="#b0b0b0", lw=6, marker="|", ms=13, mew=3, zorder=1)
        colour = COLOURS.get(verdict(row), _OTHER)
        axes.plot(float(row["ours"]), y, "o", color=colour, ms=7, zorder=3)
        if row["ours_low"]:
            ends = [float(row["ours_low"]), float(row["ours_high"])]
            axes.plot(ends, [y, y], color=colour, lw=1.5, zorder=2)
    axes.set_yticks(
        range(len(own)), [f"{r['where']}: {r['claim']}"[:88] for r in own], fontsize=SMALLEST
    )
    axes.axvline(0, color="black", lw=0.6)
    axes.invert_yaxis()
    near = [(float(r["ours"]), min(float(r["low"]), float(r["high"]), key=abs)) for r in own]
    ends = [min(map(min, near)), max(map(max, near))]
    axes.set_xlim(ends[0] - 0.1 * (ends[1] - ends[0]), ends[1] + 0.1 * (ends[1] - ends[0]))
    axes.tick_params(axis="x", labelsize=SMALLEST)
    goal = own[0]["role"] == "error"
    axes.set_xlabel(
        f"%: {'up to the goal' if goal else 'theirs'} (grey), ours (dot)", fontsize=SMALLEST
    )
    for said in dict.fromkeys(verdict(row) for row in own):
        name = "not judged" if said == "-" else said
        axes.plot([], [], "o", color=COLOURS.get(said, _OTHER), ms=7, label=name)
    figure_.legend(loc="outside upper center", ncols=5, fontsize=SMALLEST, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    (DOCS / "images").mkdir(exist_ok=True)
    about = {"Software": f"eldr-sim {eldr_sim.__version__}"}
    figure_.savefig(DOCS / "images" / f"claims_{page}.png", dpi=90, metadata=about)
    plt.close(figure_)


def take(rows: list[Row], page: str, folders: list[Path]) -> None:
    """Take over the claims of folders of ``eldr-sim reproduce``: known ones by figure and words.

    Of a figure that a folder has, what the command says no more goes; what is not tested stays.
    """
    known = {(row["where"], row["claim"]): row for row in rows if row["page"] == page}
    assert known, f"no rows of {page}"
    version = {"date": f"{date.today()}", "version": eldr_sim.__version__}
    for folder in folders:
        with (folder / "claims.csv").open(encoding="utf-8", newline="") as file:
            found = list(csv.DictReader(file))
            for new in found:
                new["figure"] = new["figure"].replace("_", " ").capitalize()
            said = {(new["figure"], new["claim"]) for new in found}
            figures = {new["figure"] for new in found}
            for key, row in known.items():
                if key not in said and key[0] in figures and row["ours"]:
                    print(f"gone: {key[0]}: {key[1]}")
                    rows.remove(row)
            for new in found:
                where = new.pop("figure")
                row = known.get((where, new["claim"]))
                if row is None:
                    print(f"new: {where}: {new['claim']}")
                    command = next(iter(known.values()))["command"]
                    row = dict.fromkeys(rows[0], "") | {"page": page, "table": "claims"}
                    rows.append(row | {"where": where, "command": command} | new | version)
                else:
                    # A reason that an experiment gave stays, where the command gives none.
                    if not new["reason"] and new["size"] == "differs":
                        new["reason"] = row["reason"]
                    role = row["role"] if row["role"] == "error" else new["role"]
                    before = verdict(row)
                    row |= new | {"role": role} | version
                    if row["experiment"] and verdict(row) != before:
                        print(f"verdict changed, experiment removed: {where}: {row['claim']}")
                        row["experiment"] = ""


def pages() -> list[Path]:
    """Return the pages that may have tables of claims."""
    root = DOCS.parent
    studies = [*sorted(root.glob("studies/*/*.md")), root / "tests" / "benchmarks" / "README.md"]
    return [root / "README.md", *sorted(DOCS.rglob("*.md")), *studies]


def home(study: str) -> Path:
    """Return the page of a study, a page of the site or the page of a folder of tests."""
    names = (f"studies/{study}/README.md", f"docs/{study}.md", f"tests/{study}/README.md")
    found = [DOCS.parent / name for name in names if (DOCS.parent / name).exists()]
    assert found, f"no page of {study}"
    return found[0]


def main() -> None:
    """Write the verdicts and the pages."""
    rows = read()
    if sys.argv[1:2] == ["take"]:
        take(rows, sys.argv[2], [Path(folder) for folder in sys.argv[3:]])
    for row in rows:
        row["direction"], row["size"] = judged(row)
    write_rows(TABLE, rows)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(page_with_tables(text, rows), encoding="utf-8")
    if sys.argv[1:2] == ["pictures"]:
        for name in dict.fromkeys(row["page"] for row in rows):
            picture(name, rows)


if __name__ == "__main__":
    main()
