"""The front end of this machine: how long prompts take to tokenise, and requests to be echoed.

The tokeniser is a ``tokenizer.json``. Prompts are what benchmarks with random prompts send: ids in
a row, decoded to text (``vllm bench serve --dataset-name random``), or parts of a text. The echo is
a FastAPI server with vLLM's kind of endpoint, which checks the body, passes the token ids to
another process over a pipe, and streams one event back; what vLLM itself computes for a
request is not in it, so a real server takes longer."""

import datetime
import http.client
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.errors import InputError, needed
from eldr_sim.kernel_profiles.kernels.front_end import PARTS
from eldr_sim.kernel_profiles.profile.device import cpu_facts, cpu_model
from eldr_sim.kernel_profiles.profile.timing import Timing
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata
from eldr_sim.tokenizer import EXTRA, open_tokenizer

TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384)  #: prompt tokens that are measured
_PROMPTS, _WARM_PROMPTS, _ECHOES, _WARM_UP = 25, 2, 200, 20


def cpu_name() -> str:
    """Return the name of this machine's CPU, with its family, model and stepping (``lscpu``)."""
    facts, name = cpu_facts(), cpu_model()
    numbers = [facts.get(key, "") for key in ("cpu family", "model", "stepping")]
    return f"{name}, family/model/stepping {'/'.join(numbers)}" if all(numbers) else name


def prompts_of(tokenizer: Any, tokens: int, n: int, text: str | None = None) -> list[str]:
    """Return ``n`` prompts of about ``tokens`` tokens: ids in a row decoded, or parts of a text."""
    rng = np.random.default_rng(tokens)
    if text is None:
        size = tokenizer.get_vocab_size()
        return [
            tokenizer.decode(((start + np.arange(tokens)) % size).tolist())
            for start in rng.integers(size, size=n).tolist()
        ]
    ids = tokenizer.encode(text).ids
    if len(ids) <= tokens:
        raise InputError("text", f"it has {len(ids)} tokens", f"more than {tokens}")
    starts = rng.integers(len(ids) - tokens, size=n).tolist()
    return [tokenizer.decode(ids[start : start + tokens]) for start in starts]


def tokenize_times(
    tokenizer: Any, text: str | None = None, tokens: Sequence[int] = TOKENS
) -> dict[int, Timing]:
    """Time prompts one by one by the tokens that their texts have: CPU time of the thread; the
    first of a length warm the caches."""
    timings: dict[int, Timing] = {}
    for wanted in tokens:
        seconds, lengths = [], []
        for prompt in prompts_of(tokenizer, wanted, _WARM_PROMPTS + _PROMPTS, text):
            start = time.thread_time()
            (encoding,) = tokenizer.encode_batch([prompt])
            ids, _ = encoding.ids, encoding.attention_mask
            seconds.append(time.thread_time() - start)
            lengths.append(len(ids))
        timings[round(float(np.median(lengths)))] = Timing.of(seconds[_WARM_PROMPTS:])
    return timings


def echo_times(tokens: Sequence[int] = TOKENS) -> dict[str, dict[int, Timing]]:
    """Time requests to a server on this machine, one at a time, by prompt tokens. Returns
    ``event_loop``: CPU time of the server's process a request; ``http``: the rest from the client's
    first byte to the first event. Raises InputError: FastAPI or uvicorn is missing."""
    needed("fastapi", "frontend", EXTRA)
    needed("uvicorn", "frontend", EXTRA)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    to_engine, engine_side = context.Pipe()
    engine = context.Process(target=_engine, args=(engine_side,), daemon=True)
    server = context.Process(target=_serve, args=(theirs, to_engine), daemon=True)
    engine.start()
    server.start()
    try:
        if not ours.poll(60):
            raise InputError("frontend", "the echo server did not start")
        client = http.client.HTTPConnection("127.0.0.1", int(ours.recv()), timeout=30)
        return _echoes(client, tokens)
    finally:
        server.terminate()
        engine.terminate()
        server.join()
        engine.join()


def _echoes(
    client: http.client.HTTPConnection, tokens: Sequence[int]
) -> dict[str, dict[int, Timing]]:
    timings: dict[str, dict[int, Timing]] = {"event_loop": {}, "http": {}}

    def cpu_s() -> float:
        client.request("GET", "/cpu")
        return float(client.getresponse().read())

    for n in tokens:
        body = json.dumps(
            {"model": "echo", "prompt": "word " * n, "max_tokens": 1, "stream": True, "tokens": n}
        )
        headers = {"Content-Type": "application/json"}

        def once(body: str = body, headers: dict[str, str] = headers) -> float:
            start = time.perf_counter()
            client.request("POST", "/v1/completions", body, headers)
            answer = client.getresponse()
            answer.read(1)
            seconds = time.perf_counter() - start
            answer.read()
            return seconds

        for _ in range(_WARM_UP):
            once()
        asked = cpu_s()
        once_more = cpu_s() - asked  # what asking takes
        cpu, rounds = [], []
        for _ in range(10):
            before = cpu_s()
            rounds += [once() for _ in range(_ECHOES // 10)]
            cpu.append((cpu_s() - before - once_more) / (_ECHOES // 10))
        busy = Timing.of(np.maximum(cpu, 1e-6).tolist())
        timings["event_loop"][n] = busy
        timings["http"][n] = Timing.of(np.maximum(np.array(rounds) - busy.median_s, 1e-6).tolist())
    return timings


def _engine(pipe: Connection) -> None:
    """Answer whatever comes: the engine of the echo."""
    while True:
        pipe.recv()
        pipe.send(1)


def _serve(port: Connection, engine: Connection) -> None:
    import asyncio

    fastapi, uvicorn = import_module("fastapi"), import_module("uvicorn")
    responses, pydantic = import_module("fastapi.responses"), import_module("pydantic")
    app = fastapi.FastAPI()
    body_type = pydantic.create_model(
        "Body", model=(str, ...), prompt=(str, ...), max_tokens=(int, 16), stream=(bool, False),
        tokens=(int, 0), temperature=(float, 1.0), top_p=(float, 1.0), n=(int, 1),
    )  # fmt: skip

    async def completions(body: Any) -> Any:
        answered = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        loop.add_reader(engine.fileno(), lambda: answered.set_result(engine.recv()))
        engine.send({"prompt_token_ids": list(range(body.tokens)), "max_tokens": body.max_tokens})
        await answered
        loop.remove_reader(engine.fileno())

        async def stream() -> Any:
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': 'a'}]})}\n\n"
            yield "data: [DONE]\n\n"

        return responses.StreamingResponse(stream(), media_type="text/event-stream")

    async def cpu() -> float:
        return time.process_time()

    completions.__annotations__ = {"body": body_type}
    app.post("/v1/completions", response_model=None)(completions)
    app.get("/cpu")(cpu)
    # Only of a socket that says it is TCP asyncio sends small parts at once.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port.send(listening.getsockname()[1])
        config = uvicorn.Config(app, log_level="error", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])


def measure_front_end(
    tokenizer_file: Path,
    *,
    text: Path | None = None,
    name: str | None = None,
    tokens: Sequence[int] = TOKENS,
    progress: Callable[[float], None] = lambda _share: None,
) -> LatencyTable:
    """Measure this machine's front end. Raises InputError: a package is missing, or a file cannot
    be read.

    ``tokenizer_file``: a ``tokenizer.json``; ``text``: that prompts are parts of; else ids in a
    row, decoded; ``name``: of the CPU; ``tokens``: of prompts; ``progress``: called with the share
    done."""
    tokenizer = open_tokenizer(tokenizer_file)
    try:
        words = None if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("text", f"cannot read {text}: {error}") from None
    times = {"tokenize": tokenize_times(tokenizer, words, tokens)}
    progress(0.5)
    times |= echo_times(tokens)
    progress(1.0)
    rows = [(part, n, timing) for part in PARTS for n, timing in times[part].items()]
    versions = {package: metadata.version(package) for package in _PACKAGES}
    return LatencyTable(
        TableMetadata(
            kind="front_end",
            gpu=name or cpu_name().split(",")[0],
            shape={},
            dtype="text",
            kernel_source=f"{type(tokenizer.model).__name__} of "
            f"{tokenizer.get_vocab_size()} ids ({tokenizer_file.name}); FastAPI echo",
            framework=f"tokenizers {versions['tokenizers']}",
            provenance="measured",
            origin="eldr-sim profile --frontend",
            device=cpu_name(),
            versions=versions,
            date=datetime.date.today().isoformat(),
            notes="prompts: "
            + ("ids in a row, decoded" if text is None else f"parts of {text.name}")
            + "; what vLLM computes for a request is not in event_loop",
        ),
        {
            "part": np.array([part for part, _, _ in rows], object),
            "tokens": np.array([n for _, n, _ in rows], np.int64),
            **Timing.columns([timing for _, _, timing in rows]),
        },
    )


_PACKAGES = ("tokenizers", "fastapi", "uvicorn")
