"""Captured routing from the log that the vLLM plug-in wrote."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture.captured import CapturedRouting
from eldr_sim.traces.routing.capture.prompts import Prompt
from eldr_sim.traces.routing.capture.step_log import Header, LoggedRequest, external_ids, read_log


@dataclass(frozen=True)
class Collected:
    """Requests that `collect` found in the log, and those that it did not."""

    captured: CapturedRouting  #: their routing, one entry for each of ``prompts``
    prompts: list[Prompt]  #: the requests that were found whole, in the order of the file
    absent: list[str]  #: names of requests that the log does not have
    unfinished: list[str]  #: names of requests without a generated token in the log
    unlabelled: int  #: requests of the log that are not among those sent, such as a warm-up
    model: str  #: folder or hub name that the engine served


def collect(folder: str | os.PathLike[str], requests: Sequence[Prompt]) -> Collected:
    """Join the log of an engine with the requests that were sent to it, by ``request_id`` (what the
    client sent as ``X-Request-Id``), or else by prompts of token ids. ``folder``: what
    ``ELDR_SIM_CAPTURE`` named.

    Raises InputError if the log is broken, none of the requests is in it, or prompt tokens were
    never computed (prefix caching was on, or a worker's log is missing)."""
    header, logged = read_log(folder)
    by_name: dict[str, LoggedRequest] = {}
    for entry in reversed(logged):
        by_name |= dict.fromkeys(reversed(external_ids(entry.request_id)), entry)
    by_prompt: dict[tuple[int, ...], list[LoggedRequest]] = {}
    for entry in logged:
        by_prompt.setdefault(tuple(entry.prompt), []).append(entry)
    used: set[str] = set()
    matched: list[tuple[Prompt, LoggedRequest]] = []
    absent, unfinished = [], []
    for request in requests:
        match = by_name.get(request.request_id)
        if match is None and isinstance(request.content, list):
            same = by_prompt.get(tuple(request.content), [])  # type: ignore[arg-type]
            match = next((entry for entry in same if entry.request_id not in used), None)
        if match is None or match.request_id in used:
            absent.append(request.request_id)
            continue
        used.add(match.request_id)
        if match.missing:
            raise InputError(
                "log",
                f"{match.missing} of the {len(match.experts)} tokens of {request.request_id} were "
                "never computed",
                "logs of all workers, from engines started with --no-enable-prefix-caching",
            )
        if len(match.experts) <= len(match.prompt):
            unfinished.append(request.request_id)
        else:
            matched.append((request, match))
    if unfinished and not matched:
        problem = f"none of the {len(unfinished)} requests that are in it has a generated token"
        raise InputError("log", problem, "the logs of prefill and decode engines in one folder")
    if not matched:
        raise InputError(
            "log",
            f"none of the {len(requests)} requests is among the {len(logged)} of the log, such as "
            f"{logged[0].request_id}"
            if logged
            else "no step was logged",
            "request_id as sent in X-Request-Id, or prompts that are lists of token ids",
        )
    return Collected(
        captured=_captured(header, [entry for _, entry in matched]),
        prompts=[request for request, _ in matched],
        absent=absent,
        unfinished=unfinished,
        unlabelled=len(logged) - len(used),
        model=header.model,
    )


def _captured(header: Header, entries: Sequence[LoggedRequest]) -> CapturedRouting:
    return CapturedRouting(
        experts=[entry.experts for entry in entries],
        prompt_len=[len(entry.prompt) for entry in entries],
        layers=header.layers,
        n_decoder_layers=header.n_decoder_layers,
        n_experts=header.n_experts,
        captured_by=header.engine,
        tool_versions=header.tool_versions,
    )
