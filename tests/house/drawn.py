"""What is wrong with a drawn figure: small labels, colours without a key, colours of no palette."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from matplotlib import colors
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.text import Text

from eldr_sim.charts import PALETTE, SMALLEST

#: Maps of values to colours that have a colour bar; those of words are made of the palette.
MAPS = {"Blues", "coolwarm", "viridis"}


@contextmanager
def drawings(monkeypatch: Any) -> Iterator[list[Figure]]:
    """Collect the figures that are written within the block; their files are small."""
    made: list[Figure] = []
    write = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        made.append(figure)
        write(figure, *args, **kwargs | {"dpi": 30})

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield made


def faults(figure: Figure) -> list[str]:
    """Return what a reader could not read.

    Args:
        figure: a drawn figure.

    Returns:
        Labels below `SMALLEST` points, colours that no palette has, colours that no legend, colour
        bar or label explains.
    """
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    found = [f"{t.get_text()!r}: {t.get_fontsize():g} points" for t in texts
             if t.get_fontsize() < SMALLEST]  # fmt: skip
    used, explained = set(), set()
    for axes in figure.axes:
        for artist in (*axes.lines, *axes.patches, *axes.collections):
            if axes.get_label() != "<colorbar>":
                used |= _hues(artist)
        for image in axes.images:
            words = [text for text in axes.texts if text.get_text()]
            name = image.cmap.name
            if image.colorbar is None and len(words) < image.get_array().size / 2:
                found.append(f"colours of {axes.get_title() or name!r} have no colour bar")
            shades = {_hex(shade) for shade in getattr(image.cmap, "colors", ["red"])}
            if name not in MAPS and not shades <= set(PALETTE):
                found.append(f"colour map {name}")
    for legend in [*figure.legends, *(legend for part in _parts(figure) for legend in part.legends),
                   *(axes.get_legend() for axes in figure.axes)]:  # fmt: skip
        for handle in legend.legend_handles if legend else ():
            for artist in handle if isinstance(handle, Container) else (handle,):
                explained |= _hues(artist)
    found += [f"{hue} is not of the palette" for hue in sorted(used - set(PALETTE))]
    if len(used) > 1:
        found += [f"no legend explains {hue}" for hue in sorted(used - explained)]
    return found


def _parts(figure: Any) -> list[Any]:
    return [part for own in figure.subfigs for part in (own, *_parts(own))]


def _hex(colour: Any) -> str:
    return colors.to_hex(colour)


def _hues(artist: Any) -> set[str]:
    """Return the colours of a line, bar or marks, without greys and what is not seen."""
    shades: list[Any] = []
    for name in ("get_color", "get_markerfacecolor", "get_facecolor"):
        if hasattr(artist, name):
            shade = getattr(artist, name)()
            shades += list(shade) if name == "get_facecolor" and hasattr(shade, "ndim") else [shade]
            if name == "get_color" and hasattr(shade, "ndim") and shade.ndim == 2:
                shades[-1:] = list(shade)
    seen = set()
    for shade in shades:
        if isinstance(shade, str) and shade == "none":
            continue
        red, green, blue, alpha = colors.to_rgba(shade)
        if alpha and max(red, green, blue) - min(red, green, blue) > 0.1:
            seen.add(_hex((red, green, blue)))
    return seen
