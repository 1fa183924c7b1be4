"""Answers of a simulated server as OpenAI's API words them: completions, chat, responses; whole or
streamed."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from eldr_sim.serving import http
from eldr_sim.serving.simulated.asked import LETTERS, WORD, Asked
from eldr_sim.serving.simulated.core import Stream
from eldr_sim.serving.simulated.handover import handed_over


class Answer:
    """Answers to a request, one of each of ``streams``. ``kind``: ``completion``, ``chat``,
    ``response``; ``model``: the name in the request; ``thawed``: passes unless the server is
    to hang."""

    def __init__(
        self,
        kind: str,
        model: str,
        asked: Asked,
        streams: Sequence[Stream],
        cached: Callable[[Stream], int],
        thawed: asyncio.Event,
    ) -> None:
        self._kind, self._asked, self._streams = kind, asked, streams
        self._cached, self._thawed = cached, thawed
        self._object = "chat.completion" if kind == "chat" else "text_completion"
        prefix = {"chat": "chatcmpl", "completion": "cmpl", "response": "resp"}[kind]
        self._id = f"{prefix}-{streams[0].number}" if kind != "response" else (
            f"resp_{uuid.uuid4().hex}"
        )  # fmt: skip
        self._created, self._model = int(time.time()), model
        self._head = {"id": self._id, "created": self._created, "model": model}
        self._handed_over: dict[str, Any] = {}

    def hand_over(self, rank: int, block_size: int) -> None:
        """Let the answer say where prefill worker ``rank`` keeps the KV cache."""
        prompt_len = self._streams[0].prompt_len
        params = handed_over(rank, self._id, prompt_len, block_size)
        self._handed_over = {"kv_transfer_params": params}

    async def whole(self) -> Any:
        """Wait for the end, and answer with everything."""
        from aiohttp import web

        for stream in self._streams:
            while not isinstance(outcome := await stream.tokens.get(), str):
                pass
            if outcome != "completed":
                return http.error_answer(*_failed(outcome))
        await self._thawed.wait()
        if self._kind == "response":
            return web.json_response(self._response("completed"), headers=self.headers)
        choices = [self._choice(index, stream) for index, stream in enumerate(self._streams)]
        body = self._head | {"object": self._object, "choices": choices, "usage": self._usage()}
        body |= self._handed_over
        return web.json_response(body, headers=self.headers)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        ignored = ", ".join(self._asked.ignored)[:1000]
        return {"X-Eldr-Sim-Ignored": ignored} if ignored.isascii() and ignored.isprintable() and (
            ignored
        ) else {}  # fmt: skip

    def _choice(self, index: int, stream: Stream) -> dict[str, Any]:
        text = (WORD * stream.output_len)[: stream.letters]
        choice: dict[str, Any] = {"index": index, "finish_reason": stream.reason}
        choice["logprobs"] = self._logprobs(stream.output_len, 0)
        if self._kind == "chat":
            return choice | {"message": {"role": "assistant", "content": text}}
        return choice | {"text": text}

    async def stream(self, request: Any) -> Any:
        """Answer token by token."""
        from aiohttp import web

        parts = _merged(self._streams)
        first = await anext(parts)
        if isinstance(first[1], str):
            return http.error_answer(*_failed(first[1]))
        headers = {"Content-Type": "text/event-stream"} | self.headers
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        write = self._responses if self._kind == "response" else self._pieces
        async for data in write(first, parts):
            await self._thawed.wait()
            await response.write(data)
        await response.write_eof()
        return response

    async def _pieces(self, first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        """Yield the events of completions and chats."""
        options = self._asked.body.get("stream_options") or {}
        each = bool(options.get("continuous_usage_stats"))
        given, failure = [0] * len(self._streams), ""
        part: Any = first
        usual = [_event(self._piece(index, WORD)) for index in range(len(self._streams))]
        while part is not None:
            index, found = part
            if isinstance(found, str):
                failure = failure or ("" if found == "completed" else found)
            else:
                stream, before = self._streams[index], given[index]
                given[index] += found
                last = given[index] == stream.output_len
                role = self._kind == "chat" and not before
                plain = stream.letters is None and self._asked.logprobs is None
                if last or each or role or found > 1 or not plain:
                    begin, end = before * LETTERS, given[index] * LETTERS
                    text = (WORD * found)[: max(0, _least(end, stream.letters) - begin)]
                    piece = self._piece(index, text, stream.reason if last else None, role)
                    piece["choices"][0]["logprobs"] = self._logprobs(found, before)
                    if each:
                        piece["usage"] = self._usage(sum(given))
                    yield _event(piece)
                else:
                    yield usual[index]
            part = await anext(rest, None)
        if failure:
            yield _event(http.error_body(*_failed(failure)))
        elif options.get("include_usage"):
            usage = self._piece(0) | {"choices": [], "usage": self._usage()}
            yield _event(usage)
        yield b"data: [DONE]\n\n"

    def _piece(
        self, index: int, text: str = "", reason: str | None = None, role: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self._kind == "chat":
            choice["delta"] = ({"role": "assistant"} if role else {}) | {"content": text}
        else:
            choice["text"] = text
        kind = f"{self._object}.chunk" if self._kind == "chat" else self._object
        return self._head | {"object": kind, "choices": [choice]}

    def _logprobs(self, n: int, before: int) -> dict[str, Any] | None:
        """Return log probabilities of filler words, which are certain: 0."""
        top = self._asked.logprobs
        if top is None:
            return None
        if self._kind == "chat":
            one: dict[str, Any] = {"token": WORD, "logprob": 0.0, "bytes": list(WORD.encode())}
            alternatives = [dict(one)] if top else []
            return {"content": [one | {"top_logprobs": alternatives} for _ in range(n)]}
        return {
            "tokens": [WORD] * n,
            "token_logprobs": [0.0] * n,
            "top_logprobs": [{WORD: 0.0}] * n if top else None,
            "text_offset": [(before + at) * LETTERS for at in range(n)],
        }

    def _usage(self, n: int | None = None) -> dict[str, Any]:
        first = self._streams[:: self._asked.n]  # n answers share a prompt
        prompt = sum(stream.prompt_len for stream in first)
        output = sum(stream.output_len for stream in self._streams) if n is None else n
        tokens = {"prompt_tokens": prompt, "completion_tokens": output}
        details = {"cached_tokens": sum(map(self._cached, first))}
        return tokens | {"total_tokens": prompt + output, "prompt_tokens_details": details}

    def _response(self, status: str) -> dict[str, Any]:
        """Return the object of ``/v1/responses``."""
        body, (stream,) = self._asked.body, self._streams
        response: dict[str, Any] = {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "model": self._model, "error": None, "incomplete_details": None, "output": [],
            "instructions": body.get("instructions"), "metadata": body.get("metadata") or {},
            "max_output_tokens": body.get("max_output_tokens"), "previous_response_id": None,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": body.get("tools") or [],
            "temperature": body.get("temperature", 1.0), "top_p": body.get("top_p", 1.0),
            "text": {"format": {"type": "text"}}, "truncation": "disabled", "usage": None,
        }  # fmt: skip
        if status != "in_progress":
            if stream.reason == "length":
                response["status"] = "incomplete"
                response["incomplete_details"] = {"reason": "max_output_tokens"}
            response["output"] = [self._message(WORD * stream.output_len, response["status"])]
            response["usage"] = {
                "input_tokens": stream.prompt_len,
                "input_tokens_details": {"cached_tokens": self._cached(stream)},
                "output_tokens": stream.output_len,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": stream.prompt_len + stream.output_len,
            }
        return response

    def _message(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        content = [part] if text else []
        about = {"id": f"msg_{self._id[5:]}", "type": "message", "role": "assistant"}
        return about | {"status": status, "content": content}

    async def _responses(self, first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response."""
        number = 0

        def event(kind: str, **about: Any) -> bytes:
            nonlocal number
            about = {"type": kind, "sequence_number": number} | about
            number += 1
            return f"event: {kind}\n".encode() + _event(about)

        at = {"item_id": f"msg_{self._id[5:]}", "output_index": 0, "content_index": 0}
        empty = {"type": "output_text", "text": "", "annotations": []}
        yield event("response.created", response=self._response("in_progress"))
        yield event("response.in_progress", response=self._response("in_progress"))
        item = self._message("", "in_progress")
        yield event("response.output_item.added", output_index=0, item=item)
        yield event("response.content_part.added", **at, part=empty)
        part = first
        while part is not None:
            _, found = part
            if isinstance(found, int):
                text = WORD * found
                yield event("response.output_text.delta", **at, delta=text, logprobs=[])
            elif found != "completed":
                status, message = _failed(found)
                yield event("error", code=str(status), message=message, param=None)
                return
            part = await anext(rest, None)
        done = self._response("completed")
        item = done["output"][0]
        text = item["content"][0]["text"]
        yield event("response.output_text.done", **at, text=text, logprobs=[])
        yield event("response.content_part.done", **at, part=item["content"][0])
        yield event("response.output_item.done", output_index=0, item=item)
        yield event(f"response.{done['status']}", response=done)


async def _merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, int | str]]:
    """Yield the tokens of several answers as they come, with their indices."""
    if len(streams) == 1:
        while True:
            part = await streams[0].tokens.get()
            yield 0, part
            if isinstance(part, str):
                return
    waits = {asyncio.ensure_future(s.tokens.get()): i for i, s in enumerate(streams)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, part = waits.pop(task), task.result()
                if not isinstance(part, str):
                    waits[asyncio.ensure_future(streams[index].tokens.get())] = index
                yield index, part
    finally:
        for task in waits:
            task.cancel()


def _least(end: int, letters: int | None) -> int:
    return end if letters is None else min(end, letters)


def _event(piece: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(piece).encode() + b"\n\n"


def _failed(outcome: str) -> tuple[int, str]:
    """Return status and message of a request that has not completed."""
    return 400 if outcome.startswith("exceeds") else 503, outcome.replace("_", " ")
