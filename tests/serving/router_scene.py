"""A router of this process, its engines and its client."""

import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
from aiohttp.test_utils import TestServer

from eldr_sim.serving.router.config import ProxyConfig
from eldr_sim.serving.router.fleet import OUTCOMES
from eldr_sim.serving.router.proxy import make_app

from ..waiting import until, wait_until

#: Health is asked for often; an engine may be late, as those of this process are on a busy machine.
FAST = {"health_interval_s": 0.05, "health_timeout_s": 20.0, "connect_timeout_s": 20.0}


class Scene:
    """A router, a client, and what the router says of itself."""

    def __init__(self, url, session, said):
        self.url, self.session, self.said = url, session, said

    async def ask(self, path="/v1/completions", *, headers=None, begun=None, **body):
        """Return status and body; a status of 0 for an answer that breaks off.

        ``begun`` is a list that grows when the first bytes of the answer are here.
        """
        body = {"prompt": [1, 2, 3], "max_tokens": 4} | body
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            try:
                first = await response.content.readany()
                if begun is not None:
                    begun.append(first)
                return response.status, first + await response.read()
            except aiohttp.ClientError:
                return 0, b""

    async def counted(self, name, **labels):
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()
        total = 0.0
        for line in text.splitlines():
            found = re.fullmatch(r"eldr_router_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name:
                have = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if labels.items() <= have.items():
                    total += float(found[3])
        return total

    async def outcomes(self):
        counts = {name: await self.counted("requests", outcome=name) for name in OUTCOMES}
        return {name: int(n) for name, n in counts.items() if n}

    async def is_at_rest(self):
        await until(lambda: self.counted("engine_load"), 0)
        assert await self.counted("held_requests") == 0


@asynccontextmanager
async def running(decode, prefill=(), policy=None, **changes):
    """Run a router before engines, which are `FakeEngine` or URLs."""
    servers, urls, said = [], [], []
    for engine in (*decode, *prefill):
        if not isinstance(engine, str):
            servers.append(TestServer(engine.app))
            await servers[-1].start_server()
            engine.url = engine = str(servers[-1].make_url("/")).rstrip("/")
        urls.append(engine)
    n = len(decode)
    config = {"port": 0, "decode_urls": urls[:n], "prefill_urls": urls[n:], "policy": "jsq"}
    app = make_app(ProxyConfig(**(config | FAST | changes)), policy, said.append)
    servers.append(TestServer(app))
    await servers[-1].start_server()
    try:
        async with aiohttp.ClientSession() as session:
            yield Scene(str(servers[-1].make_url("/")).rstrip("/"), session, said)
    finally:
        for server in reversed(servers):
            await server.close()


def accepts(port):
    """Whether a server accepts connections at a port of this machine."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def process(port, pace_s=0.001, first_s=None):
    """Run an engine in a process of its own."""
    paces = [str(pace_s if pace is None else pace) for pace in (pace_s, first_s)]
    command = [sys.executable, str(Path(__file__).parent / "fake_engine.py"), str(port), *paces]
    child = subprocess.Popen(command)
    try:
        wait_until(lambda: accepts(port) or child.poll() is not None)
        assert child.poll() is None
        yield child
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()
