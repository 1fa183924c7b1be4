"""Pictures of rows as PNG in one style: lines, bars and maps, in panels, as columns say."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import IO, Any, TypeAlias

import numpy as np

from eldr_sim.errors import PLOT, needed

#: Colours of series, in order: those of the light theme of reports (``reports/assets/report.css``).
PALETTE = ("#183b85", "#c37600", "#269e53", "#812ce3", "#a42c00", "#6e7cc4", "#5b222d", "#a48a9c")
#: Smallest size of a label, points.
SMALLEST = 8


def write_picture(
    to: PathLike[str] | IO[bytes],
    draw: Callable[[Any], None],
    size: tuple[float, float] = (8.0, 5.0),
    *,
    title: str = "",
    dpi: int = 120,
) -> None:
    """Draw on a matplotlib figure and write it; equal drawings give equal bytes.

    Args:
        to: a path or an open file.
        draw: draws on the figure. A panel with labels gets a legend unless ``draw`` made one or a
            panel before shows the same.
        size: width and height, inches.
        title: title over all panels.
        dpi: dots per inch.

    Raises:
        InputError: matplotlib is not installed.
    """
    needed("matplotlib", "plot", PLOT)
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({
        "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": SMALLEST,
        "axes.prop_cycle": cycler(color=PALETTE),
    }):  # fmt: skip
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        draw(figure)
        if title:
            figure.suptitle(title, fontsize=10)
        shown: list[list[str]] = [[]]
        for axes in figure.axes:
            labels = axes.get_legend_handles_labels()[1]
            if not (figure.legends or axes.get_legend() or labels in shown):
                axes.legend()
            shown.append(labels)
            if axes.images:
                axes.grid(False)
        figure.savefig(to, dpi=dpi, metadata={"Software": None})


Rows: TypeAlias = Sequence[Mapping[str, Any]]
Draw: TypeAlias = Callable[[Any], None]
#: A column, or several whose values together tell rows apart.
Key: TypeAlias = str | tuple[str, ...]
_LONG = 80  # letters of all names under the bars of a panel


def lines(
    rows: Rows, x: str, y: Key, by: Key = (), panel: Key = (), mark: str = ".-", **settings: Any
) -> Draw:
    """Return a function that draws lines over ``x``.

    Args:
        rows: the data, a mapping a row.
        x: column of the horizontal axis.
        y: columns to draw, a panel each.
        by: columns; each combination of their values is a line.
        panel: columns; each combination of their values is a panel.
        mark: matplotlib's format of a line.
        settings: properties of a panel's axes.

    Returns:
        A function for `write_picture`.
    """

    def draw(figure: Any) -> None:
        for axes, column, mine in _panels(figure, rows, y, panel):
            for name in _names(rows, by):
                own = [row for row in mine if _name(row, by) == name]
                axes.plot([r[x] for r in own], [r[column] for r in own], mark, label=name or None)
            axes.set(**{"xlabel": x} | settings)

    return draw


def bars(
    rows: Rows,
    x: Key,
    y: Key,
    by: Key = (),
    panel: Key = (),
    ends: tuple[str, str] | None = None,
    **settings: Any,
) -> Draw:
    """Return a function that draws bars; long names make the bars horizontal.

    Args:
        rows: the data, a mapping a row.
        x: columns; each combination of their values is a group of bars.
        y: columns of the values.
        by: columns; each combination of their values is a bar of a group.
        panel: columns; each combination of their values is a panel.
        ends: columns of the interval around ``y``.
        settings: properties of a panel's axes; ``label`` and ``scale`` are of the values' axis.

    Returns:
        A function for `write_picture`.
    """

    def draw(figure: Any) -> None:
        names, parts = _names(rows, x), _names(rows, by)
        across, width = sum(map(len, names)) > _LONG, 0.8 / len(parts)
        for axes, column, mine in _panels(figure, rows, y, panel, across):
            for i, part in enumerate(parts):
                own = [row for row in mine if _name(row, by) == part]
                at = np.array([names.index(_name(row, x)) for row in own]) + (i + 0.5) * width - 0.4
                look: dict[str, Any] = {"label": part} if part else {}
                if ends is not None and own:
                    error = np.abs([[row[end] - row[column] for row in own] for end in ends])
                    look["xerr" if across else "yerr"] = error
                (axes.barh if across else axes.bar)(at, [row[column] for row in own], width, **look)
            axis = axes.yaxis if across else axes.xaxis
            axis.set_ticks(range(len(names)), names, fontsize=SMALLEST)
            side, more = "x" if across else "y", {"label": column} | settings
            if across:
                axes.set_ylabel("")
            axes.set(**{f"{side}{k}" if k in ("label", "scale") else k: v for k, v in more.items()})

    return draw


def field(rows: Rows, x: str, y: str, value: str, panel: Key = (), spell: str = "{:.2f}") -> Draw:
    """Return what draws a map, ``x`` by ``y``, of coloured, spelled cells; words have colours,
    too. The figure grows until labels and cells have room."""

    def draw(figure: Any) -> None:
        from matplotlib.colors import ListedColormap

        words = list(dict.fromkeys(r[value] for r in rows if isinstance(r[value], str)))
        n_columns, n_lines = (len({row[key] for row in rows}) for key in (x, y))
        width, height = figure.get_size_inches()
        room = max(width, 0.55 * n_columns * len(_names(rows, panel)) + 2.0)
        figure.set_size_inches(room, max(height, 0.3 * n_lines + 1.0))
        for axes, _, mine in _panels(figure, rows, (value,), panel):
            columns, lines = (list(dict.fromkeys(row[key] for row in mine)) for key in (x, y))
            grid = np.full((len(lines), len(columns)), np.nan)
            for row in mine:
                at = lines.index(row[y]), columns.index(row[x])
                grid[at] = words.index(row[value]) if words else row[value]
                said = spell.format(row[value])
                axes.text(at[1], at[0], said, ha="center", va="center", fontsize=SMALLEST)
            look: dict[str, Any] = {"cmap": "coolwarm"}
            if words:
                look = {"cmap": ListedColormap(PALETTE), "vmin": -0.5, "vmax": 7.5, "alpha": 0.5}
                grid %= len(PALETTE)
            cells = axes.imshow(grid, aspect="auto", **look)
            if not words:
                figure.colorbar(cells, ax=axes).set_label(value, fontsize=SMALLEST)
            axes.set_xticks(range(len(columns)), columns, fontsize=SMALLEST)
            axes.set_yticks(range(len(lines)), lines, fontsize=SMALLEST)
            axes.set(xlabel=x, ylabel=y)

    return draw


def _name(row: Mapping[str, Any], key: Key) -> str:
    values = [row[k] for k in ((key,) if isinstance(key, str) else key)]
    known = [v for v in values if v is not None]
    return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in known)


def _names(rows: Rows, key: Key) -> list[str]:
    """Return the values of a column, in order of appearance; one empty name where there is none."""
    return list(dict.fromkeys(_name(row, key) for row in rows))


def _panels(
    figure: Any, rows: Rows, y: Key, panel: Key, across: bool = False
) -> Iterator[tuple[Any, str, Rows]]:
    """Yield the axes of each value of ``panel`` and column of ``y``, the column and the rows."""
    columns, names = (y,) if isinstance(y, str) else y, _names(rows, panel)
    shape = (1, len(columns)) if len(names) == 1 else (len(columns), len(names))
    share = "row" if across or len(names) > 1 else "none"
    grid = figure.subplots(*shape, squeeze=False, sharey=share).reshape(len(columns), len(names))
    for line, column in zip(grid, columns, strict=True):
        for axes, name in zip(line, names, strict=True):
            axes.set_title(name if len(columns) == 1 else f"{name}: {column}".strip(": "))
            axes.title.set_fontsize(SMALLEST)
            if axes is line[0]:
                axes.set_ylabel(column, fontsize=SMALLEST)
            axes.tick_params(labelsize=SMALLEST)
            yield axes, column, [row for row in rows if _name(row, panel) == name]
