"""``eldr-sim gpus``, ``models``, ``presets``, ``tables`` and ``cache``: what there is.
Each imports what it needs when it is called: listing models should not wait for tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Any, get_args

import click

from eldr_sim import cache as user_cache
from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.cli.decorators import complete, model_option, option, parallel_options, writes
from eldr_sim.cli.decorators import gpus as gpu_names
from eldr_sim.cli.decorators import models as model_names
from eldr_sim.errors import InputError

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.gpus import GPU
    from eldr_sim.kernel_profiles.models import ModelDims
    from eldr_sim.kernel_profiles.parallel import Parallelism
    from eldr_sim.kernel_profiles.tables.format import LatencyTable
    from eldr_sim.kernel_profiles.tables.library import Engine


@click.group(short_help="List the known GPUs.", invoke_without_command=True)
@model_option("Model to show the step times of, for each GPU.")
@click.pass_context
def gpus(context: click.Context, model: str) -> None:
    """List the known GPUs and how well a model's step times are known on each.

    `--gpu` also takes the path of a gpu.json (docs/formats.md): `gpus show H100 --json > mine.json`
    prints one to edit. Rents are what was published in 2026, lowest to highest; a plan takes yours
    by `--price`."""
    if context.invoked_subcommand is None:
        _list_gpus(model)


@gpus.command("show")
@click.argument("name", metavar="NAME|PATH", shell_complete=complete(gpu_names, "file"))
@option("--json as_json", bool, "As a gpu.json, to be edited and given to --gpu.")
def show_gpu(name: str, as_json: bool) -> None:
    """Print what is known of a GPU, with the sources."""
    from eldr_sim.kernel_profiles.gpus import load_gpu

    gpu = load_gpu(name)
    if as_json:
        click.echo(gpu.model_dump_json(indent=2))
        return
    fields = gpu.model_dump(exclude={"name"}).items()
    rows = [[field, _figure(value)] for field, value in fields if value]
    print_table(gpu.name, ["field", "value"], rows)


def _figure(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_figure, value))
    return value if isinstance(value, str) else f"{value:,.16g}"


def _list_gpus(model: str) -> None:
    from eldr_sim.kernel_profiles.gpus import list_gpus, load_gpu
    from eldr_sim.kernel_profiles.models import load_model
    from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model

    dims = load_model(model)
    rows, names = [], list_gpus()
    with progress_bar("gpus") as update:
        for n, name in enumerate(names):
            update(n / len(names))
            gpu = load_gpu(name)
            step_time = build_step_time_model(
                dims, gpu, max_num_seqs=64, max_model_len=4096, share_missing=False
            )
            moe = step_time.provenance.get("moe", {"label": "-"})
            error = moe.get("fit_error") or {}
            rows.append(
                [
                    name,
                    f"{gpu.memory_bytes / 1e9:.0f}",
                    f"{gpu.memory_bandwidth / 1e12:.2f}",
                    f"{gpu.bf16_flops / 1e12:.0f}",
                    f"{gpu.fp8_flops / 1e12:.0f}" if gpu.fp8_flops else "-",
                    "{:g}-{:g}".format(*gpu.rent_usd) if gpu.rent_usd else "-",
                    "yes" if gpu.memory_bytes > dims.weight_bytes else "no",
                    step_time.label,
                    moe["label"],
                    ", ".join(f"{k} {v:.1%}" for k, v in error.items() if "mean" in k) or "-",
                    str(moe.get("kernel_source", "-")),
                ]
            )
    columns = ["GPU", "GB", "TB/s", "BF16 TFLOP/s", "FP8 TFLOP/s", "$ an hour", "fits", "weakest"]
    columns += ["MoE", "MoE fit error", "MoE kernel"]
    print_table(f"{dims.name}: weights {dims.weight_bytes / 1e9:.1f} GB", columns, rows)


@click.command(short_help="List the known models.")
def models() -> None:
    """List the known models; `--model` also takes a Hugging Face config.json."""
    from eldr_sim.kernel_profiles.models import list_models, load_model

    rows = []
    for name in list_models():
        model = load_model(name)
        published = model.published_total_params
        rows.append(
            [
                name,
                f"{model.total_params / 1e9:.1f}",
                f"{model.active_params / 1e9:.1f}",
                str(model.n_moe_layers),
                "dense" if model.is_dense else f"{model.n_experts} top-{model.top_k}",
                model.linear_dtype if model.is_dense else model.expert_dtype,
                f"{model.weight_bytes / 1e9:.1f}",
                f"{model.kv_bytes_per_token / 1024:.0f}",
                f"{published / 1e9:g}" if published else "-",
            ]
        )
    columns = ["model", "params, B", "active, B", "MoE layers", "experts", "weights"]
    columns += ["weights, GB", "KV, KiB/token", "published params, B"]
    print_table("Models", columns, rows)


@click.command(short_help="Show how well a model is known on each GPU.")
@click.argument("model", metavar="NAME|PATH", shell_complete=complete(model_names, "file"))
@option("--gpu", None, "Show only this GPU.", metavar="NAME|PATH",
        shell_complete=complete(gpu_names, "file"))  # fmt: skip
def support(model: str, gpu: str | None) -> None:
    """Show what a model's step times rest on, by engine, GPU and precision.

    On the fewest GPUs that hold it: `measured`: tables of that engine's kernels; `derived`: of
    another engine, or of a GPU of the same chip; `roofline`: no table of some part, bytes and FLOPs
    alone; `not supported`: two nodes do not hold it."""
    from eldr_sim.kernel_profiles.models import load_model
    from eldr_sim.kernel_profiles.support import ENGINES, support

    with progress_bar("support") as update:
        rows = [
            [
                one.model,
                one.precision,
                one.gpu,
                str(one.n_gpus or "-"),
                *(one.known[engine] for engine in ENGINES),
            ]
            for one in support(load_model(model), None if gpu is None else [gpu], update)
        ]
    print_table("Support", ["model", "precision", "GPU", "GPUs", *ENGINES], rows)


@click.command(short_help="Print the JSON schema of --config.")
def schema() -> None:
    """Print the JSON schema of `--config`, for editors that check YAML.

    In VS Code: `# yaml-language-server: $schema=eldr-sim.schema.json` in the file's first line."""
    import json

    from pydantic import create_model

    from eldr_sim.docstrings import DescribedSchema
    from eldr_sim.policies.choice import DECISION_OF
    from eldr_sim.simulator.setup.config.groups import GROUPS, RUN_FIELDS

    # Fields are named without their groups; the model of all of them exists for its schema alone.
    whole_run = create_model("eldr-sim run", __base__=tuple(GROUPS.values()))
    document = whole_run.model_json_schema(schema_generator=DescribedSchema)
    fields = document["properties"]
    named: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
    named["required"] = ["name"]
    for name, field in RUN_FIELDS.items():
        more = named  # a policy is a word, or a mapping with parameters
        if name not in DECISION_OF:
            if "BeforeValidator" not in repr(field):
                continue
            more = {"type": ["string", "object"]}  # inf, 10m and other words
        about = fields[name]
        said = {key: about.pop(key) for key in ("title", "description", "default") if key in about}
        fields[name] = said | {"anyOf": [*about.get("anyOf", [about]), more]}
    for title, group in GROUPS.items():
        own = {name: {"$ref": f"#/properties/{name}"} for name in group.model_fields}
        whole = {"type": "object", "properties": own, "additionalProperties": False}
        fields[title] = {"anyOf": [fields[title], whole]} if title in fields else whole
    document |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "eldr-sim run"}
    click.echo(json.dumps(document, indent=2))


_TITLES = {"queue": "Queue orders", "replica": "Replica choices", "scaling": "Autoscalers"}


@click.command(short_help="List the policies and their parameters.")
def policies() -> None:
    """List the policies of each decision, and their parameters.

    `--policy eldr:tau=0.2,layer_mask=all` gives parameters; a file may say
    `policy: {name: eldr, tau: 0.2}`."""
    from eldr_sim.docstrings import described_fields
    from eldr_sim.policies import registry
    from eldr_sim.policies.choice import FIELDS
    from eldr_sim.simulator.setup.config.groups import RUN_FIELDS

    for decision in registry.DECISIONS:
        rows, parameters = [], []
        for name in registry.names(decision):
            policy = registry.find(decision, name)
            rows.append([name, _first_line(policy)])
            for key, field in described_fields(policy.Parameters).items():
                text = (field.description or "").replace("``", "").replace("\n", " ")
                default = "" if field.default is None else str(field.default)
                parameters.append([f"{name}:{key}", default, text])
        title = _TITLES.get(decision, f"{decision.capitalize()} policies")
        if FIELDS[decision] in RUN_FIELDS:
            title += f" (--{FIELDS[decision].replace('_', '-')})"
        print_table(title, ["name", "what"], rows)
        if parameters:
            print_table("Parameters", ["parameter", "default", "what"], parameters)


@click.command(short_help="List published cluster configurations.")
@click.argument("name", required=False, metavar="[NAME[:MODEL][+warm-up]]")
def presets(name: str | None) -> None:
    """List the presets of `run --preset`, or print the fields of one as a file for --config."""
    from eldr_sim.simulator.setup.config.presets import PRESETS, preset_fields

    if name is None:
        rows = [
            [f"{key}:{model}", preset.title, preset.source]
            for key, preset in PRESETS.items()
            for model in preset.models
        ]
        print_table("Presets", ["preset", "what", "source"], rows)
        return
    fields = preset_fields(name, {})
    preset = PRESETS[name.partition("+")[0].partition(":")[0]]
    click.echo(f"# {preset.title}: {preset.source}")
    for note in preset.notes:
        click.echo(f"# {note}")
    if "num_requests" in fields:
        click.echo(f"# num_requests is {preset.seconds} times the rate")
    for field, value in fields.items():
        click.echo(f"{field}: {str(value).lower() if isinstance(value, bool) else value}")


def _first_line(policy: object) -> str:
    text = (policy.__doc__ or "").strip().split("\n")[0]
    return text.partition(" (see ")[0].rstrip(".").replace("``", "")


@click.group(short_help="List and import latency tables.")
def tables() -> None:
    """Latency tables: what is shipped, and how to import more."""


@tables.command("list")
@click.argument("words", nargs=-1, metavar="[WORD]...")
def list_tables(words: tuple[str, ...]) -> None:
    """List the latency tables of the package, or those that contain each WORD.

    For example `eldr-sim tables list H200 moe vllm`."""
    from eldr_sim.kernel_profiles.tables.library import shipped_tables

    rows = []
    for table in shipped_tables():
        about = table.metadata
        row = [table.name, table.kind, table.gpu, about.provenance, about.origin]
        if all(word.lower() in " ".join(row).lower() for word in words):
            rows.append(row)
    if not rows:
        allowed = "words of a line of eldr-sim tables list"
        raise InputError("WORD", f"no table contains {' and '.join(words)}", allowed)
    print_table("Latency tables", ["table", "kind", "GPU", "provenance", "origin"], rows)


@tables.command("import")
@option("--gpu", None, "GPU to import the tables of.", required=True, metavar="NAME",
        shell_complete=complete(gpu_names))  # fmt: skip
@model_option("Import only tables of this model's shapes.  [default: all]", default=None)
@parallel_options("tables")
@option("--data-parallel-size", int, "Number of engines that share experts.", default=1,
        metavar="N")  # fmt: skip
@option("--engine", None, "Engine to import kernels of (vllm, sglang, trtllm), and the "
        "newest version to take. Kernels without rows for it are taken from another "
        "engine.", default="vllm", metavar="NAME[==VERSION]")  # fmt: skip
@writes("--out", Path, "Folder of the tables to write.", required=True)
def import_(gpu: str, model: str | None, engine: str, out: Path, **parallel: Any) -> None:
    """Import a GPU's tables from aisimulate or aiconfigurator-core, whichever is installed.

    Says what it took, of which version of the engine, and what is still missing. Use the tables
    with `eldr-sim run --tables DIR`. Needs `pip install eldr-sim[aiconfigurator]`, or `pip install
    --no-deps aisimulate==0.13.0.dev202610270000000085`, which has more."""
    from eldr_sim.kernel_profiles.gpus import load_gpu
    from eldr_sim.kernel_profiles.models import KVDtype, load_model
    from eldr_sim.kernel_profiles.parallel import Parallelism
    from eldr_sim.kernel_profiles.sources.aiconfigurator_import import best_tables
    from eldr_sim.kernel_profiles.sources.packages import SYSTEMS
    from eldr_sim.kernel_profiles.tables.format import save_tables
    from eldr_sim.kernel_profiles.tables.library import Engine
    from eldr_sim.simulator.setup.config.pools import Pool

    if out.exists() and not out.is_dir():
        raise InputError("out", f"{out} is a file", "a folder")
    dims = None if model is None else load_model(model)
    names = ("tensor_parallel_size", "enable_expert_parallel", "data_parallel_size")
    layout = Parallelism(*(parallel[name] for name in names))
    try:
        told = Pool.model_validate({"engine": engine})
    except ValueError:
        allowed = "vllm, sglang or trtllm, and a version behind ==, such as vllm==0.24"
        raise InputError("engine", repr(engine), allowed) from None
    name, version = told.engine or "vllm", told.engine_version or ""
    shipped = load_gpu(gpu)
    system = shipped.name if shipped.name in SYSTEMS else shipped.sibling or shipped.name
    found = best_tables(system, dims, layout, get_args(KVDtype), Engine(name, version))
    paths = save_tables(found, out)
    rows = [
        [
            t.metadata.kind,
            _shape(t.metadata.shape),
            t.metadata.dtype,
            t.metadata.framework,
            str(len(t)),
        ]
        for t in found
    ]
    print_table("Imported", ["kernel", "shape", "type", "engine", "rows"], rows)
    click.echo(f"Wrote {len(paths)} tables to {out}")
    if system != shipped.name:
        click.echo(
            f"They are of {system}, the sibling of {shipped.name}: a run scales them by part"
        )
    if dims is not None:
        click.echo(_still_missing(dims, shipped, layout, Engine(name, version), found))


def _shape(shape: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in shape.items())


def _still_missing(
    model: ModelDims, gpu: GPU, layout: Parallelism, engine: Engine, tables: list[LatencyTable]
) -> str:
    """Say which parts of the model have no table, shipped or imported, and which are another
    engine's."""
    from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model

    steps = build_step_time_model(
        model, gpu, max_num_seqs=64, max_model_len=8192, max_num_batched_tokens=8192,
        parallelism=layout, engine=engine, tables=tables,
    )  # fmt: skip
    others = [
        f"{part} ({source['framework']})"
        for part, source in steps.provenance.items()
        if source.get("framework", engine.name).split()[0] not in (engine.name, "nccl")
    ]
    said = f"of {model.name} on {gpu.name} under {engine.name}: "
    return (
        f"Still missing {said}{', '.join(steps.missing) or 'nothing'}\n"
        f"Other engines' kernels stand in for: {', '.join(others) or 'nothing'}"
    )


@click.group(invoke_without_command=True, short_help="Show or clear the cache folder.")
@click.pass_context
def cache(context: click.Context) -> None:
    """Show the folder where drawn traces, bit sets, fits and compiled code are kept."""
    if context.invoked_subcommand is None:
        context.invoke(info)


#: What the parts of the cache are called.
_PARTS = {
    user_cache.BITSETS: "bit sets",
    user_cache.FITS: "fits",
    user_cache.KERNELS: "kernel times",
    user_cache.NUMBA: "compiled code",
    user_cache.TABLES: "imported tables",
    user_cache.TRACES: "drawn traces",
}


@cache.command()
def info() -> None:
    """Show the cache folder, what each part is for, its files, and how large it may grow."""
    limit = user_cache.size_limit()
    files = user_cache.files()
    click.echo(f"Folder: {user_cache.folder() or 'none: there is no home folder'}")
    click.echo(
        f"Size:   {_megabytes(sum(file.size for file in files))} MB in {len(files)} files; all but "
        f"compiled code at most {_megabytes(limit)} MB ({user_cache.SIZE_VARIABLE}), then those "
        "used longest ago go; compiled code of other versions goes after a week without use"
    )
    click.echo("Remove: eldr-sim cache clear; all can be made again, with the same results")
    click.echo()
    parts = []
    for part, what in _PARTS.items():
        sizes = [file.size for file in files if file.part == part]
        parts.append([what, str(len(sizes)), _megabytes(sum(sizes)), user_cache.PURPOSES[part]])
    print_table("Parts", ["part", "files", "MB", "what it is for"], parts)
    rows = [
        [_name(file), _megabytes(file.size), strftime("%Y-%m-%d %H:%M", localtime(file.used_s))]
        for file in files
        if file.part != user_cache.NUMBA
    ]
    if rows:
        click.echo()
        print_table("Files", ["file", "MB", "last used"], rows)


@cache.command()
def clear() -> None:
    """Remove what eldr-sim put into the cache folder; it is made anew when it is needed."""
    removed = user_cache.clear()
    size = sum(file.size for file in removed)
    for part, what in _PARTS.items():
        files = [file for file in removed if file.part == part]
        if files:
            click.echo(f"Removed {what}: {len(files)} files, {sum(f.size for f in files)} bytes")
    place = user_cache.folder() or "no folder"
    click.echo(f"Removed {len(removed)} files, {size} bytes, from {place}")


def _name(file: user_cache.CacheFile) -> str:
    name = file.path.name
    return (
        f"{file.path.parent.name}/{name}"
        if file.part in (user_cache.TABLES, user_cache.TRACES)
        else name
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"
