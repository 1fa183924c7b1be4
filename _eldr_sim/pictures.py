"""Pictures of results as PNG files, in one style: a light grid, and each legend once."""

from collections.abc import Callable
from os import PathLike
from typing import IO, Any

from eldr_sim.errors import PLOT, needed


def write_picture(
    to: PathLike[str] | IO[bytes],
    draw: Callable[[Any], None],
    size: tuple[float, float] = (8.0, 5.0),
    *,
    title: str = "",
    dpi: int = 120,
) -> None:
    """Draw on a matplotlib figure, and write it; the same drawing gives the same bytes.

    ``to``: the PNG; ``draw``: draws; A panel with labels gets a legend, unless ``draw`` made one or
    a panel before shows the same labels; ``size``: inches; ``title``: over all panels; ``dpi``:
    dots per inch. Raises InputError where matplotlib is not installed.
    """
    needed("matplotlib", "plot", PLOT)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 8}):
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
