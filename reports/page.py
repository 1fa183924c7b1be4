"""Page of a report: one self-contained HTML file of one or more result folders."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eldr_sim import __version__
from eldr_sim.errors import PLOT, InputError, needed
from eldr_sim.kinds import AnyPath
from eldr_sim.outputs import whole_file
from eldr_sim.reports.cells import number, plain
from eldr_sim.reports.comparison_section import comparison_section, rows_section, what_if_section
from eldr_sim.reports.folders import Folder, Kind, contents_of, open_folders
from eldr_sim.reports.pictures import Colours
from eldr_sim.reports.plan_section import plan_section
from eldr_sim.reports.run_section import runs_section
from eldr_sim.reports.sweep_section import sweep_section

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

#: How the section of a kind of folder is made, and its template.
_SECTIONS: dict[Kind, tuple[Callable[[Folder, Colours], dict[str, Any]], str]] = {
    "comparison": (comparison_section, "comparison.html"),
    "what-if": (what_if_section, "comparison.html"),
    "drafts": (rows_section, "rows.html"),
    "autoscalers": (rows_section, "rows.html"),
    "sweep": (sweep_section, "sweep.html"),
    "plan": (plan_section, "plan.html"),
}


def report(folders: Sequence[AnyPath]) -> str:
    """Return the HTML of a report of result folders, runs side by side, each other with a section.
    Raises InputError if one is not a result or cannot be read, or Plotly is not installed."""
    from markupsafe import Markup

    get_plotlyjs = needed("plotly.offline", "report", PLOT).get_plotlyjs
    environment = _environment()
    assets = files("eldr_sim.reports") / "assets"
    plotly, own = get_plotlyjs(), (assets / "report.js").read_text(encoding="utf-8")
    packed = zlib.compress(plotly.encode(), 9)
    return environment.get_template("page.html").render(
        version=__version__,
        style=Markup((assets / "report.css").read_text(encoding="utf-8")),
        script=Markup(own),
        packed=Markup(_digits(packed)),
        packed_bytes=len(packed),
        hashes=[_hash(script) for script in (plotly, own)],
        sections=_sections(open_folders([Path(folder) for folder in folders]), environment),
    )


def write_report(folders: Sequence[AnyPath], out: AnyPath, *, force: bool = False) -> None:
    """Write an HTML report of one or more result folders, completely or not at all.

    Args:
        folders: results of ``run``, ``compare``, ``plan``, ``sweep`` or ``what-if``.
        out: the file to write.
        force: whether to replace ``out``.

    Raises:
        InputError: a folder is not a result, or ``out`` exists without ``force`` or cannot be
            written.
    """
    out = Path(out)
    if out.is_dir():
        raise InputError("out", f"{out} is a folder", "a file, such as report.html")
    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "a new file, or --force to replace it")
    data = report(folders).encode("utf-8", "replace")
    with whole_file(out) as temporary:
        temporary.write_bytes(data)


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("eldr_sim.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "plain": plain}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _sections(folders: Sequence[Folder], environment: Environment) -> list[tuple[str, Markup]]:
    from jinja2 import UndefinedError
    from markupsafe import Markup

    colours = Colours()
    runs = [folder for folder in folders if folder.kind == "run"]
    sections = []
    for folder in folders:
        if folder.kind == "run" and folder is not runs[0]:
            continue
        with contents_of(folder):
            section = section_of(folder, colours, runs)
            name = "run.html" if folder.kind == "run" else _SECTIONS[folder.kind][1]
            template = environment.get_template(name)
            try:
                content = template.render(section=section)
            except UndefinedError as error:
                raise LookupError(str(error)) from error
        sections.append((section["title"], Markup(content)))
    return sections


def section_of(folder: Folder, colours: Colours, runs: Sequence[Folder] = ()) -> dict[str, Any]:
    """Return the content of a folder's section; that of a run shows all ``runs``."""
    if folder.kind == "run":
        return runs_section(runs or [folder], colours)
    return _SECTIONS[folder.kind][0](folder, colours)


def _digits(packed: bytes) -> str:
    """Return bytes in base 85, without a character that could end or open an element."""
    return base64.b85encode(packed).decode().replace("<", ",")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
