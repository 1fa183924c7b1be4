"""Draw the pictures of the pages again, from today's code.

``python docs/pictures.py FOLDER [NAME ...]`` runs the commands below in FOLDER, and puts what they
draw into ``docs/images``, each with the version, the date and the command in its metadata.
``--check`` draws them, and compares figures with those of ``docs/images`` instead of replacing
them: the command of ``.ci/run``.
``python docs/render.py pictures`` draws those of claims. Not drawn here: ``report.png``, a
screenshot of a browser, whose caption has the date and the version."""

import json
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import NamedTuple

import eldr_sim

IMAGES = Path(__file__).parent / "images"
ROOT = Path(__file__).parents[1]


class Drawing(NamedTuple):
    """The commands of a picture, and the file that the last one writes."""

    commands: tuple[str, ...]
    file: str


_FAULT = (
    "eldr-sim run --trace reference-moe --topology 2P4D --policy jsq --request-rate 60 "
    "--output-len 200 --warmup 10 --duration 60 --goodput ttft:500,tpot:25 "
    "--fail decode:1@30s+15s --retry migrate --health-delay-ms 2000 --plot --out fault"
)
#: The pictures by name.
PICTURES = {
    "same_requests": Drawing(
        (
            "eldr-sim run --policy jsq --topology 8P16D --out jsq",
            "eldr-sim run --policy eldr --topology 8P16D --out eldr",
            f"{sys.executable} {ROOT}/studies/one_picture.py jsq eldr same_requests.png",
        ),
        "same_requests.png",
    ),
    "experts_by_batch": Drawing(
        ("eldr-sim run --trace reference-moe --policy jsq --topology 8P16D --plot --out ref",),
        "ref/activated_experts_against_batch.png",
    ),
    "distinct_experts": Drawing(
        ("eldr-sim trace inspect gpt-oss-20b --plot --out inspect",), "inspect/distinct_experts.png"
    ),
    "map_eldr": Drawing(
        (f"{sys.executable} {ROOT}/studies/eldr/map.py map_eldr.png",), "map_eldr.png"
    ),
    "fault_tpot": Drawing((_FAULT,), "fault/tpot_over_time.png"),
}


def about(drawing: Drawing) -> dict[str, str]:
    """Return what a picture's metadata say of its making."""
    said = " && ".join(drawing.commands).replace(sys.executable, "python").replace(f"{ROOT}/", "")
    version = f"eldr-sim {eldr_sim.__version__}"
    return {"Software": version, "Creation Time": f"{date.today()}", "Source": said}


def keep(made: Path, name: str, drawing: Drawing) -> None:
    """Copy a picture into ``docs/images`` with its metadata, and the figures beside it."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    with Image.open(made) as picture:
        info = PngInfo()
        for key, text in {**getattr(picture, "text", {}), **about(drawing)}.items():
            info.add_text(key, text)
        picture.save(IMAGES / f"{name}.png", pnginfo=info)
    if (figures := made.with_suffix(".json")).exists():
        text = json.dumps(json.loads(figures.read_text()), indent=1)
        (IMAGES / f"{name}.json").write_text(text + "\n")


def check(made: Path, name: str) -> None:
    """Refuse a picture that was not drawn, or shows other figures than that of ``docs/images``."""
    assert made.stat().st_size > 0, made
    if (figures := made.with_suffix(".json")).exists():
        kept = json.loads((IMAGES / f"{name}.json").read_text())
        assert json.loads(figures.read_text()) == kept, f"{name}: draw it again"


def main(folder: Path, names: list[str], checking: bool = False) -> None:
    """Run the commands of the named pictures, or of all, and keep or check what they draw."""
    for name, drawing in PICTURES.items():
        if names and name not in names:
            continue
        for command in drawing.commands:
            words = shlex.split(command)
            if words[0] == "eldr-sim":
                words[0] = str(Path(sys.executable).with_name("eldr-sim"))
            subprocess.run(words, cwd=folder, check=True)
        if checking:
            check(folder / drawing.file, name)
        else:
            keep(folder / drawing.file, name, drawing)


if __name__ == "__main__":
    names = [word for word in sys.argv[2:] if word != "--check"]
    main(Path(sys.argv[1]), names, "--check" in sys.argv)
