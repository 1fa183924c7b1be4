"""A server that answers like vLLM, in this process or, to be killed or stopped, in one of its own.

``python fake_engine.py PORT PACE_S FIRST_S`` serves until it is killed.
"""

import asyncio
import json
import random
import sys

from aiohttp import web


class FakeEngine:
    """An engine of any role.

    ``caches`` is what the prefill engines of a set-up hold, shared between its engines: a decode
    engine takes a cache out when it fetches it. A token takes ``pace_s``, the first of a stream
    ``first_s`` where it is given.
    """

    def __init__(self, name="engine", *, pace_s=0.001, first_s=None, caches=None, healthy=True):
        self.name, self.pace_s, self.first_s, self.healthy = name, pace_s, first_s, healthy
        self.caches = {} if caches is None else caches
        self.seen, self.headers, self.in_flight, self.aborted = [], [], 0, 0
        self.stale = []  # answers from caches that were fetched before
        self.trouble = lambda body: None  # what happens to a request: a coroutine function, or None

    @property
    def app(self):
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/state", self.state)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        return app

    async def health(self, _request):
        return web.Response(status=200 if self.healthy else 503)

    async def models(self, request):
        if request.headers.get("Authorization") == "Bearer wrong":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "m", "of": self.name}]})

    async def state(self, _request):
        found = {"seen": len(self.seen), "in_flight": self.in_flight, "aborted": self.aborted}
        return web.json_response(found)

    async def complete(self, request):
        body = await request.json()
        self.seen.append(body)
        self.headers.append(request.headers)
        self.in_flight += 1
        try:
            trouble = self.trouble(body)
            if trouble is not None:
                answer = await trouble(request)
                if answer is not None:
                    return answer
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, request, body):
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            await asyncio.sleep(self.pace_s)
            name = f"{self.name}-{len(self.seen)}-{random.random()}"
            self.caches[name] = self.name
            answer = {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 7}}
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "cache": name}
            return web.json_response(answer)
        if (
            params.get("do_remote_prefill")
            and self.caches.pop(params["cache"], None) is None
            and body.get("max_tokens", 4) > 1
        ):
            self.stale.append(params["cache"])
        tokens = body.get("max_tokens", 4)
        if not body.get("stream"):
            await asyncio.sleep(self.pace_s * tokens)
            usage = {"prompt_tokens": 7, "completion_tokens": tokens}
            return web.json_response({"choices": [{"text": self.name}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in range(1, tokens + 1):
            first = token == 1 and self.first_s is not None
            await asyncio.sleep(self.first_s if first else self.pace_s)
            usage = {"completion_tokens": token}
            chunk = {"choices": [{"text": "x"}], "usage": usage, "of": self.name}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


async def fail(_request):
    """Answer as an engine does whose core is dead."""
    body = {"error": {"message": "EngineCore", "type": "InternalServerError", "code": 500}}
    return web.json_response(body, status=500)


async def hang(_request):
    """Answer nothing."""
    await asyncio.sleep(3600)


async def reset(request):
    """Break the connection off."""
    request.transport.abort()
    await asyncio.sleep(0.01)


async def refuse(_request):
    """Answer that the request is bad."""
    return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)


async def fail_in_stream(request, first=b""):
    """Begin a stream with an error, as vLLM does whose core dies while a request waits.

    ``first``: what comes before the error; what follows then comes by itself."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    error = {"error": {"message": "EngineCore", "type": "InternalServerError", "code": 500}}
    parts = [f"data: {json.dumps(error)}\n\n".encode(), b"data: [DONE]\n\n"]
    for part in [first, *parts] if first else [b"".join(parts)]:
        await response.write(part)
        await asyncio.sleep(0.05 if first else 0)
    return response


if __name__ == "__main__":
    port, pace_s, first_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    web.run_app(
        FakeEngine(f"engine at {port}", pace_s=pace_s, first_s=first_s).app,
        host="127.0.0.1",
        port=port,
        print=None,
        handler_cancellation=True,
    )
