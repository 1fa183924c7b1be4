"""How live engines start and stop, with a server in vLLM's place."""

import os
import sys

import pytest

from eldr_sim.errors import InputError
from eldr_sim.validation.live.engines import servers
from eldr_sim.validation.live.engines.servers import EngineOptions, EngineProcess

from ...waiting import wait_until

_SERVER = """
import http.server, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tries = pathlib.Path({tries!r})
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if len(tries.read_text()) <= {taken}:
    raise OSError(98, "Address already in use")
if {silent}:
    print("loading weights", flush=True)
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Make an engine whose server fails ``taken`` times, and then answers or stays ``silent``."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(servers, "_STOP_LIMIT_S", 0.2)

    def make(taken=0, silent=False):
        tries = str(tmp_path / "tries")
        (package / "main.py").write_text(_SERVER.format(tries=tries, taken=taken, silent=silent))
        options = EngineOptions("model", 128, 4, 128)
        return EngineProcess(options, "d0", "colocated", tmp_path / "log")

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def test_an_engine_whose_port_was_taken_starts_again_and_is_killed_if_it_ignores_sigterm(engine):
    with engine(taken=2) as started:
        process = started._process.pid
        started.check_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_engine_whose_ports_are_always_taken_is_given_up(engine):
    with pytest.raises(InputError, match=r"d0 did not start: .*Address already in use"):
        engine(taken=3).__enter__()


def test_an_engine_that_does_not_answer_in_time_is_ended_and_says_what_it_waited_for(
    engine, monkeypatch, tmp_path
):
    answers, asked = servers.answers, []

    def late(*given):
        asked.append(given[1])
        wait_until(lambda: "loading weights" in (tmp_path / "log" / "vllm.log").read_text())
        return answers(*given)

    monkeypatch.setattr(servers, "_START_LIMIT_S", 0.2)
    monkeypatch.setattr(servers, "answers", late)
    with pytest.raises(InputError, match="/health did not answer in 0 s; last: loading weights"):
        engine(silent=True).__enter__()
    assert asked[0].poll() is not None
