"""A fixture that serves aiohttp applications."""

import asyncio
import threading

import pytest


@pytest.fixture
def serve_app():
    """Serve aiohttp applications on an event loop of its own thread; gives their URLs."""
    pytest.importorskip("aiohttp", reason="pip install 'eldr-sim[live]'")
    from aiohttp.test_utils import TestServer

    loop, servers = asyncio.new_event_loop(), []
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=30)

    async def start(app):
        server = TestServer(app)
        await server.start_server()
        return server

    def serve(app):
        servers.append(run(start(app)))
        return str(servers[-1].make_url("/")).rstrip("/")

    yield serve
    for server in reversed(servers):
        run(server.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
