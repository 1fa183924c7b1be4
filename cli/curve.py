"""``eldr-sim curve``: what a cache of any size would find in a request log."""

from pathlib import Path

import click

from eldr_sim.cli.completion import complete, models
from eldr_sim.cli.console import print_table
from eldr_sim.cli.option import option
from eldr_sim.errors import InputError

_MILLIONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@click.group(short_help="Show what a cache of any size would find in a log.")
def curve() -> None:
    """Curves over a size, of a workload alone: no cluster is simulated."""


@curve.command()
@click.argument("log", type=click.Path(path_type=Path))
@option("--sessions-file", None, "Which requests go on with which.", metavar="FILE.csv")
@option("--model", None, "Model whose KV cache tokens take up room.", default="Qwen3-30B-A3B",
        shell_complete=complete(models))  # fmt: skip
def hits(log: Path, sessions_file: str | None, model: str) -> None:
    """Show the prefix hit rate of LOG by the size of one cache, and of one without bounds.

    LOG has block hashes (Mooncake's or Bailian's format). The cache forgets the least recently
    used (LRU), or as ARC does, or the worst session; nobody finds more than Belady's bound.
    Requests come one after the other.
    """
    from eldr_sim.kernel_profiles.models import load_model
    from eldr_sim.traces.requests.eviction import hit_rates
    from eldr_sim.traces.requests.load import Load
    from eldr_sim.traces.requests.requests import make_requests
    from eldr_sim.traces.requests.reuse import reuse_of
    from eldr_sim.traces.requests.texts import draw_texts

    load = Load(str(log), sessions_file=sessions_file)
    requests = make_requests(draw_texts((("en", 1.0),)), load)
    if not requests.prefix_block_tokens:
        raise InputError("log", f"{log.name} has no hash_ids", "a log with block hashes")
    found, size = reuse_of(requests), load_model(model).kv_bytes_per_token
    rows = [
        [f"{millions:g}", f"{size * millions / 1e3:,.0f}", f"{100 * rate:.2f}",
         *(f"{100 * other:.2f}" for other in hit_rates(requests, blocks)),
         f"{100 * rate / found.ideal_hit_rate:.0f}" if found.ideal_hit_rate else ""]
        for millions in _MILLIONS
        for blocks in [int(millions * 1e6 / found.block_tokens)]
        for rate in [found.hit_rate(blocks)]
    ]  # fmt: skip
    ideal = f"{100 * found.ideal_hit_rate:.2f}"
    rows.append(["without bounds", "", *[ideal] * 4, "100"])
    columns = ["cache (M tokens)", f"GB of {model}", "LRU (%)", "ARC (%)", "by session (%)",
               "Belady's bound (%)", "LRU of the ideal one (%)"]  # fmt: skip
    print_table("", columns, rows)
    click.echo(
        f"{len(requests):,} requests, {found.n_tokens / len(requests):,.0f} prompt tokens on "
        f"average; all begin with the same {100 * found.common_share:.2f}% of their tokens."
    )
