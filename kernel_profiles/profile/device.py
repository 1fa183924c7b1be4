"""The device that is measured: what it is, how it is set, its entry as a GPU. Cards of one name may
differ by power cap, clocks, driver: profiles merge where every fact agrees."""

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.profile.timing import CpuTimer, CudaTimer, Timer, require_torch

_SMI_FIELDS = (
    "driver_version", "power.limit", "power.max_limit", "clocks.max.sm", "clocks.max.memory",
    "clocks.applications.graphics", "ecc.mode.current", "mig.mode.current",
)  # fmt: skip
#: What is noted beside each measurement.
_STATE_FIELDS = (
    "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active",
)  # fmt: skip
WARM_UP_S = 2.0  #: of a GPU before its first measurement
_AMD_CACHE = 256 << 20  # Infinity Cache of an MI300X, which the driver does not report


@dataclass(frozen=True)
class Device:
    """One device."""

    torch_device: str  #: ``cuda`` or ``cpu``
    name: str  #: GPU name of the tables: a known GPU's, else one made of the driver's name
    facts: Mapping[str, str]  #: what two profiles must agree on to be merged
    #: ``cache_bytes``, ``memory_bytes``: last-level cache and memory.
    cache_bytes: int
    memory_bytes: int
    timer: Timer  #: times calls on it

    def state(self) -> dict[str, str]:
        """Return the clocks, temperature and reasons for throttling of now; nothing of a CPU, or
        where ``nvidia-smi`` does not tell."""
        return {} if self.is_cpu else _query(_STATE_FIELDS)

    def warm_up(self, seconds: float = WARM_UP_S) -> None:
        """Let the clocks of a GPU rise: multiply matrices for this long."""
        if self.is_cpu:
            return
        torch = require_torch()
        a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=self.torch_device)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                a @ a
            self.synchronize()

    @property
    def is_cpu(self) -> bool:
        """Whether the CPU itself is measured."""
        return self.torch_device == "cpu"

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_cpu:
            require_torch().cuda.synchronize()


def open_device(kind: str, threads: int = 1) -> Device:
    """Find the device to measure: ``cuda`` (AMD under ROCm, too), or ``cpu`` with this number of
    ``threads``. Raises InputError: torch is missing, or sees no such device."""
    torch = require_torch()
    if kind == "cpu":
        return _open_cpu(torch, threads)
    if kind != "cuda":
        raise InputError("device", repr(kind), "cuda, cpu")
    if not torch.cuda.is_available():
        raise InputError("device", "torch sees no CUDA or ROCm device", "cpu")
    properties = torch.cuda.get_device_properties(0)
    name = torch.cuda.get_device_name(0)
    rocm = torch.version.hip is not None
    facts = {
        "device": name,
        "memory_bytes": str(properties.total_memory),
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "runtime": f"ROCm {torch.version.hip}" if rocm else f"CUDA {torch.version.cuda}",
        **(_amd_facts() if rocm else _nvidia_facts()),
    }
    cache = int(getattr(properties, "L2_cache_size", 0)) or 50 << 20
    return Device(
        "cuda",
        _gpu_name(name),
        facts,
        max(cache, _AMD_CACHE) if rocm else cache,
        int(properties.total_memory),
        CudaTimer(),
    )


def reference_s(device: Device) -> float:
    """Return the seconds of a product of two 4,096 x 4,096 matrices: the point that tells whether
    clocks drift."""
    torch = require_torch()
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device.torch_device)
    timed: float = device.timer.time([[lambda: a @ a] * 4], device.timer.modes[0]).median_s
    return timed


def cpu_facts() -> dict[str, str]:
    """What Linux says of a processor, such as ``model name``; nothing where it does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def cpu_model() -> str:
    """Name of the processor; of its architecture where the system does not tell."""
    return cpu_facts().get("model name") or platform.machine()


def _open_cpu(torch: Any, threads: int) -> Device:
    if threads < 1:
        raise InputError("threads", f"{threads}", "1 or more")
    torch.set_num_threads(threads)
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    facts = {
        "device": cpu_model(),
        "driver_version": platform.release(),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "clocks": governor.read_text().strip() if governor.is_file() else "unknown",
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "torch": torch.__version__,
    }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = f"{_gpu_name(facts['device'])}-{threads}-thread{'s' if threads > 1 else ''}"
    # One thread's own time leaves out what other processes take; several threads need the wall's.
    clock = time.thread_time if threads == 1 else time.perf_counter
    return Device("cpu", name, facts, _cpu_cache(), memory, CpuTimer(clock=clock))


def _cpu_cache() -> int:
    """Bytes of the largest cache that core 0 sees; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM])", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"K": 10, "M": 20}[match[2]])
    return max(sizes, default=32 << 20)


def _gpu_name(name: str) -> str:
    try:
        return load_gpu(name).name
    except InputError:
        return "-".join(re.sub(r"[^A-Za-z0-9]+", " ", name).split())


def _nvidia_facts() -> dict[str, str]:
    return _query(_SMI_FIELDS) or {"driver_version": "unknown"}


def _query(fields: tuple[str, ...]) -> dict[str, str]:
    """Return what ``nvidia-smi`` says of the GPU; nothing where it does not."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = f"--query-gpu={','.join(fields)}"
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", device, query, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if done.returncode or len(values) != len(fields):
        return {}
    return dict(zip(fields, values, strict=True))


def _amd_facts() -> dict[str, str]:
    facts = {}
    version = Path("/sys/module/amdgpu/version")
    facts["driver_version"] = version.read_text().strip() if version.is_file() else "unknown"
    cards = sorted(Path("/sys/class/drm").glob("card*/device/hwmon/hwmon*/power1_cap"))
    if cards:
        facts["power.limit"] = f"{int(cards[0].read_text()) / 1e6:.0f} W"
    clocks = sorted(Path("/sys/class/drm").glob("card*/device/pp_dpm_sclk"))
    if clocks:
        facts["clocks.max.sm"] = clocks[0].read_text().split()[-1].strip("*")
    return facts


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def differing_facts(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Facts that differ, as ``name: one, other``; a fact that one lacks differs."""
    return [
        f"{name}: {one.get(name, 'not recorded')}, {other.get(name, 'not recorded')}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name) or name not in one or name not in other
    ]


def copy_bandwidth(device: Device) -> float:
    """Bytes read and written per second by a large copy, median."""
    torch = require_torch()
    size = 1 << 28 if device.is_cpu else 1 << 30
    size = max(size, 4 * device.cache_bytes)
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    timing = device.timer.time([[lambda: target.copy_(source)]], "eager")
    return 2 * size / timing.median_s


def gemm_flops(device: Device) -> float:
    """FLOP per second of a large bfloat16 GEMM, median."""
    torch = require_torch()
    size = 1024 if device.is_cpu else 8192
    a, b = (
        torch.randn(size, size, device=device.torch_device, dtype=torch.bfloat16) for _ in range(2)
    )
    timing = device.timer.time([[lambda: torch.mm(a, b)]], "eager")
    return float(2 * size**3 / timing.median_s)


def gpu_entry(device: Device, bandwidth: float, flops: float) -> GPU:
    """Describe the device as a GPU of a cluster: memory as the system says, bandwidth and
    throughput measured, links, not measured, as its copy bandwidth."""
    cpu = device.is_cpu
    return GPU(
        name=device.name,
        memory_bytes=device.memory_bytes,
        memory_bandwidth=bandwidth,
        bf16_flops=flops,
        fp8_flops=0.0,
        nic_bandwidth=bandwidth,
        intra_node_bandwidth=bandwidth,
        engine_reserved_bytes=(1 << 30) if cpu else 3758096384,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        source=f"measured by eldr-sim profile on {device.facts['device']}: large copy, bf16 GEMM; "
        "links are not measured and take the copy's bandwidth",
        engine_reserved_source="1 GiB for runtime and activations, assumed"
        if cpu
        else "3.5 GiB as for the known GPUs",
        defaults_source="vLLM engine/arg_utils.py, defaults below 70 GiB",
    )
