"""The page: one HTML file of one or more folders of results, complete without a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree as ET

from eldr_sim import __version__
from eldr_sim.errors import InputError
from eldr_sim.outputs import whole_file
from eldr_sim.reports.comparisons import comparison_section
from eldr_sim.reports.folders import Folder, open_folders
from eldr_sim.reports.markup import add, el, to_html
from eldr_sim.reports.plans import plan_section
from eldr_sim.reports.runs import runs_section
from eldr_sim.reports.sweeps import sweep_section

_SECTIONS = {"comparison": comparison_section, "sweep": sweep_section, "plan": plan_section}


def report(folders: Sequence[Path]) -> str:
    """Return the HTML of a report.

    Parameters
    ----------
    folders
        What ``eldr-sim run``, ``compare``, ``sweep`` or ``plan`` wrote, in any mixture. Runs stand
        side by side in one section, each other folder has a section of its own.

    Raises
    ------
    InputError
        If a folder is no result or cannot be read.
    """
    page = _page(_sections(open_folders(folders)))
    return "<!DOCTYPE html>\n" + to_html(page) + "\n"


def write_report(folders: Sequence[Path], out: Path, *, force: bool = False) -> None:
    """Write a report, whole or not at all.

    Parameters
    ----------
    folders
        See :func:`report`.
    out
        File to make.
    force
        Replace an earlier file.

    Raises
    ------
    InputError
        If a folder is no result, or ``out`` exists or cannot be written.
    """
    if out.is_dir():
        raise InputError("out", f"{out} is a folder", "a file, such as report.html")
    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "a new file, or --force to replace it")
    data = report(folders).encode("utf-8", "replace")
    with whole_file(out) as temporary:
        temporary.write_bytes(data)


def _sections(folders: Sequence[Folder]) -> list[tuple[str, list[ET.Element]]]:
    """Return title and content of each section, in the order of the folders."""
    runs = [folder for folder in folders if folder.kind == "run"]
    sections = []
    for folder in folders:
        if folder.kind == "run" and folder is not runs[0]:
            continue
        try:
            sections.append(
                runs_section(runs) if folder.kind == "run" else _SECTIONS[folder.kind](folder)
            )
        except (KeyError, TypeError, IndexError, ValueError) as error:
            # The files are there and readable, yet hold something else than their names say.
            raise InputError(
                "DIR",
                f"{folder.name} has a {folder.kind}'s files but not its contents "
                f"({type(error).__name__}: {' '.join(str(error).split())})",
                "a folder written by this version of eldr-sim",
            ) from error
    return sections


def _page(sections: Sequence[tuple[str, list[ET.Element]]]) -> ET.Element:
    style, script = _asset("report.css"), _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = sections[0][0] if len(sections) == 1 else "eldr-sim report"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="generator", content=f"eldr-sim {__version__}"),
        el("link", rel="icon", href="data:,"),
        el("title", title if len(sections) > 1 else f"{title} · eldr-sim"),
        el("style", style),
    )
    toggle = el("button", "Theme: automatic", type="button", id="theme", hidden="")
    bar = el("header", el("span", "eldr-sim", class_="brand"), " report", toggle, class_="bar")
    main = el("main")
    if len(sections) > 1:
        links = el("ul")
        for index, (name, _) in enumerate(sections):
            links.append(el("li", el("a", name, href=f"#s{index}")))
        add(main, el("h1", "Report"), el("nav", links, aria_label="Sections"))
    for index, (name, content) in enumerate(sections):
        heading = el("h1" if len(sections) == 1 else "h2", name)
        main.append(add(el("article", heading, id=f"s{index}"), *content))
    foot = el(
        "footer",
        f"Simulated by eldr-sim; report made by version {__version__}. Click on a heading to sort; "
        "hover over a picture, or focus it and use the arrow keys, to read its values.",
    )
    tip = el("div", id="tip", role="status", hidden="")
    return el("html", head, el("body", bar, main, foot, tip, el("script", script)), lang="en")


def _asset(name: str) -> str:
    return (files("eldr_sim.reports") / "assets" / name).read_text(encoding="utf-8")
