"""vLLM engines as child processes: start, pinning to a core, health, stop."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture.vllm_plugin import ENVIRONMENT_VARIABLE as CAPTURE_VARIABLE
from eldr_sim.validation.live.engines.plugin import TIMING_VARIABLE

#: ``--served-model-name`` of engines and the model that clients ask for.
SERVED_NAME = "model"
_START_LIMIT_S = 900.0
_STOP_LIMIT_S = 60.0
_KV_LEASE_S = 1800  # longer than any run: decode may come long after prefill


@dataclass(frozen=True)
class EngineOptions:
    """Options shared by all engines of a set-up."""

    model: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    block_size: int | None = None
    kv_cache_gib: int = 1  #: memory of the KV cache of an engine on a CPU, GiB
    extra: tuple[str, ...] = ()  #: further arguments of ``vllm serve``
    capture: bool = True  #: whether the plug-in logs which experts tokens choose
    kv_events: bool = False  #: whether engines publish what their KV caches hold


@dataclass
class EngineProcess:
    """``vllm serve`` with the plug-ins, a context manager; InputError if it does not start."""

    options: EngineOptions  #: the model and the engine's size
    #: ``name``, ``role``: name in logs; role in the set-up.
    name: str
    role: Literal["prefill", "decode", "colocated"]
    log: Path  #: folder for logs; made if missing
    core: int | None = None  #: CPU core of the model's compute thread; None on a GPU
    #: CPU core of all other threads, so that they do not slow down the compute thread.
    host_core: int | None = None
    devices: tuple[int, ...] = ()  #: GPUs of the engine
    url: str = ""
    events: str = ""  #: where it publishes what its KV cache holds, if it does
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> "EngineProcess":
        self.start()
        self.wait()
        return self

    def start(self) -> None:
        """Start without waiting, as others load, too; at the old address if it had one."""
        require_vllm()
        port = int(self.url.rpartition(":")[2]) if self.url else free_port()
        side = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log.mkdir(parents=True, exist_ok=True)
        with self._output.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", *self._arguments(port)],
                env=os.environ | self._environment(side),
                stdout=stream,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it answers, then pin its threads; begin again where a port was taken."""
        for starts_left in (2, 1, 0):
            assert self._process is not None
            if answers(self.url, self._process, _START_LIMIT_S):
                break
            error, late = self._last_error(), self._process.poll() is None
            self.stop()
            # Between the choice of a port and its use, NIXL's side channel among them.
            if "Address already in use" in error and starts_left:
                self.url = ""
                self.start()
                continue
            if late:
                error = f"/health did not answer in {_START_LIMIT_S:.0f} s; last: {error}"
            raise InputError("vllm", f"{self.name} did not start: {error}", str(self._output))
        self.check_alive()
        if self.host_core is not None:
            self._pin(self.host_core)

    def check_alive(self) -> None:
        """Raise InputError if the process has ended."""
        if self._process is None or self._process.poll() is not None:
            raise InputError("vllm", f"{self.name} ended: {self._last_error()}", str(self._output))

    def send_signal(self, what: signal.Signals) -> None:
        """Send a signal to all processes of the engine."""
        assert self._process is not None
        os.killpg(self._process.pid, what)

    def stop(self) -> None:
        """Stop the engine and all its processes."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_LIMIT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that outlived it
        process.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _output(self) -> Path:
        return self.log / "vllm.log"

    def _last_error(self) -> str:
        """Return the last error line of the output."""
        try:
            lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "no output"
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return " ".join((errors or lines or ["no output"])[-1].split())[:300]

    def _arguments(self, port: int) -> list[str]:
        options = self.options
        arguments = ["serve", options.model, "--served-model-name", SERVED_NAME]
        values = {
            "host": "127.0.0.1",
            "port": port,
            "dtype": options.dtype,
            "max-model-len": options.max_model_len,
            "max-num-seqs": options.max_num_seqs,
            "max-num-batched-tokens": options.max_num_batched_tokens,
            "tensor-parallel-size": options.tensor_parallel_size,
            "block-size": options.block_size,
        }
        for flag, value in values.items():
            if value is not None:
                arguments += [f"--{flag}", str(value)]
        arguments += ["--enforce-eager", "--no-enable-prefix-caching", "--no-async-scheduling"]
        arguments += ["--skip-tokenizer-init", "--disable-uvicorn-access-log"]
        if self.role != "colocated":
            kind = "kv_producer" if self.role == "prefill" else "kv_consumer"
            transfer: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": kind}
            if self.core is not None:
                transfer["kv_buffer_device"] = "cpu"
            if self.role == "prefill":
                transfer["kv_connector_extra_config"] = {"kv_lease_duration": _KV_LEASE_S}
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        if options.kv_events:
            self.events = self.events or f"tcp://127.0.0.1:{free_port()}"
            # vLLM listens at an address with a star, and calls at any other.
            told = {"enable_kv_cache_events": True, "publisher": "zmq",
                    "endpoint": self.events.replace("127.0.0.1", "*")}  # fmt: skip
            arguments += ["--kv-events-config", json.dumps(told)]
        return [*arguments, *options.extra]

    def _environment(self, side_channel: int) -> dict[str, str]:
        variables = {
            TIMING_VARIABLE: str(self.log),
            CAPTURE_VARIABLE: str(self.log) if self.options.capture else "",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        }
        if self.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        if self.core is not None:
            variables |= {
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(self.core),
                "VLLM_CPU_KVCACHE_SPACE": str(self.options.kv_cache_gib),
            }
        return variables

    def _pin(self, core: int) -> None:
        """Pin all threads except the compute threads to a core."""
        assert self._process is not None
        for process in _descendants(self._process.pid):
            name = Path(f"/proc/{process}/comm").read_text(encoding="utf-8")
            for thread in map(int, os.listdir(f"/proc/{process}/task")):
                computes = os.sched_getaffinity(thread) == {self.core}
                if not (computes and name.startswith("VLLM::Wor")):
                    os.sched_setaffinity(thread, {core})


def require_vllm() -> None:
    """Raise InputError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        problem = "vLLM is not installed in this environment"
        raise InputError("vllm", problem, "pip install vllm, or docs/live.md")


def answers(url: str, process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait until a server answers; return False if its process ends or the time is up first."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() <= deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.1)
    return False


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _descendants(process: int) -> list[int]:
    found = [process]
    for task in os.listdir(f"/proc/{process}/task"):
        children = Path(f"/proc/{process}/task/{task}/children").read_text(encoding="utf-8")
        for child in children.split():
            found += _descendants(int(child))
    return found
