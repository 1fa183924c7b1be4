"""``eldr-sim cache``: what lies in the user's cache folder, and out with it."""

from time import localtime, strftime

import click

from eldr_sim import cache as user_cache
from eldr_sim.cli.console import print_table


@click.group(short_help="Show or clear the cache folder.")
def cache() -> None:
    """The folder where drawn traces, bit sets, fits and compiled code are kept."""


@cache.command()
def info() -> None:
    """Show the cache folder, what is in it, and how large it may grow."""
    limit = user_cache.size_limit()
    files = user_cache.files()
    rows = [
        [_name(file), _megabytes(file.size), strftime("%Y-%m-%d %H:%M", localtime(file.used_s))]
        for file in files
        if file.part != user_cache.NUMBA
    ]
    compiled = [file.size for file in files if file.part == user_cache.NUMBA]
    if compiled:
        rows.append([f"compiled code, {len(compiled)} files", _megabytes(sum(compiled)), ""])
    click.echo(f"Folder: {user_cache.folder() or 'none: there is no home folder'}")
    click.echo(
        f"Size:   {_megabytes(sum(file.size for file in files))} MB in {len(files)} files, of "
        f"traces, bit sets and fits at most {_megabytes(limit)} MB"
    )
    if rows:
        click.echo()
        print_table("Files", ["file", "MB", "last used"], rows)


@cache.command()
def clear() -> None:
    """Remove what eldr-sim put into the cache folder; it is made anew when it is needed."""
    removed = user_cache.clear()
    size = sum(file.size for file in removed)
    parts = {
        user_cache.BITSETS: "bit sets",
        user_cache.FITS: "fits",
        user_cache.NUMBA: "compiled code",
        user_cache.TRACES: "drawn traces",
    }
    for part, what in parts.items():
        files = [file for file in removed if file.part == part]
        if files:
            click.echo(f"Removed {what}: {len(files)} files, {sum(f.size for f in files)} bytes")
    place = user_cache.folder() or "no folder"
    click.echo(f"Removed {len(removed)} files, {size} bytes, from {place}")


def _name(file: user_cache.CacheFile) -> str:
    name = file.path.name
    return f"{file.path.parent.name}/{name}" if file.part == user_cache.TRACES else name


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"
