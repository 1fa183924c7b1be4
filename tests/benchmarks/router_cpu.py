"""CPU time of the router, as a multiple of a bare ``aiohttp`` proxy's: ``python -m
tests.benchmarks.router_cpu [ROUNDS]``.

The same load goes through both, in turn, to one engine: answers of one piece (2 kB of prompt, 0.5
kB of answer) and streams of 64 tokens. CPU time is that of the proxy's process, user and system;
medians, of the pairs' ratios too. Linux. Where ``uvloop`` is installed, both also run on it.
"""

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import aiohttp
from aiohttp import web

from eldr_sim.validation.live.engines.servers import free_port

TOKENS, IN_FLIGHT, REQUESTS = 64, 16, {"unstreamed": 800, "streamed": 100}
CHUNK = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
CHUNK |= {"choices": [{"index": 0, "text": " tok", "logprobs": None, "finish_reason": None}]}
EVENT = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
WHOLE = json.dumps(CHUNK | {"usage": {"prompt_tokens": 500}, "more": "x" * 300}).encode()
PROMPT = {"model": "m", "prompt": "lorem ipsum " * 170, "max_tokens": TOKENS}


async def engine(request: web.Request) -> web.StreamResponse:
    """Answer at once, or a token each time that the loop comes round."""
    if not (await request.json()).get("stream"):
        return web.Response(body=WHOLE, content_type="application/json")
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for _ in range(TOKENS):
        await answer.write(EVENT)
        await asyncio.sleep(0.002)
    await answer.write(b"data: [DONE]\n\n")
    return answer


def bare(url: str, port: int) -> None:
    """Serve a proxy that does nothing else."""
    at = web.AppKey("session", aiohttp.ClientSession)

    async def passed_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with request.app[at].post(url + request.path, data=body, headers=headers) as got:
            if got.content_type != "text/event-stream":
                return web.Response(body=await got.read(), content_type=got.content_type)
            answer = web.StreamResponse(headers={"Content-Type": got.content_type})
            await answer.prepare(request)
            async for part in got.content.iter_any():
                await answer.write(part)
            return answer

    async def run(app: web.Application) -> object:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app[at]:
            yield

    app = web.Application()
    app.cleanup_ctx.append(run)
    app.router.add_post("/v1/completions", passed_on)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


def ours(url: str, port: int) -> None:
    """Serve the router."""
    from eldr_sim.serving.router.config import ProxyConfig
    from eldr_sim.serving.router.proxy import serve

    serve(ProxyConfig(port=port, decode_urls=[url], policy="jsq"), announce=lambda line: None)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def load(session: aiohttp.ClientSession, url: str, kind: str) -> None:
    """Send the requests of a kind, some at a time."""
    left, body = iter(range(REQUESTS[kind])), PROMPT | {"stream": kind == "streamed"}
    size = len(WHOLE) if kind == "unstreamed" else TOKENS * len(EVENT) + len(b"data: [DONE]\n\n")

    async def client() -> None:
        for _ in left:
            async with session.post(url + "/v1/completions", json=body) as answer:
                assert len(await answer.read()) == size

    await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))


async def measure(urls: list[tuple[str, int]], rounds: int) -> dict[str, list[list[float]]]:
    """Return the CPU-ms a request of each proxy, by kind, a list for each round."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in REQUESTS}
    async with aiohttp.ClientSession() as session:
        for turn in range(rounds + 1):
            for kind, n in REQUESTS.items():
                pair = [0.0, 0.0]
                for place in (0, 1) if turn % 2 else (1, 0):
                    url, pid = urls[place]
                    before = cpu_s(pid)
                    await load(session, url, kind)
                    pair[place] = 1e3 * (cpu_s(pid) - before) / n
                if turn:  # the first warms up
                    found[kind].append(pair)
    return found


async def main(rounds: int) -> None:
    """Start all, and print a row for each loop and kind."""
    app = web.Application()
    app.router.add_post("/v1/completions", engine)
    app.router.add_get("/health", lambda request: web.Response())
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    loops = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]
    print("| loop | requests | bare, CPU-ms | router, CPU-ms | times |")
    print("| --- | --- | --- | --- | --- |")
    for loop in loops:
        children: list[subprocess.Popen[bytes]] = []
        urls: list[tuple[str, int]] = []
        try:
            for name in ("bare", "ours"):
                at = free_port()
                args = [loop, name, f"http://127.0.0.1:{port}", f"{at}"]
                children.append(subprocess.Popen([sys.executable, "-m", __spec__.name, *args]))
                urls.append((f"http://127.0.0.1:{at}", children[-1].pid))
            async with aiohttp.ClientSession() as session:
                for url, _ in urls:
                    while True:
                        try:
                            async with session.get(url + "/health"):
                                break
                        except aiohttp.ClientError:
                            await asyncio.sleep(0.1)
            for kind, pairs in (await measure(urls, rounds)).items():
                one, two = (median(column) for column in zip(*pairs, strict=True))
                times = median(b / a for a, b in pairs)
                print(f"| {loop} | {kind} | {one:.3f} | {two:.3f} | {times:.2f} |", flush=True)
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait()
    await runner.cleanup()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        if sys.argv[1] == "uvloop":
            import uvloop

            asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        (bare if sys.argv[2] == "bare" else ours)(sys.argv[3], int(sys.argv[4]))
    else:
        asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
