"""Add compiled code to a wheel: ``python .ci/compiled_wheel.py WHEEL FOLDER`` from a checkout.

Writes a wheel for this version of Python, numba and platform, to a folder. Some runs compile the
code, for each level of processors (``_eldr_sim/shipped.py``) by itself, and twelve of them are
compared with the digest of results. Needs `wheel` and what the wheel needs; a processor without a
level, such as any but an x86-64, writes nothing.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from eldr_sim import shipped

#: Besides the runs of the digest: what a first run with a model's drawn routing needs.
RUNS = [
    ["--policy", policy, "--topology", "2P4D", "--num-requests", "400", "--warmup", "1"]
    for policy in ("eldr", "marginal_cost")
]


def main(wheel: Path, folder: Path) -> None:
    """Write the wheel with compiled code."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        call("-m", "wheel", "unpack", wheel, "--dest", scratch)
        (root,) = scratch.iterdir()
        for level in shipped.supported():
            archive = shipped.archive(level, root / "eldr_sim")
            archive.parent.mkdir(exist_ok=True)
            with tarfile.open(archive, "w:xz") as file:
                file.add(compiled(level, root, scratch / level), "")
        call("-m", "wheel", "pack", root, "--dest-dir", scratch)
        (packed,) = scratch.glob("*.whl")
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        tags = ("--python-tag", python, "--abi-tag", python, "--platform-tag", platform)
        call("-m", "wheel", "tags", "--remove", *tags, packed)
        (tagged,) = scratch.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / tagged.name
        made.write_bytes(tagged.read_bytes())
        print(f"wrote {made}, {made.stat().st_size / 1e6:.1f} MB")


def compiled(level: str, root: Path, cache: Path) -> Path:
    """Run the simulator of an unpacked wheel; return the folder of what it compiled."""
    environment = {
        "ELDR_SIM_CACHE": str(cache),
        "NUMBA_CPU_NAME": level,
        "NUMBA_CPU_FEATURES": shipped.LEVELS[level],
        "PYTHONPATH": str(root),
    }
    call("tests/digest.py", **environment)
    for run in RUNS:
        call("-c", "from eldr_sim.start import main; main()", "run", *run, **environment)
    (code,) = (cache / "numba").iterdir()
    return code


def call(*arguments: str | Path, **environment: str) -> None:
    """Run Python; raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, *arguments], check=True, env=os.environ | environment)


if __name__ == "__main__":
    if not shipped.supported():
        sys.exit("this processor is of no level that compiled code is shipped for")
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
