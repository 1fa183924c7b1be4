"""The JSON files that ship with the package."""

import json
from importlib import resources
from typing import Any


def shipped_json(name: str) -> Any:
    """Return the content of ``kernel_profiles/data/NAME.json``."""
    return json.loads(resources.files(__package__).joinpath(f"data/{name}.json").read_text())
