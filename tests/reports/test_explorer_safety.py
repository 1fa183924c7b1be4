"""The explorer computes points within limits, and reads no file that it was not started with."""

import asyncio
import base64
import json
import os
import random
import signal
from contextlib import suppress

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from eldr_sim.errors import InputError
from eldr_sim.guard import Guard
from eldr_sim.reports.explorer import points, server
from eldr_sim.reports.explorer.points import FIELDS, config_of, run_point
from eldr_sim.reports.explorer.processes import PointLimits
from eldr_sim.reports.explorer.server import Explorer, _state_of
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each
from ..waiting import until

BASE = make_config(
    {
        "topology": "1P1D",
        "trace": "reference-moe",
        "output_len": 4,
        "request_rate": 20,
        "policy": "jsq",
    }
)
STATE = _state_of(BASE)
EVIL = "class X:\n    pass\nopen({!r}, 'a').write('x')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The server's folder, with files that must not be read."""
    monkeypatch.chdir(tmp_path)
    for name in ("evil.py", "evil", "log.csv", "a b.csv", "x=y", "+z"):
        (tmp_path / name).write_text(EVIL.format(str(tmp_path / "RUN")))
    return tmp_path


def spellings(name):
    """Return ways to write a text in YAML, within a shell's word."""
    coded = base64.b64encode(name.encode()).decode()
    escaped = "".join(f"\\x{ord(c):02x}" for c in name)
    return [
        name, f"'{name}'", f'"{name}"', f"'\"{name}\"'", f"'!!binary {coded}'", f"'!!str {name}'",
        f"'\"{escaped}\"'", name[:-1] + f"'{name[-1]}'", name[:1] + '""' + name[1:],
        "\\".join(["", *name]), f"'&a {name}'", f"'!!python/name:{name}'", f"'! {name}'",
        f"'|\n  {name}'", f"'>-\n  {name}'", f"'{{name: !!binary {coded}}}'",
        f"'{{name: {name}}}'",
        f"'[{name}]'", f"'!!set {{{name}}}'", f"' {name}'",
    ]  # fmt: skip


PATHS = (
    "/etc/passwd", "../x", "./evil.py:X", "evil.py:X", "evil.py:X:n=1", "log.csv", "./log.csv",
    "~/x",
    "eldr:artifact=log.csv", "eldr:artifact=/etc/passwd", "/dev/stdin", "file:///etc/passwd",
    "host:9GB,load=2GB/s,path=/etc/passwd", "2GB/s/../../etc/passwd", "a b.csv", "x=y", "+z",
    "\\\\x\\y",
    "EVIL.PY:X", "evil.py::X", "x,log.csv", "x:log.csv", "file:evil.py", "%2e%2e/log.csv",
    "./evil.py#X", "evil.py\t:X", "~root/x", "$HOME/log.csv", "//etc/passwd", "./log.csv?x",
    ".\\evil.py:X", "./evil\u2024py:X", "log.csv\0", "//host/log.csv",
)  # fmt: skip
WHERE = (
    "policy", "policy.name", "prefill_policy", "queue_order", "expert_placement",
    "replica_choice", "workload",
    "model", "gpu", "decode.gpu", "topology", "trace", "tables", "events", "engine_args",
    "artifact", "load",
    "frontend", "acceptance", "kv_tier", "autoscale", "policy.artifact",
    "speculative_config.model",
    "decode.expert_placement", "fail", "sessions_file", "unknown",
)  # fmt: skip


@pytest.mark.long
def test_no_spelling_of_a_path_is_accepted(folder, n_cases):
    """Either a state is refused, or no text of its configuration names a file."""
    rng, refused, n = random.Random(3), 0, n_cases(1000)
    cases = [(where, path) for where in WHERE for path in PATHS]
    for where, path in rng.choices(cases, k=n // 4):
        for text in rng.sample(spellings(path), 4):
            state = STATE | ({where: path} if where in FIELDS and rng.random() < 0.2 else
                             {"more": f"{where}={text}"})  # fmt: skip
            try:
                made = config_of(state, BASE)
            except InputError as error:
                refused += 1 + 1000 * ("root:" in str(error))
            else:
                known = json.dumps(BASE.model_dump(mode="json"))
                for field in made.model_dump(mode="json").values():
                    words = json.dumps(field)
                    assert words in known or "passwd" not in words
                    assert words in known or "evil" not in words
                    assert words in known or "log.csv" not in words
            assert not (folder / "RUN").exists(), text
    assert 0.7 * n < refused <= n


@pytest.mark.parametrize(
    "more",
    [
        "policy=evil.p'y':X", 'policy=evil.p"y":X', "policy=./evil.p''y:X",
        "policy.name='!!binary ZXZpbC5weTpY'", "'policy={name: \"./evi\\x6c.p\\x79:X\"}'",
        "workload='!!binary L2V0Yy9wYXNzd2Q='", "workload='\"log\\u002ecsv\"'",
    ],
)  # fmt: skip
def test_known_escapes_are_refused(folder, more):
    with suppress(InputError):
        made = config_of(STATE | {"more": more}, BASE)
        found = run_point(made.model_dump_json(), False)  # a name that no file has
        assert "root:" not in found["error"]
        assert "neither a named workload nor a file" in found["error"]
    assert not (folder / "RUN").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("duration=200000", "requests (allowed: at most 20,000"),
        ("num_requests=9000000", "at most 20,000"),
        ("topology=900P900D", "1,800 workers is above the limit"),
    ],
)
def test_points_that_are_too_large_are_refused(more, said):
    with pytest.raises(InputError) as caught:
        config_of(STATE | {"more": more}, BASE, 20_000)
    assert said in str(caught.value)


@on_each("name, value", [
        ("request_rate", "1e-300"), ("request_rate", "1e-9"), ("request_rate", "1e300"),
        ("price_per_gpu_hour", "1e308"), ("price_per_gpu_hour", "-1"), ("goodput", "ttft:inf"),
        ("input_len", "1e400"), ("tensor_parallel_size", "1" + "0" * 99), ("topology", "9" * 40),
        ("host_gap_ms", "1e308"), ("cpu_slowdown", "1e300"), ("max_concurrency", "1" + "0" * 99),
        ("tokenizer_threads", "1" + "0" * 30), ("switch_time", "1e30"), ("warmup", "1e308"),
        ("seed", "-1"), ("num_prefixes", "1" + "0" * 20), ("drain_timeout", "nan"),
    ])  # fmt: skip
def test_a_huge_or_odd_number_is_named_in_one_line(name, value):
    state = {name: value} if name in FIELDS else {"more": f"{name}={value}"}
    with pytest.raises(InputError) as caught:
        config_of(STATE | state, BASE, 20_000)
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)


@on_each("path", [
        ".", "..", "log.csv\u200b", "log.csv ", "file:log.csv", "evil:X", "evil.PY", "%2e/log.csv",
        "/proc/self/environ", "//log.csv", "log.csv#", "log.csv?x", "log.csv;", "{log.csv}",
        "(log.csv)", "log.csv\t", "'log.csv'", "$PWD/log.csv",
        "\uff0fetc\uff0fpasswd/", "c:\\log.csv",
    ])  # fmt: skip
@on_each("where", ["workload", "model", "gpu", "trace", "tables", "events"])
def test_oddly_spelled_paths_are_refused(folder, where, path):
    state = {where: path} if where in FIELDS else {}
    values = [STATE | state] if state else []
    values += [STATE | {"more": f"{where}={path}"}, STATE | {"more": f'{where}="{path}"'}]
    for each in values:
        with pytest.raises(InputError) as caught:
            config_of(each, BASE, 20_000)
        assert "\n" not in str(caught.value)
    assert not (folder / "RUN").exists()


@on_each("host, origin", [
        ("evil.example", None), ("127.0.0.1.evil.example", None), ("localhost.evil.example", None),
        ("localhost@evil.example", None), ("evil.example:80#localhost", None),
        ("localhost:x", None),
        ("localhost:99999999", None), ("local\u0127ost", None), ("", None), ("[::1", None),
        ("localhost, evil.example", None), ("evil.example/localhost", None),
        ("localhost:8050", "http://localhost:9000"), ("localhost:8050", "null"),
        ("localhost:8050", "http://evil.example"), ("localhost:8050", "file://"),
        ("localhost:8050", "http://localhost:8050@evil.example"), ("localhost:8050", ""),
        ("localhost:8050", "http://localhost:8050/evil"), ("localhost:8050", "localhost:8050"),
        ("127.0.0.1:8050", "http://127.0.0.1.nip.io:8050"),
        ("127.0.0.1:8050", "http://10.0.0.1:8050"), ("localhost:8050", "javascript://localhost:8050"),
    ])  # fmt: skip
def test_odd_hosts_and_origins_are_refused(host, origin):
    headers = {"Host": host, "Content-Type": "application/json"}
    headers |= {} if origin is None else {"Origin": origin}
    found = Guard("127.0.0.1").problem("POST", CIMultiDict(headers))
    assert found is not None
    assert found[0] in (400, 403)
    assert "\n" not in found[1]


async def ask(session, url, **state):
    """Return the lines of a state's point, or the status."""
    async with session.post(f"{url}/points", json={"parts": "point"} | state) as answer:
        if answer.status != 200:
            return answer.status
        return [json.loads(line) for line in (await answer.text()).splitlines()]


def exploring(scene):
    """Run ``scene(session, url, explorer)`` with a warm explorer."""

    async def run():
        explorer = Explorer(BASE, jobs=1)
        runner = web.AppRunner(explorer.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with aiohttp.ClientSession() as session:
                assert (await ask(session, url))[-1]["kind"] == "end"
                return await scene(session, url, explorer)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.long
def test_a_dead_process_is_replaced():
    async def scene(session, url, explorer):
        await until(lambda: len(explorer._processes._idle), 1)  # it draws the first pictures
        first = explorer._processes._idle[0].process
        os.kill(first.pid, signal.SIGSTOP)  # it computes for as long as it lives
        long = asyncio.ensure_future(ask(session, url, request_rate="20.5"))
        await until(lambda: len(explorer._processes._busy), 1)
        os.kill(first.pid, signal.SIGKILL)
        lines = await long
        assert "its process ended (exit code -9" in lines[-1]["error"]
        again = await ask(session, url, request_rate="21")
        assert again[-1]["kind"] == "end"
        second = explorer._processes._idle[0].process
        second.kill()  # while it rests
        await until(second.is_alive, False)
        assert (await ask(session, url, request_rate="22"))[-1]["kind"] == "end"

    exploring(scene)


@pytest.mark.long
def test_a_point_ends_at_its_time_limit_and_soon_after_its_client_leaves(monkeypatch):
    async def scene(session, url, explorer):
        await until(lambda: len(explorer._processes._idle), 1)
        for limit_s in (0.3, 600.0):
            explorer._processes._limits = PointLimits(timeout_s=limit_s)
            worker = explorer._processes._idle[0].process
            os.kill(worker.pid, signal.SIGSTOP)  # its point takes for ever
            point = asyncio.ensure_future(ask(session, url, request_rate="21"))
            if limit_s < 1:
                lines = await point
                assert "takes more than 0.3 s (--point-timeout)" in lines[-1]["error"]
            else:
                await until(lambda: len(explorer._processes._busy), 1)
                point.cancel()
            await until(worker.is_alive, False)
        assert not explorer._running

    monkeypatch.setattr(server, "_LEFT_S", 0.1)
    exploring(scene)


def test_memory_is_limited():
    code = (
        "import json, resource; from eldr_sim.reports.explorer import processes\n"
        "processes.run_point = lambda values, pictures: {'n': len(bytearray(1 << 30))}\n"
        "class Pipe:\n"
        "    asked = [json.dumps(['', False]).encode()]\n"
        "    def recv_bytes(self):\n"
        "        if not self.asked: raise EOFError\n"
        "        return self.asked.pop()\n"
        "    def send_bytes(self, data): print(data.decode())\n"
        "processes._serve(Pipe(), 0.75)\n"
    )
    import subprocess
    import sys

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "takes more than 0.75 GiB" in found.stdout


@pytest.mark.long
def test_hostile_bodies(capfd):
    async def scene(session, url, explorer):
        rng, statuses = random.Random(1), set()
        kinds = [None, 1, "x", [], {}, {"more": {}}, {"more": "'"}, {"more": "a"},
        {"more": "a=[" * 99},
                 {"parts": "x"}, {"parts": None}, {"topology": "9" * 60_000},
                 {"more": "x=" + "[" * 5000},
                 {"more": "'a=&a [*a]'"}, {"request_rate": "1e999"}, {"request_rate": "nan"},
                 {"more": "policy.x=" + "1e9 " * 500}, {"goodput": "²"}, {"kv_tier": "\0"},
                 {"model": "\ud800"}, {"more": "\ud800=1"}, {"": ""}]  # fmt: skip
        sent = [json.dumps(kind).encode() for kind in kinds]
        sent += [b"[" * 60_000, b"\xff", b"", b"{", b"x" * 70_000, b'{"a":1,"a":2}']
        for name in FIELDS:
            odd = rng.choice(
                ["²", "-1", "1e9", "", "None", "{}", "[]", "'", '"', "!!x", "a\nb", "%s"]
            )
            sent.append(json.dumps({name: odd}).encode())
        for body in sent:
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/points", data=body, headers=headers) as answer:
                statuses.add(answer.status)
                await answer.read()
        assert statuses <= {200, 400, 413}
        assert (await ask(session, url))[-1]["kind"] == "end"

    exploring(scene)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_the_printed_address_works_and_names_can_be_allowed():
    guard = Guard("0.0.0.0", ["gpu7"])
    for host, good in (("127.0.0.1:8050", True), ("0.0.0.0:8050", True), ("gpu7:1", True),
                       ("localhost:9000", True), ("gpu8:1", False)):  # fmt: skip
        assert (guard.problem("GET", CIMultiDict(Host=host)) is None) == good


def test_run_point_is_one_line_for_any_error():
    assert "error" in run_point('{"topology": "x"}', False)


@pytest.mark.parametrize("text", ["a/b", "a\\b", "~b", "a\0b", "b.py", "b.PY:X", "x=b.py"])
def test_every_mark_of_a_path_is_one(text, tmp_path, monkeypatch):
    """Where no such file exists, so that only the spelling says it."""
    monkeypatch.chdir(tmp_path)
    assert points._may_be_path(text)
    assert not points._may_be_path("decode=jsq:load=20GB/s")


def test_what_the_configuration_makes_of_a_text_is_checked_too(folder, monkeypatch):
    """The texts are harmless, and a field's own reader turns one into a path."""
    made = points.make_config

    def turned(values):
        return made(values | {"workload": "log.csv"}) if "warmup" in values else made(values)

    config_of(STATE, BASE)
    monkeypatch.setattr(points, "make_config", turned)
    with pytest.raises(InputError, match="is a path"):
        config_of(STATE, BASE)
