"""Expert signatures of live requests, read from the capture log as the engine writes it."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture.step_log import Gathered, LogReader, external_ids


class SignatureReader:
    """Reader of the prefill counts of requests that prefill engines have just computed.

    An engine logs a step before it answers (`capture.step_log`), so the rows of a prompt are
    on disk when the answer arrives.

    ``folders``: folders that ``ELDR_SIM_CAPTURE`` names in the prefill engines. Decode engines must
    use other folders, or their logs would be kept in memory.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]]) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._workers: dict[Path, LogReader] = {}
        self._gathered = Gathered()

    def counts(self, request_id: str) -> NDArray[np.uint32]:
        """Return how often the tokens of a prompt chose each expert, and drop the prompt's rows.

        ``request_id``: the client's ``X-Request-Id``. Counts: uint32 ``[layers, experts]``, layers
        with a gate only. Raises InputError if the log lacks tokens of the prompt.
        """
        self._read_on()
        name = self._logged_name(request_id)
        logged = self._gathered.request(name)
        self._gathered.forget(name)
        header = self._gathered.header
        assert header is not None
        rows = logged.experts[: len(logged.prompt)]
        if logged.missing or not len(rows) or len(rows) < len(logged.prompt):
            problem = f"prompt tokens of {request_id} were never computed"
            allowed = "prefill engines started with --no-enable-prefix-caching"
            raise InputError("capture", problem, allowed)
        layers, experts = len(header.layers), header.n_experts
        cells = rows + np.arange(layers)[:, None] * experts
        counted = np.bincount(cells.ravel(), minlength=layers * experts)
        return counted.reshape(layers, experts).astype(np.uint32)

    def _read_on(self) -> None:
        for folder in self._folders:
            for file in folder.glob("steps-*.jsonl"):
                self._gathered.read(self._workers.setdefault(file, LogReader(file)))

    def _logged_name(self, request_id: str) -> str:
        for name in reversed(self._gathered.names):  # what has just been computed is last
            if request_id in external_ids(name):
                return name
        problem = f"request {request_id} is not in the log in {', '.join(map(str, self._folders))}"
        allowed = "the folder that ELDR_SIM_CAPTURE names in the prefill engines"
        raise InputError("capture", problem, allowed)
