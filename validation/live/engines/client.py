"""Open-loop load client: the arrival of each output token, and what the router has logged."""

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.kinds import AnyPath, Progress, Row
from eldr_sim.serving.bodies import prefill_body
from eldr_sim.serving.http import import_aiohttp, open_session
from eldr_sim.validation.live.engines.load import Load, LoadRequest
from eldr_sim.validation.live.live_run import REQUESTS

#: Time to prepare before the first request, s.
_LEAD_S = 0.2
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_IDS = re.compile(rb'"token_ids": ?\[([\d, ]*)\]')


def send_load(load: Load, url: str, **told: Any) -> pa.Table:
    """Send a load as `send_turns` does, and return its table alone."""
    return send_turns(load, url, **told)[0]


def send_turns(
    load: Load,
    url: str,
    *,
    model: str,
    max_concurrency: int | None = None,
    temperature: float = 1.0,
    timeout_s: float = 600.0,
    start_s: float | None = None,
    tolerant: bool = False,
    progress: Progress | None = None,
) -> tuple[pa.Table, list[list[int]]]:
    """Send every request at its own time (open loop), and wait for all tokens.

    Returns `live_run.REQUESTS` in the order of the load, times of `time.monotonic`; what only the
    proxy knows comes by `join_proxy_log`; and the tokens of each prompt and its answer, where
    others go on with it. Raises InputError if aiohttp is not installed or a request fails; the
    others are cancelled.

    ``url``: of an engine or the proxy, which streams completions with ``continuous_usage_stats``;
    ``max_concurrency``: as of ``vllm bench serve``; ``start_s``: from which the load's times count,
    0.2 s from now if None; ``tolerant``: requests that fail or break off have the tokens that came.
    Requests are sent 0 to 1 ms late (``epoll``). The server says how many tokens a chunk has; they
    get one time."""
    told, turns = (model, temperature), any(request.parent >= 0 for request in load.requests)
    # Built before the first request is sent, as the client shares its core with the engines.
    bodies = [_body(request, *told, return_ids=turns) for request in load.requests]
    moments: list[tuple[float, list[float]]] = [(0.0, [])] * len(bodies)
    contexts = [request.prompt for request in load.requests]
    prompt_len = [len(prompt) for prompt in contexts]
    done, address = 0, url.rstrip("/") + "/v1/completions"

    async def one(session: Any, index: int, ended: list[asyncio.Event], seats: Any) -> None:
        nonlocal done
        request, body = load.requests[index], bodies[index]
        if request.parent >= 0:
            await ended[request.parent].wait()
            await asyncio.sleep(request.gap_s)
            request = replace(request, prompt=contexts[request.parent] + request.prompt)
            body, prompt_len[index] = _body(request, *told, return_ids=True), len(request.prompt)
        async with seats:
            sent_s, token_s, answer = await _complete(session, address, request, body, tolerant)
        moments[index], contexts[index] = (sent_s, token_s), request.prompt + answer
        ended[index].set()
        done += 1
        if progress is not None:
            progress(done / len(bodies))

    async def send() -> None:
        ended = [asyncio.Event() for _ in bodies]
        seats = asyncio.Semaphore(max_concurrency or len(bodies))
        async with open_session(timeout_s) as session, asyncio.TaskGroup() as group:
            start = time.monotonic() + _LEAD_S if start_s is None else start_s
            for index, request in enumerate(load.requests):
                wait = start + request.send_s - time.monotonic()
                await asyncio.sleep(max(wait, 0.0))
                group.create_task(one(session, index, ended, seats))

    try:
        asyncio.run(send())
    except BaseExceptionGroup as group:
        # The first exception of the task group, which cancelled the other requests.
        raise group.exceptions[0] from None
    table = pa.table(
        {
            "request_id": [request.request_id for request in load.requests],
            "domain": [request.domain for request in load.requests],
            "prompt_len": prompt_len,
            "output_len": [request.output_len for request in load.requests],
            "sent_s": [sent for sent, _ in moments],
            "prefilled_s": [None] * len(moments),
            "routed_s": [None] * len(moments),
            "engine": [0] * len(moments),
            "token_s": [tokens for _, tokens in moments],
        },
        schema=REQUESTS,
    )
    return table, contexts


def prefill_ahead(load: Load, url: str, *, model: str) -> Load:
    """Compute a load's prompts on a prefill engine, and return its requests with where their KV
    cache waits. Raises InputError if aiohttp is missing, a request fails, or there is no KV
    connector."""
    aiohttp = import_aiohttp()
    address = url.rstrip("/") + "/v1/completions"

    async def compute() -> list[LoadRequest]:
        sent = []
        async with open_session() as session:
            for request in load.requests:  # one after the other: the order of the load
                body = prefill_body(json.loads(_body(request, model)))
                headers = {"X-Request-Id": request.request_id}
                try:
                    async with session.post(address, json=body, headers=headers) as response:
                        answer = await response.json(content_type=None)
                        params = answer.get("kv_transfer_params")
                        if response.status != 200 or params is None:
                            raise _failed(request, address, f"HTTP {response.status}: {answer}")
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    raise _failed(request, address, str(error)) from None
                sent.append(replace(request, kv_transfer_params=params))
        return sent

    return replace(load, requests=tuple(asyncio.run(compute())))


def _body(
    request: LoadRequest, model: str, temperature: float = 1.0, *, return_ids: bool = False
) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "ignore_eos": True,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if request.kv_transfer_params is not None:
        body["kv_transfer_params"] = request.kv_transfer_params
    if request.priority is not None:
        body["priority"] = request.priority
    if return_ids:
        body["return_token_ids"] = True
    return json.dumps(body, separators=(",", ":")).encode()


async def _complete(
    session: Any, address: str, request: LoadRequest, body: bytes, tolerant: bool
) -> tuple[float, list[float], list[int]]:
    """Post a request; return its send time, the arrival times of its tokens, and those told."""
    aiohttp = import_aiohttp()
    headers = {"X-Request-Id": request.request_id}
    token_s: list[float] = []
    answer: list[int] = []
    event = b""
    sent_s = time.monotonic()
    try:
        async with session.post(address, data=body, headers=headers) as response:
            if response.status != 200:
                if tolerant:
                    return sent_s, token_s, answer
                text = " ".join((await response.text()).split())[:300]
                raise _failed(request, address, f"HTTP {response.status}: {text}")
            rest = b""
            async for data in response.content.iter_any():
                now = time.monotonic()
                whole, end, rest = (rest + data).rpartition(b"\n\n")
                said = _TOKENS.findall(whole) if end else []
                for ids in _IDS.findall(whole) if end else ():
                    answer += map(int, ids.split(b",") if ids.strip() else ())
                if said:
                    token_s += [now] * (int(said[-1]) - len(token_s))
                event = whole.removesuffix(b"data: [DONE]").rstrip() or event
    except TimeoutError:
        raise _failed(request, address, "no answer within the time limit") from None
    except (aiohttp.ClientError, OSError) as error:
        if not tolerant:
            raise _failed(request, address, str(error) or type(error).__name__) from None
    if len(token_s) != request.output_len and not tolerant:
        count = f"{len(token_s)} of {request.output_len} tokens"
        last = event.rpartition(b"\n\n")[2].decode(errors="replace")[:300]
        raise _failed(request, address, f"ended after {count}: {last or 'no event'}")
    return sent_s, token_s, answer


def _failed(request: LoadRequest, address: str, problem: str) -> InputError:
    return InputError(f"request {request.request_id}", f"{address}: {problem}")


def join_proxy_log(requests: pa.Table, path: AnyPath) -> pa.Table:
    """Put ``prefilled_s``, ``routed_s`` (`time.monotonic`) and ``engine`` of the proxy's log
    (``ProxyConfig.log``) into the table; InputError unless each request is in it once."""
    by_request: dict[str, list[Row]] = {}
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            by_request.setdefault(entry["request_id"], []).append(entry)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("proxy log", f"{path}: {error}") from None
    entries = []
    for name in requests["request_id"].to_pylist():
        mine = by_request.get(name, [])
        if len(mine) != 1:
            raise InputError("proxy log", f"{path} lists request {name} {len(mine)} times", "once")
        entries += mine
    for key in ("prefilled_s", "routed_s", "engine"):
        field = REQUESTS.field(key)
        column = pa.array([entry[key] for entry in entries], field.type)
        requests = requests.set_column(requests.column_names.index(key), field, column)
    return requests
