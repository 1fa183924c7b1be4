"""What the router has logged of the requests of a load."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.validation.live.live_run import REQUESTS


def join_proxy_log(requests: pa.Table, path: str | os.PathLike[str]) -> pa.Table:
    """Put what the proxy has logged into the client's table.

    Raises InputError if the file is no log of a proxy, or one of the requests is not in it exactly
    once.

    ``requests``: `live_run.REQUESTS` as `client.send_load` returns it; ``path``:
    ``ProxyConfig.log``: ``request_id``, ``prefilled_s`` and ``routed_s`` (s of `time.monotonic`; no
    ``prefilled_s`` without prefill engines) and ``engine`` of each request, in the order of
    routing.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found.setdefault(entry["request_id"], []).append(entry)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("proxy log", f"{path}: {error}") from None
    entries = []
    for name in requests["request_id"].to_pylist():
        mine = found.get(name, [])
        if len(mine) != 1:
            raise InputError("proxy log", f"{path} names request {name} {len(mine)} times", "once")
        entries += mine
    for key in ("prefilled_s", "routed_s", "engine"):
        field = REQUESTS.field(key)
        column = pa.array([entry[key] for entry in entries], field.type)
        requests = requests.set_column(requests.column_names.index(key), field, column)
    return requests
