"""Campaign of live runs: each set-up is started, calibrated, loaded and recorded."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from eldr_sim.errors import InputError
from eldr_sim.outputs import keeping
from eldr_sim.serving.http import import_aiohttp
from eldr_sim.validation.live.calibration import engine_calibration
from eldr_sim.validation.live.calibration.setup_calibration import (
    calibrate,
    capacity,
    engine_infos,
    load_of_fit,
    read_logs,
    send_at_once,
)
from eldr_sim.validation.live.engines.client import join_proxy_log, prefill_ahead, send_load
from eldr_sim.validation.live.engines.load import (
    DOMAINS,
    Domain,
    LoadRequest,
    domain_slices,
    domains_of,
    make_load,
    read_texts,
    write_model,
)
from eldr_sim.validation.live.engines.run_writer import assemble_run, machine, versions
from eldr_sim.validation.live.engines.servers import SERVED_NAME, EngineOptions, require_vllm
from eldr_sim.validation.live.engines.setups import (
    SETUPS,
    Setup,
    existing_setup,
    start_proxy,
    started_setup,
)
from eldr_sim.validation.live.live_run import LoadInfo, RunInfo


@dataclass(frozen=True)
class LoadShape:
    """A load, by its rate or relative to the capacity of the set-up."""

    share: float  #: share of the calibrated capacity; above 1 queues grow
    #: ``lengths``, ``burstiness``, ``queue_order``: as in ``LoadInfo``.
    lengths: Literal["fixed", "recorded"]
    burstiness: float
    queue_order: Literal["fcfs", "sjf"] = "fcfs"
    rate: float | None = None  #: requests per second, in the place of the share

    @property
    def name(self) -> str:
        """Name of the load."""
        arrivals = "Poisson" if self.burstiness == 1 else "bursty"
        order = "" if self.queue_order == "fcfs" else f", {self.queue_order}"
        size = f"{100 * self.share:.0f}%" if self.rate is None else f"{self.rate:g}/s"
        return f"{size}, {self.lengths} lengths, {arrivals}{order}"


#: From light load to overload; set-ups with several decode engines get the second load only.
LOADS = (
    LoadShape(0.4, "fixed", 1.0),
    LoadShape(0.6, "recorded", 1.0),
    LoadShape(0.8, "recorded", 0.3),
    LoadShape(1.2, "fixed", 1.0),
)


def with_shortest_first(loads: Sequence[LoadShape]) -> tuple[LoadShape, ...]:
    """Return each load twice: in order of arrival, and with the shortest waiting prompt first."""
    return tuple(s for shape in loads for s in (shape, replace(shape, queue_order="sjf")))


@dataclass(frozen=True)
class Campaign:
    """Plan of a campaign."""

    out: Path  #: folder of the campaign
    options: EngineOptions  #: the engines' model and size
    #: ``loads``, ``policies``, ``repeats``: loads and policies of each set-up, and repeats of each.
    loads: tuple[LoadShape, ...] = LOADS
    policies: tuple[str, ...] = ("round_robin",)
    repeats: int = 3
    duration_s: float = 45.0  #: time over which the requests of a load arrive, s
    #: ``prompt_len``, ``output_len``: fixed lengths, or means of recorded lengths, tokens.
    prompt_len: int = 64
    output_len: int = 96
    seed: int = 0  #: seed of the loads
    #: Request log whose lengths recorded loads have; None takes Azure's conversations.
    workload: Path | None = None
    #: Weights of the domains of prompts; those without one are left out. Empty: all alike.
    domain_mix: Mapping[str, float] = field(default_factory=dict)
    #: Folder of files ``DOMAIN.txt`` whose stretches are the prompts; None draws them at random.
    texts: Path | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The served model's ``config.json``."""
        path = Path(self.options.model) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("model", f"{path}: {error}", "a folder with a config.json") from None
        return dict(config)

    @property
    def domains(self) -> Mapping[str, Domain]:
        """What prompts of each domain are; raises InputError as `read_texts`."""
        if self.texts is not None:
            return read_texts(self.texts, self.options.model)
        return domain_slices(engine_calibration.model_of(self.config).vocab_size)

    def kept(self) -> str:
        """Say what an interrupted campaign keeps."""
        return f"{self.out} keeps what was recorded; the same command continues."

    def fits(self, setup: Setup) -> bool:
        """Whether a policy of the set-up needs ELDR's offline fit."""
        return "eldr" in self.policies and len(setup.decode) > 1 and bool(setup.prefill)

    def calibration(self, setup: str) -> Path:
        """Folder of a set-up's calibration."""
        return self.out / "calibration" / setup


def record_campaign(
    campaign: Campaign,
    setups: Sequence[str],
    progress: Callable[[str, float], None],
    prefill: Sequence[tuple[str, Path]] = (),
    decode: Sequence[tuple[str, Path]] = (),
) -> list[Path]:
    """Record set-ups in turn and return the runs' folders; runs already there are kept. Raises
    InputError if the folder holds another campaign, or an engine, the proxy or a request fails.
    ``prefill``, ``decode``: URL and log folder of running engines, which are then the only
    set-up."""
    import_aiohttp()
    known = DOMAINS if campaign.texts is None else domains_of(campaign.texts)
    unknown = sorted(set(campaign.domain_mix) - set(known))
    if unknown:
        raise InputError("domain_mix", f"unknown domain {unknown[0]!r}", ", ".join(known))
    if not decode:
        require_vllm()
    elif not all(log.is_dir() for _, log in (*prefill, *decode)):
        raise InputError("decode_url", "a log folder is not there", "ELDR_SIM_TIMING of the engine")
    if decode and Path(campaign.options.model) == campaign.out / "model":
        raise InputError("model", "missing: these engines need --model", "--model DIR")
    begin_campaign(campaign, progress)
    folders: list[Path] = []
    if decode:
        setup = existing_setup(campaign.out / "logs", prefill, decode)
        with keeping(campaign.kept):
            return record_setup(campaign, setup, progress)
    gpu = "gpu" in machine()
    with keeping(campaign.kept):
        for name in setups:
            n_decode = sum(role != "prefill" for _, role in SETUPS[name])
            planned = [out for out, *_ in _planned(campaign, name, n_decode)]
            if all(out.exists() for out in planned):
                folders += planned
                continue
            log = campaign.out / "logs" / f"{name}-{time.time_ns():x}"
            progress(f"{name}: starting vLLM", 0.0)
            with started_setup(name, campaign.options, log, gpu=gpu) as setup:
                folders += record_setup(campaign, setup, progress)
    return folders


def begin_campaign(campaign: Campaign, progress: Callable[[str, float], None]) -> None:
    """Make a campaign's folder and random model; raises InputError if it holds another's."""
    model = Path(campaign.options.model)
    campaign.out.mkdir(parents=True, exist_ok=True)
    if model == campaign.out / "model" and not model.exists():
        progress("making the model", 0.0)
        write_model(model, campaign.seed)
    _check_same(campaign)


def _check_same(campaign: Campaign) -> None:
    """Write the plan into the campaign's folder; refuse a folder of another campaign."""
    about = asdict(campaign) | {"out": ""}
    text = json.dumps(about, indent=2, default=str) + "\n"
    file = campaign.out / "campaign.json"
    if not file.exists():
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        problem = f"{file} is of a campaign with other options"
        raise InputError("out", problem, "a new folder, or the same options")


def record_setup(
    campaign: Campaign, setup: Setup, progress: Callable[[str, float], None]
) -> list[Path]:
    """Calibrate a running set-up, then record every load, policy and repeat that is not there;
    return the runs' folders. Raises InputError if an engine, the proxy or a request fails."""
    with on_core(setup.client_core):
        calibrated = calibrated_setup(campaign, setup, progress)
        engine = engine_calibration.model_of(campaign.config), calibrated
        rate = capacity(setup, campaign.options, *engine, campaign.prompt_len, campaign.output_len)
        planned = _planned(campaign, setup.name, len(setup.decode))
        for out, number, policy, repeat in planned:
            if not out.exists():
                shape = campaign.loads[number]
                info = _begun(campaign, setup, number) or _load_info(campaign, shape, rate)
                told = partial(progress, f"{setup.name} {policy}: {shape.name} #{repeat}")
                _record(campaign, setup, policy, info, repeat, out, told)
        return [out for out, *_ in planned]


def calibrated_setup(
    campaign: Campaign, setup: Setup, progress: Callable[[str, float], None]
) -> engine_calibration.EngineCalibration:
    """Calibrate a running set-up, unless it was before, and return its calibration."""
    for endpoint in setup.endpoints:  # an engine describes itself when it gets a request
        hello = LoadRequest(f"hello-{time.time_ns():x}", "", [4, 5, 6, 7], 2, 0.0)
        send_at_once([hello], endpoint.url)
    folder = campaign.calibration(setup.name)
    if not (folder / "calibration.json").exists():
        fitted = None
        if campaign.fits(setup):
            fitted = load_of_fit(campaign.domains, campaign.prompt_len, campaign.seed + 1)
        told = partial(progress, f"{setup.name}: calibration")
        calibrate(folder, setup, campaign.options, campaign.config, told, fitted, campaign.seed)
    return engine_calibration.read_calibration(folder)


def _planned(campaign: Campaign, setup: str, n_decode: int) -> list[tuple[Path, int, str, int]]:
    """Return folder, load number, policy and repeat of all runs of a set-up."""
    several = n_decode > 1
    numbers = range(1, 2) if several and campaign.loads == LOADS else range(len(campaign.loads))
    return [
        (campaign.out / "runs" / f"{setup}-{policy}-{number}-{repeat}", number, policy, repeat)
        for repeat in range(campaign.repeats)  # of different loads in turn: drift meets all alike
        for number in numbers
        for policy in (campaign.policies if several else ("round_robin",))
    ]


def _begun(campaign: Campaign, setup: Setup, number: int) -> LoadInfo | None:
    """Return the load of runs recorded earlier, so that its rate stays the same."""
    for file in sorted((campaign.out / "runs").glob(f"{setup.name}-*-{number}-*/run.json")):
        return RunInfo.model_validate_json(file.read_text(encoding="utf-8")).load
    return None


def _load_info(campaign: Campaign, shape: LoadShape, capacity: float) -> LoadInfo:
    rate = shape.share * capacity if shape.rate is None else shape.rate
    return LoadInfo(
        name=shape.name,
        request_rate=round(rate, 4),
        burstiness=shape.burstiness,
        lengths=shape.lengths,
        queue_order=shape.queue_order,
        num_requests=max(8, math.ceil(rate * campaign.duration_s)),
        seed=campaign.seed,
    )


def _record(
    campaign: Campaign,
    setup: Setup,
    policy: str,
    info: LoadInfo,
    repeat: int,
    out: Path,
    progress: Callable[[float], None],
) -> None:
    """Send one load and write its recorded run."""
    out.parent.mkdir(parents=True, exist_ok=True)
    options = campaign.options
    most_output = min(3 * campaign.output_len, options.max_model_len - campaign.prompt_len)
    load = make_load(
        info,
        campaign.domains,
        prompt_len=campaign.prompt_len,
        output_len=campaign.output_len,
        prompt_range=(4, min(4 * campaign.prompt_len, options.max_model_len - most_output)),
        output_range=(2, most_output),
        workload=campaign.workload if info.lengths == "recorded" else None,
        domain_mix=campaign.domain_mix,
        # An engine keeps one log, so names must differ from those of an earlier, failed attempt.
        prefix=f"{out.name}-{time.time_ns():x}",
    )
    log = setup.folder / f"{out.name}.jsonl"
    fitted = campaign.calibration(setup.name) / "artifact.npz"
    artifact = fitted if policy == "eldr" else None
    with start_proxy(setup, policy, log, artifact, campaign.seed) as url:
        if setup.prefilled:
            load = prefill_ahead(load, setup.prefill[0].url, model=SERVED_NAME)
        requests = send_load(load, url, model=SERVED_NAME, progress=progress)
    setup.check_alive()
    if len(setup.endpoints) > 1:
        requests = join_proxy_log(requests, log)
    logs = read_logs(setup, requests)
    part = setup.decode if setup.prefilled else setup.endpoints
    run = RunInfo(
        setup=setup.name,
        policy=policy,
        repeat=repeat,
        load=info,
        engines=engine_infos(setup, logs),
        prefilled=setup.prefilled,
        model=campaign.config,
        max_model_len=options.max_model_len,
        versions=versions(),
        machine=machine(),
    )
    steps_of = {endpoint.name: logs[endpoint.name] for endpoint in part}
    assemble_run(out, run, requests, steps_of, setup.endpoints, options.model)


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Pin the client to a core, away from the threads that it measures."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
