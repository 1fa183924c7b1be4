"""Expert signatures of live requests, read from the capture log while the engine writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.capture.step_log import Gathered, LogReader, external_ids

__all__ = ["SignatureReader"]


class SignatureReader:
    """Gives the prefill counts of requests that prefill engines have just computed.

    An engine logs a step before it answers (`traces.capture.step_log`), so that the rows of a
    prompt are on disk when its answer is there.

    Parameters
    ----------
    folders
        What ``ELDR_SIM_CAPTURE`` names in the prefill engines. Decode engines write into other
        folders: what they log would be kept here for nothing.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]]) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._workers: dict[Path, LogReader] = {}
        self._gathered = Gathered()

    def counts(self, request_id: str) -> NDArray[np.uint32]:
        """Return how often each expert was chosen by the tokens of a prompt, and forget it.

        Parameters
        ----------
        request_id
            What the client sent as ``X-Request-Id``.

        Returns
        -------
        counts
            uint32 ``[layers, experts]``, of the layers that have a gate.

        Raises
        ------
        InputError
            If the log does not have the whole prompt.
        """
        self._read_on()
        name = self._logged_name(request_id)
        logged = self._gathered.request(name)
        self._gathered.forget(name)
        header = self._gathered.header
        assert header is not None
        rows = logged.experts[: len(logged.prompt)]
        if logged.missing or not len(rows) or len(rows) < len(logged.prompt):
            raise InputError(
                "capture",
                f"prompt tokens of {request_id} were never computed",
                "prefill engines started with --no-enable-prefix-caching",
            )
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
        folders = ", ".join(map(str, self._folders))
        raise InputError(
            "capture",
            f"request {request_id} is not in the log in {folders}",
            "the folder that ELDR_SIM_CAPTURE names in the prefill engines",
        )
