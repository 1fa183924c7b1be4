"""Commands as Python functions: ``import eldr_sim as es``; here those of one run, in
`eldr_sim.cli.api_many` those of many.

A function takes the options of its command in each of their spellings, with underscores for
hyphens, and with Python's values: numbers, lists for what commas separate, mappings for
``KEY=VALUE`` and ``METRIC:MS``. `inspect.signature` and a notebook's completion list them;
``eldr-sim run --help`` says what they mean. The first argument is a configuration that options
override: a `RunConfig`, a mapping, or a path as for ``--config``.

Bad input raises `eldr_sim.errors.InputError`, a ValueError in one line.
"""

from __future__ import annotations

import base64
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from eldr_sim.cli import run as run_command
from eldr_sim.cli.console import is_watched, progress_bar
from eldr_sim.cli.run_options import config_from_options
from eldr_sim.errors import InputError
from eldr_sim.kinds import AnyPath
from eldr_sim.simulator import run as simulator_run
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.config.spellings import spellings

if TYPE_CHECKING:
    import pandas as pd

    from eldr_sim.reports.pictures import Picture

Config = RunConfig | Mapping[str, Any] | AnyPath
F = TypeVar("F", bound=Callable[..., Any])
#: Options of commands that are no fields of a configuration: where output goes, for which results
#: have methods, and what runs it.
_OUTPUT = {"out", "emit", "resume", "force", "plot", "timeline", "verbose", "help", "backend",
           "settings", "help_all"}  # fmt: skip


class Drawn:
    """What every result shows in a notebook: its table, and a picture."""

    @classmethod
    def _of(cls, found: Any) -> Self:
        own = object.__new__(cls)
        own.__dict__.update(vars(found))
        return own

    def _pictures(self) -> list[Picture]:
        raise NotImplementedError

    @property
    def pictures(self) -> list[str]:
        """Titles of the pictures that `plot` draws."""
        return [picture.title for picture in self._pictures()]

    def plot(self, title: str = "") -> Any:
        """Return a picture of the report as a `plotly.graph_objects.Figure`.

        Args:
            title: a part of one of `pictures`; empty: the first picture.

        Returns:
            The figure.

        Raises:
            InputError: no picture has this title.
        """
        from eldr_sim.reports.figures import pick, plotly_figure

        return plotly_figure(pick(self._pictures(), title))

    def _repr_html_(self) -> str:
        """Return the table and, where matplotlib is installed, the first picture."""
        table: str = super()._repr_html_()  # type: ignore[misc]
        if find_spec("matplotlib") is None or not (pictures := self._pictures()):
            return table
        from eldr_sim.reports.figures import write_png

        drawn = BytesIO()
        write_png(drawn, pictures[0])
        data = base64.b64encode(drawn.getvalue()).decode()
        return f'{table}<img alt="{escape(pictures[0].title)}" src="data:image/png;base64,{data}">'


class Reportable(Drawn):
    """A result with a page: it can be written, drawn and reported."""

    _name = ""

    def write(self, out: AnyPath, *, force: bool = False) -> None:
        """Write the folder that the command writes with ``--out``.

        Args:
            out: the folder.
            force: whether to replace a folder that exists.

        Raises:
            InputError: the folder exists, or cannot be written.
        """
        raise NotImplementedError

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with TemporaryDirectory() as parent:
            folder = Path(parent) / "result"
            self.write(folder)
            yield folder

    def _pictures(self) -> list[Picture]:
        from eldr_sim.reports.figures import pictures_of

        with self._folder() as folder:
            return pictures_of(folder, self._name)

    def report(self, out: AnyPath, *, force: bool = False) -> None:
        """Write the page that ``eldr-sim report`` makes of this result.

        Args:
            out: the HTML file.
            force: whether to replace a file that exists.

        Raises:
            InputError: the file exists, or cannot be written.
        """
        from eldr_sim.reports.page import write_report

        with self._folder() as folder:
            write_report([folder], out, force=force)


class Run(Reportable, simulator_run.Result):
    """A run: ``summary`` (the fields of ``vllm bench serve``), and tables of requests and steps."""

    @property
    def _name(self) -> str:  # type: ignore[override]
        return str(self.summary["policy"] or self.summary["prefill_policy"])

    @property
    def frame(self) -> pd.DataFrame:
        """One row per request: lengths (tokens), times (s), latencies (ms), workers, outcome."""
        return self.requests.to_pandas()  # type: ignore[no-any-return]

    @property
    def steps_frame(self) -> pd.DataFrame:
        """One row per engine step: worker, batch, tokens, activated experts, times (s)."""
        return self.steps.to_pandas()  # type: ignore[no-any-return]

    def write(self, out: AnyPath, *, force: bool = False) -> None:
        """Write ``summary.json``, ``requests.parquet``, ``steps.parquet``, ``config.json``.

        Args:
            out: the folder.
            force: whether to replace a folder that exists.

        Raises:
            InputError: the folder exists, or cannot be written.
        """
        from eldr_sim.simulator.results import write_result

        write_result(self, out, force=force)


def like(command: click.Command) -> Callable[[F], F]:
    """Give a function the signature of a command: its options, and ``progress``."""

    def decorate(function: F) -> F:
        kind = inspect.Parameter.KEYWORD_ONLY
        names = dict.fromkeys(
            param.opts[0].lstrip("-").replace("-", "_")
            for param in command.params
            if param.name not in {*_OUTPUT, "config_file"}
        )
        signature = inspect.signature(function)
        first = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {p.name for p in first}
        options = [inspect.Parameter(n, kind, default=None) for n in names if n not in taken]
        function.__signature__ = signature.replace(parameters=[*first, *options])  # type: ignore[attr-defined]
        return function

    return decorate


def options_of(
    command: click.Command, config: Config | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of a command by their names in its code; raises InputError."""
    values = dict(command.make_context("", [], resilient_parsing=True).params)
    parameters = {
        opt.lstrip("-").replace("-", "_"): param
        for param in command.params
        if param.name not in _OUTPUT
        for opt in param.opts
    }
    for name, value in given.items():
        if value is None:
            continue
        param = parameters.get(name)
        if param is not None:
            values[str(param.name)] = _typed(param, value)
        elif name in RUN_FIELDS:  # a mapping, such as a pool's
            values[name] = value
        else:
            from eldr_sim.cli.foreign import instead_of

            near = get_close_matches(name, {*parameters, *RUN_FIELDS}, 3)
            hint = re.sub("--([a-z-]+)", _python_name, instead_of(name))
            if "." in (path := spellings().get(name, "")):
                pool, _, field = path.partition(".")
                hint = f'{pool}={{"{field}": ...}}'
            if not hint and near:
                hint = f"did you mean {' or '.join(near)}?"
            raise InputError(name, f"no such option: {hint}" if hint else "no such option",
                             "" if hint else "see eldr-sim run --help")  # fmt: skip
    if isinstance(config, RunConfig):
        values["config_file"] = config.explicit_fields("python")
    elif config is not None:
        values["config_file"] = config
    return {name: value for name, value in values.items() if name not in _OUTPUT}


def _python_name(option: re.Match[str]) -> str:
    return option.group(1).replace("-", "_")


def _typed(param: click.Parameter, value: Any) -> Any:
    """Return a value as the command's code expects it."""
    if param.multiple:
        each = [value] if isinstance(value, str | Mapping) else value
        return tuple(_text(param, item) for item in each)
    is_text = isinstance(param.type, click.types.StringParamType)
    return _text(param, value) if is_text and param.name not in RUN_FIELDS else value


def _text(param: click.Parameter, value: Any) -> str:
    """Return a value as one types it."""
    if isinstance(value, Mapping):
        sign = "=" if "=" in (getattr(param, "metavar", None) or "") else ":"
        return ",".join(f"{key}{sign}{inner}" for key, inner in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def shown(bar: Any, progress: bool | None) -> Any:
    """Return a way to show progress: ``bar``, or one that shows nothing."""

    @contextmanager
    def nothing(_title: str) -> Iterator[Callable[..., None]]:
        yield lambda *_: None

    return bar if (is_watched() if progress is None else progress) else nothing


@like(run_command.run)
def run(
    config: Config | None = None,
    *,
    progress: bool | None = None,
    backend: simulator_run.Backend = "compiled",
    workers: Mapping[str, type[Any]] | None = None,
    **options: Any,
) -> Run:
    """Simulate one cluster, as ``eldr-sim run`` does.

    Args:
        config: what ``options`` override; None: the defaults.
        progress: whether to show progress; None: on a terminal and in a notebook.
        backend: ``compiled``, ``simpy`` (the model as SimPy processes), ``vllm`` or ``sglang``.
        workers: for ``simpy``, classes in place of a pool's workers, such as
            ``{"decode": MyDecoder}`` (docs/engines.md).
        options: options of the command; a mapping sets fields of a pool
            (``decode={"gpu": "H200"}``) or of a policy (``policy={"name": "eldr", "tau": 0.2}``).

    Returns:
        The run: ``summary``, ``frame`` (a row per request), ``steps_frame``.

    Raises:
        InputError: something does not exist or does not fit together.

    Examples
    --------
    >>> result = es.run(policy="eldr", topology="2P4D", request_rate=20, duration=10)
    >>> result.summary["median_tpot_ms"], result.frame.tpot_ms.quantile(0.99)
    >>> result.plot("TPOT")
    """
    made = config_from_options(options_of(run_command.run, config, options))
    with shown(progress_bar, progress)(
        f"{made.policies.policy} on {made.cluster.topology}"
    ) as update:
        ran = simulator_run.simulate(made, update, backend=backend, workers=workers)
        return Run._of(ran)
