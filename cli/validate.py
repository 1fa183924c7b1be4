"""``eldr-sim validate``: the simulator against measured serving runs."""

import math
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import pyarrow as pa
from click import FloatRange, IntRange
from pyarrow import csv

from eldr_sim.cli.calibrate import results_and_configs
from eldr_sim.cli.console import print_table, progress_bar, task_bar, value_text
from eldr_sim.cli.decorators import TENSOR_PARALLEL_SIZE, option, writes
from eldr_sim.cli.published import bands, published
from eldr_sim.cli.run_options import GroupedCommand, check_out, config_from_options, run_options
from eldr_sim.errors import InputError
from eldr_sim.simulator.outcome.error_band import one_line
from eldr_sim.simulator.results import result_folder, write_json
from eldr_sim.simulator.setup.config.field_types import parse_mix
from eldr_sim.validation.live.calibration.engine_calibration import read_calibration
from eldr_sim.validation.live.campaign import (
    LOADS,
    Campaign,
    LoadShape,
    record_campaign,
    with_shortest_first,
)
from eldr_sim.validation.live.engines.servers import EngineOptions
from eldr_sim.validation.live.engines.setups import SETUPS
from eldr_sim.validation.live.features.check import check_features
from eldr_sim.validation.live.features.feature_setups import FEATURES
from eldr_sim.validation.live.report.live_report import write_report
from eldr_sim.validation.live.report.text import headline_table, verdict
from eldr_sim.validation.published import silicon as form
from eldr_sim.validation.published.mixtral import OTHERS, mixtral_rows, predict_mixtral
from eldr_sim.validation.published.pd import ASSUMED, pd_rows, predict_pd
from eldr_sim.validation.published.predictions import Errors, errors_of
from eldr_sim.validation.published.silicon_rows import (
    GPUS,
    MEASURED_MODELS,
    MeasuredModel,
    MeasuredRun,
    read_rows,
    uncovered_rows,
)


@click.group(short_help="Compare the simulator with measured runs.")
def validate() -> None:
    """Compare the simulator with measured serving runs."""


@validate.command()
@option("--model", list(MEASURED_MODELS), "Model of the published runs.", default="gpt-oss-120b")
@option("--gpu", sorted(GPUS.values()), "GPU of the published runs; repeat for more. Default: "
        "H100 and H200, or all if a model has no rows of these.", multiple=True)  # fmt: skip
@option("--moe-kernel", ["marlin", "oldest", "newest"], "MoE kernel: the oldest or the newest "
        "table, or marlin, derived. By default GPT-OSS takes marlin, Kimi-K2.5 (INT4) and "
        "DeepSeek-R1 the newest, the others the oldest.")  # fmt: skip
@option("--forms", bool, "Predict with and without each part: front end, padding of weights, "
        "uneven routing.")  # fmt: skip
@writes("--out", Path, "Folder for the tables of errors.")
@option("--force", bool, "Replace the report in --out.")
def silicon(
    model: str,
    gpu: tuple[str, ...],
    moe_kernel: str | None,
    forms: bool,
    out: Path | None,
    force: bool,
) -> None:
    """Predict TTFT and TPOT of published runs, on vLLM (DeepSeek-R1: SGLang, gpt-oss-120b-trtllm:
    TensorRT-LLM).

    Co-located workers, with data-parallel attention too, and prefill and decode pools. The runs
    come with `pip install eldr-sim[aiconfigurator]`. Nothing is fitted to them."""
    check_out(out, force)
    target = MEASURED_MODELS[model]
    moe_kernel = moe_kernel or target.moe_kernels[0]
    every = read_rows(target=target)
    wanted = gpu or ("H100", "H200")
    rows = [row for row in every if row.case.gpu in wanted]
    if gpu and not rows:
        allowed = ", ".join(sorted({row.case.gpu for row in every}))
        raise InputError("gpu", f"no row of {model} on {', '.join(gpu)}", allowed)
    rows = rows or every
    if forms:
        _forms(rows, target, moe_kernel, out, force)
        return
    with progress_bar("silicon") as update:
        table = form.predict_rows(rows, target=target, moe_kernel=moe_kernel, progress=update)
    errors = errors_of(table, form.GROUPS)
    columns = ["rows", "metric", "n", "ours", "bias", "signed median", "all n", "all rows"]
    columns += ["AIConfigurator"]
    others = form.AICONFIGURATOR.get(model, {})
    cells = [_error(error, others) for error in errors]
    print_table("Absolute error, %: median | 90th percentile", columns, cells)
    noise = ", ".join(f"{name.upper()} {a} | {b}" for name, (a, b) in form.REPEATABILITY.items())
    click.echo(f"Runs repeated on another date differ by (%): {noise}")
    for metric in ("tpot", "ttft"):
        grown = form.growth_error(table, metric)
        if not math.isnan(grown):
            click.echo(f"Growth of {metric.upper()} with concurrency: mean error {grown:.1f}%")
    click.echo()
    worst = form.worst_rows(table).to_pylist()
    cells = [[value_text(value) for value in row.values()] for row in worst]
    print_table("Worst TPOT", list(worst[0]), cells)
    uncovered = sorted(uncovered_rows(target).items())
    if uncovered:
        missing = [[card, str(n), reason] for (card, reason), n in uncovered]
        print_table("Rows that cannot be predicted", ["card", "rows", "why"], missing)
    if out is not None:
        with result_folder(out, force) as folder:
            csv.write_csv(table, folder / "rows.csv")
            summary = {"model": model, "moe_kernel": moe_kernel, "errors": [*map(vars, errors)]}
            write_json(folder / "summary.json", summary)
        click.echo(f"Wrote {out}")


validate.add_command(published)
validate.add_command(bands)


@validate.command(cls=GroupedCommand)
@click.argument("results", nargs=-1, required=True,
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        metavar="RESULT.json...")  # fmt: skip
@run_options()
@option("--steps", click.Path(path_type=Path, dir_okay=False, exists=True), "Forward-pass metrics "
    "of an engine, one JSON object per line, to compare with the predicted time of the same steps.",
        metavar="STEPS.jsonl")  # fmt: skip
def bench(results: tuple[Path, ...], steps: Path | None, **options: Any) -> None:
    """Compare results of `vllm bench serve` (or SGLang's), aiperf or GuideLLM with predictions.
    Load and, if stated, model are read from the results; options give the cluster. Prints errors
    and possible causes. Also reads inference-perf's requests."""
    from eldr_sim.validation.published import bench as own
    from eldr_sim.validation.published.bench import beside, read_steps

    config = config_from_options(options)
    found, configs = results_and_configs(results, config, options)
    with TemporaryDirectory() as work:
        for each, of in zip(found, configs, strict=True):
            summary = own.predict_bench(each, of, Path(work))
            cells = [
                [key, f"{measured:.4g}", f"{predicted:.4g}", f"{error:+.1f}"]
                for key, measured, predicted, error in own.errors(each, summary)
            ]
            cluster = f"{summary['model_id']} on {summary['gpu']}, {summary['topology']}"
            click.echo(f"Measured: {each.in_words()}")
            click.echo(f"Predicted: {cluster}, {of.engine.engine}'s rules")
            for note in each.notes:
                click.echo(f"Warning: {each.name}: {note}", err=True)
            print_table(each.name, ["figure", "measured", "predicted", "error, %"], cells)
            click.echo(one_line(summary["error_band"]))
            click.echo(f"Bottleneck of the prediction: {summary['limits']['bottleneck']}")
            for line in own.explanations(each, summary, of):
                click.echo(line)
        if steps is not None:
            lines = [
                [kind, str(n), *(f"{figure:.4g}" for figure in figures[:2]),
                 f"{figures[2]:.1f}", f"{figures[3]:+.1f}"]
                for kind, n, figures in beside(read_steps(steps), config)
            ]  # fmt: skip
            columns = ["steps", "n", "measured, ms", "predicted, ms", "error, %", "signed, %"]
            print_table(f"Steps of {steps.name}, medians", columns, lines)


@validate.command()
@writes("--out", Path, "Folder for the table of errors.")
@option("--force", bool, "Replace the report in --out.")
def pd(out: Path | None, force: bool) -> None:
    """Predict published runs with prefill and decode workers, by hand-over preset.

    llm-d's GPT-OSS-120B on 16 H200. Marlin's tables come with `pip install
    eldr-sim[aiconfigurator]`. Nothing is fitted to the runs."""
    check_out(out, force, "runs.csv")
    with progress_bar("runs") as update:
        table = predict_pd(pd_rows(), progress=update)
    names = _print_runs("Published runs", table, ["run", "handover"])
    known = {(row["run"], row["handover"]): row for row in table.to_pylist()}
    parts = [
        [*key, *("" if row[name] is None else f"{row[name]:.1f}" for name in names)]
        for key, row in known.items()
    ]
    columns = ["run", "handover", *(name.removesuffix("_ms") for name in names)]
    print_table("Parts of the predicted mean TTFT, ms", columns, parts)
    for line in ASSUMED:
        click.echo(f"Assumed: {line}")
    _write(out, force, "runs.csv", table)


@validate.command()
@option("--requests", Path, "Folder replay_data of github.com/inference-sim/training, commit "
        "c4f0340.", required=True)  # fmt: skip
@writes("--out", Path, "Folder for the table of errors.")
@option("--force", bool, "Replace the report in --out.")
def mixtral(requests: Path, out: Path | None, force: bool) -> None:
    """Predict published runs of Mixtral, next to the errors of other estimators. vLLM 0.15.1 on
    H100, from recorded requests (not part of the package). Nothing is fitted to the runs."""
    check_out(out, force, "stages.csv")
    with progress_bar("stages") as update:
        table = predict_mixtral(requests, mixtral_rows(), progress=update)
    labels = ["model", "tensor_parallel_size", "load", "stage"]
    _print_runs("Published stages, means", table, labels)
    medians = []
    for name in ("", *OTHERS):
        errors = errors_of(table, column=f"{name}_error" if name else "error")
        medians.append([name or "eldr-sim", *(f"{error.median:.1f}" for error in errors)])
    print_table("Median absolute error, %", ["estimator", "TTFT", "TPOT", "E2E"], medians)
    _write(out, force, "stages.csv", table)


def _print_runs(title: str, table: pa.Table, labels: list[str]) -> list[str]:
    """Print measured beside predicted figures; return the columns of parts that are left."""
    others = [name for name in table.column_names if name.endswith("_error")]
    names = [name.removesuffix("_error").replace("_", " ") for name in others]
    cells = [
        [*(str(row[name]) for name in [*labels, "metric"]),
         f"{row['measured_ms']:.4g}", f"{row['predicted_ms']:.4g}",
         *(f"{row[name]:+.1f}" for name in ("error", *others))]
        for row in table.to_pylist()
    ]  # fmt: skip
    columns = [*labels, "metric", "measured, ms", "predicted, ms", "error, %", *names]
    print_table(title, columns, cells)
    shown = ("measured_ms", "predicted_ms")
    return [name for name in table.column_names if name.endswith("_ms") and name not in shown]


def _write(out: Path | None, force: bool, name: str, table: pa.Table) -> None:
    if out is not None:
        with result_folder(out, force, name) as folder:
            csv.write_csv(table, folder / name)
        click.echo(f"Wrote {out}")


def _forms(
    rows: list[MeasuredRun], target: MeasuredModel, kernel: str, out: Path | None, force: bool
) -> None:
    """Print, and perhaps write, the errors of every form."""
    with progress_bar("silicon") as update:
        forms_table = form.forms_table(rows, target, kernel, update)
    cells = [
        [*map(str, list(row.values())[:4]), f"{row['median']:.1f} | {row['p90']:.1f}",
         f"{row['signed_median']:+.1f}"]
        for row in forms_table.to_pylist()
    ]  # fmt: skip
    columns = ["form", "rows", "metric", "n", "median | p90", "signed median"]
    print_table("Absolute error, %", columns, cells)
    _write(out, force, "forms.csv", forms_table)


def _error(error: Errors, others: dict[str, dict[str, tuple[float, float]]]) -> list[str]:
    other = others.get(error.group.removeprefix("gpu "), {}).get(error.metric)
    return [
        error.group,
        error.metric.upper(),
        str(error.rows),
        f"{error.median:.1f} | {error.p90:.1f}",
        f"{error.bias:+.1f}",
        f"{error.middle:+.1f}",
        str(error.all_rows),
        f"{error.all_median:.1f} | {error.all_p90:.1f}",
        "" if other is None else f"{other[0]} | {other[1]}",
    ]


#: Options of `vllm` that an engine is started with; a campaign's have the names of its fields.
_OF_ENGINES = (
    "dtype", "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip


@validate.command()
@writes("--out", Path, "Folder of the campaign; runs already in it are kept.", required=True)
@writes("--report", Path, "Folder of the report; an older report there is replaced.")
@option("--quick", bool, "Run ten minutes on one engine: two loads, each twice for 25 s, a report "
    "in OUT/report and one verdict.")  # fmt: skip
@option("--feature features", [*FEATURES, "all"], "Check a feature of one engine, in place of "
        "set-ups and loads; repeat for more.", multiple=True)  # fmt: skip
@option("--setup setups", list(SETUPS), "Engines to start; repeat for more. All by default.",
        multiple=True)  # fmt: skip
@option("--policy policies", None, "Decode policies of the proxy where there are several decode "
        "engines.", multiple=True, default=("round_robin", "jsq", "eldr"))  # fmt: skip
@option("--repeats", IntRange(1), "Number of times that each load is run.", default=3)
@option("--duration", FloatRange(1.0), "Length of the arrivals of a load, s.", default=45.0)
@option("--model", None, "Model with a config.json; by default a small random one is made in "
        "--out.", metavar="DIR")  # fmt: skip
@option("--dtype", None, "Data type of the weights, as vLLM names it.", default="bfloat16")
@option(TENSOR_PARALLEL_SIZE, IntRange(1), "GPUs per engine.", default=1)
@option("--max-model-len", IntRange(64), "Maximum length of a sequence, tokens.", default=2048)
@option("--max-num-seqs", IntRange(1), "Maximum number of running requests of an engine.",
        default=32)  # fmt: skip
@option("--max-num-batched-tokens", IntRange(64), "Maximum number of tokens in a step.",
        default=512)  # fmt: skip
@option("--prompt-len", IntRange(4), "Prompt tokens where lengths are fixed; else their mean.",
        default=64)  # fmt: skip
@option("--output-len", IntRange(2), "Output tokens where lengths are fixed; else their mean.",
        default=96)  # fmt: skip
@option("--prefill-url prefill_urls", None, "URL of a running prefill engine on this machine, and "
        "its log folder; repeat for more.", multiple=True, metavar="URL=DIR")  # fmt: skip
@option("--decode-url decode_urls", None, "URL of a running decode engine (co-located without "
        "--prefill-url) and its log folder; repeat for "
        "more.", multiple=True, metavar="URL=DIR")  # fmt: skip
@option("--seed", IntRange(0), "Seed of loads and prompts.", default=0)
@option("--share shares", FloatRange(0, min_open=True), "Request rate of a load, as a "
        "multiple of the calibrated capacity; repeat for more. Default: 0.4, 0.6, 0.8 and 1.2.",
        multiple=True)  # fmt: skip
@option("--rate rates", FloatRange(0, min_open=True), "Request rate of a load, requests/s; "
        "repeat for more.", multiple=True)  # fmt: skip
@option("--lengths", ["recorded", "fixed"], "Request lengths of --share and --rate loads.",
        default="recorded")  # fmt: skip
@option("--burstiness", FloatRange(0, min_open=True), "Shape of the gamma distribution of the gaps "
        "between arrivals in --share and --rate loads: 1 is Poisson, less is burstier.",
        default=1.0)  # fmt: skip
@option("--workload", click.Path(path_type=Path, dir_okay=False, exists=True), "Request log to "
        "take lengths from, scaled to --prompt-len and --output-len.", metavar="FILE")  # fmt: skip
@option("--domain-mix domain_mix", None, "Weights of the domains code, math, medical and legal, "
    "or of those of --texts. Default: equal.", metavar="NAME=WEIGHT,...")  # fmt: skip
@option("--texts", click.Path(path_type=Path, file_okay=False, exists=True),
        "Folder of files DOMAIN.txt from which prompts are cut, by the model's tokenizer. "
        "Default: random tokens.", metavar="DIR")  # fmt: skip
@option("--num-gpu-blocks-override", IntRange(1), "Number of KV blocks of an engine; a low number "
        "causes preemptions.")  # fmt: skip
@option("--shortest-first", bool, "Repeat every load with the prompt's length as priority: "
    "shortest job first. Running engines must have been started with priorities on.")  # fmt: skip
def vllm(
    out: Path,
    report: Path | None,
    quick: bool,
    features: tuple[str, ...],
    setups: tuple[str, ...],
    shortest_first: bool,
    **asked: Any,
) -> None:
    """Load a real vLLM, simulate the same requests again, and report the errors.

    Engines are started, calibrated on separate loads, loaded up to saturation and recorded
    (docs/live.md). Needs vLLM and `pip install 'eldr-sim[live]'`."""
    extra: tuple[str, ...] = ("--scheduling-policy", "priority") if shortest_first else ()
    if (blocks := asked["num_gpu_blocks_override"]) is not None:
        extra += ("--num-gpu-blocks-override", str(blocks))
    shape = {name: asked[name] for name in ("lengths", "burstiness")}
    own = [LoadShape(share, **shape) for share in asked["shares"]]
    own += [LoadShape(0.0, **shape, rate=rate) for rate in asked["rates"]]
    loads = tuple(own) or (LOADS[1:3] if quick else LOADS)
    if quick:
        setups, report = ("colocated",), report or out / "report"
        asked |= {"repeats": 2, "duration": 25.0}
    engine = {name: asked[name] for name in _OF_ENGINES}
    asked["domain_mix"] = parse_mix(asked["domain_mix"]) if asked["domain_mix"] else {}
    campaign = Campaign(
        out,
        EngineOptions(asked["model"] or str(out / "model"), **engine, extra=extra),
        loads=with_shortest_first(loads) if shortest_first else loads,
        duration_s=asked["duration"],
        **{field.name: asked[field.name] for field in fields(Campaign) if field.name in asked},
    )
    if features:
        if campaign.texts is not None:
            raise InputError(
                "texts", "with --feature, loads make their own prompts", "no --feature"
            )
        with task_bar() as update:
            check_features(campaign, list(FEATURES) if "all" in features else features, update)
        click.echo((out / "features.md").read_text(encoding="utf-8"))
        return
    with task_bar() as update:
        folders = record_campaign(
            campaign,
            setups or tuple(SETUPS),
            update,
            [_endpoint("prefill_url", text) for text in asked["prefill_urls"]],
            [_endpoint("decode_url", text) for text in asked["decode_urls"]],
        )
    click.echo(f"Recorded runs: {len(folders)} in {out / 'runs'}")
    for file in sorted((out / "calibration").glob("*/calibration.json")):
        for doubt in read_calibration(file.parent).info.doubts:
            click.echo(f"Warning: the tables of {file.parent.name} are not to be trusted: {doubt}")
    if report is not None:
        with progress_bar("comparing") as compared:
            document = write_report(out, report, force=True, progress=compared)
        print_table("Goals", *headline_table(document))
        click.echo(verdict(document))
        click.echo(f"Wrote {report}")


def _endpoint(field: str, text: str) -> tuple[str, Path]:
    url, separator, log = text.partition("=")
    if not separator or not url.startswith("http") or not log:
        raise InputError(field, repr(text), "URL=DIR, such as http://127.0.0.1:8000=/data/log")
    return url, Path(log)
