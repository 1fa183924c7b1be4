"""The commands of many runs as Python functions: ``es.compare``, ``es.plan``, ``es.what_if``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eldr_sim.cli import compare as compare_command
from eldr_sim.cli import plan as plan_command
from eldr_sim.cli import run as run_command
from eldr_sim.cli.api import Config, Drawn, Reportable, like, options_of, shown
from eldr_sim.cli.console import progress_bar, run_counter
from eldr_sim.cli.run_options import config_from_options
from eldr_sim.planning.compare import policies as policies_compared
from eldr_sim.planning.compare import what_if as what_if_asked
from eldr_sim.planning.search import answer
from eldr_sim.simulator.outcome.catalogue import heading

if TYPE_CHECKING:
    import pandas as pd

    from eldr_sim.reports.pictures import Picture


class Comparison(Reportable, policies_compared.Comparison):
    """Policies under the same seeds, and their paired differences."""

    write = policies_compared.Comparison.write

    @property
    def frame(self) -> pd.DataFrame:
        """One row per policy and seed."""
        return self.runs.to_pandas()  # type: ignore[no-any-return]

    @property
    def differences_frame(self) -> pd.DataFrame:
        """One row per policy, reference and metric: percent, with its 95% interval."""
        import pandas as pd

        columns = ("name", "reference", "metric", "percent", "low", "high")
        rows = [{name: getattr(d, name) for name in columns} for d in self.differences]
        return pd.DataFrame(rows, columns=list(columns))


class Plan(Reportable, answer.Answer):
    """The answer of a plan: its ``best`` row, notes, and all runs."""

    write = answer.Answer.write

    @property
    def frame(self) -> pd.DataFrame:
        """One row per simulated cluster."""
        import pandas as pd

        return pd.json_normalize(self.record()["clusters"])


class WhatIf(Drawn, what_if_asked.WhatIf):
    """The effects of changes to a base run, or of values beside the first."""

    def _pictures(self) -> list[Picture]:
        from eldr_sim.reports.pictures import Colours, intervals

        colours, figures = Colours(), dict[str, list[tuple[str, float, float, float, int]]]()
        for change in self.changes:
            for e in change.effects:
                dot = (change.name, e.percent, e.low, e.high, colours("change", change.name))
                figures.setdefault(e.metric, []).append(dot)
        about = f"difference from {self.base_name}, %"
        drawn = [intervals(heading(metric), about, rows) for metric, rows in figures.items()]
        return [picture for picture in drawn if picture.spec["data"]]

    @property
    def frame(self) -> pd.DataFrame:
        """One row per change and metric: percent, with its 95% interval."""
        import pandas as pd

        rows = [{"change": c["name"]} | e for c in self.record()["changes"] for e in c["effects"]]
        return pd.DataFrame(rows)


@like(compare_command.compare)
def compare(
    config: Config | None = None, *, progress: bool | None = None, **options: Any
) -> Comparison | WhatIf:
    """Run policies over the same requests, paired over seeds, as ``eldr-sim compare`` does.

    Args:
        config: what ``options`` override; None: the defaults.
        progress: whether to show progress; None: on a terminal and in a notebook.
        options: options of the command: ``policy``, ``seeds``, ``jobs`` and those of `run`. Lists
            of ``topology``, ``model`` or ``gpu``, and ``vary``, compare these values instead.

    Returns:
        A `Comparison` of policies, or a `WhatIf` of other values.

    Raises:
        InputError: something does not exist or does not fit together.

    Examples
    --------
    >>> found = es.compare(policy=["jsq", "eldr"], seeds=3, topology="2P4D", request_rate=20)
    >>> found.differences_frame.query("metric == 'median_tpot_ms'")
    >>> found.plot("median TPOT")
    >>> es.compare(topology=["2C", "1P1D"], seeds=3, request_rate=20)
    """
    asked = options_of(compare_command.compare, config, options)
    bar = shown(progress_bar, progress)
    if varied := compare_command.varied(asked.pop("axes"), asked):
        compare_command.check_values(varied, asked)
        own = ("policies", "seeds", "jobs")
        values = {name: asked.pop(name) for name in own}
        rest = {k: v for k, v in asked.items() if k not in compare_command.INSTEAD}
        compared_values = compare_command.compared_values(
            varied=varied, progress=bar, **values, **rest
        )
        return WhatIf(**vars(compared_values))
    return Comparison._of(compare_command.compared(progress=bar, **asked))


@like(plan_command.plan)
def plan(config: Config | None = None, *, progress: bool | None = None, **options: Any) -> Plan:
    """Find the cheapest cluster for an SLO, or what a cluster carries, as ``eldr-sim plan`` does.

    Args:
        config: what ``options`` override; None: the defaults.
        progress: whether to show progress; None: on a terminal and in a notebook.
        options: options of the command (``slo``, ``attainment``, ``gpu``, ``policy``, ``max_gpus``,
            ``gpus``, ``topology``, ``price``, ``seeds``, ...) and those of `run`.

    Returns:
        The answer and the runs behind it: ``best``, ``frame`` (a row per cluster).

    Raises:
        InputError: something does not exist or does not fit together.

    Examples
    --------
    >>> found = es.plan(slo={"ttft": 500, "tpot": 25}, request_rate=80, gpu=["h100", "mi300x"])
    >>> found.best.trial.config.topology, found.frame
    """
    asked = options_of(plan_command.plan, config, options)
    return Plan._of(plan_command.planned(progress=shown(run_counter, progress), **asked))


def what_if(
    config: Config,
    changes: Sequence[str],
    *,
    seeds: int = 5,
    together: bool = False,
    jobs: int | None = None,
    progress: bool | None = None,
) -> WhatIf:
    """Change one thing at a time in a run, paired over seeds, as ``eldr-sim what-if`` does.

    Args:
        config: the run to change.
        changes: such as ``decode.gpu=h200`` or ``policy=eldr``.
        seeds: number of seeds.
        together: whether to run all changes together as well.
        jobs: number of processes; None: one for each core.
        progress: whether to show progress; None: on a terminal and in a notebook.

    Returns:
        Effects with intervals: ``frame`` (a row per change and metric).

    Raises:
        InputError: a change is invalid, or does not fit the run.

    Examples
    --------
    >>> es.what_if({"topology": "2P4D"}, ["decode.gpu=h200", "policy=eldr"], seeds=3).frame
    """
    base = config_from_options(options_of(run_command.run, config, {}))
    with shown(progress_bar, progress)("what if") as update:
        how: dict[str, Any] = {"n_seeds": seeds, "together": together, "jobs": jobs}
        how["progress"] = update
        found = what_if_asked.what_if(base, changes, **how)
    return WhatIf(**vars(found))
