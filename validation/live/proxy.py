"""A proxy before live engines that routes by the simulator's policy objects.

``python -m eldr_sim.validation.live.proxy CONFIG.json`` serves ``/v1/completions`` in front of
prefill and decode engines (xPyD), or of engines that compute both, and ``/health``. `ProxyConfig`
says what the file holds. An engine is a URL: it may run anywhere.

With prefill engines a request goes to one of them first, with ``max_tokens`` 1 and the
``kv_transfer_params`` of vLLM's ``NixlConnector``; its token is thrown away. What it says of the KV
cache goes to a decode engine with the request. That engine fetches the cache and its answer is
passed on as it comes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.errors import InputError
from eldr_sim.policies.base import DecodePolicy, PolicyContext, RequestInfo
from eldr_sim.policies.registry import prefill_policy
from eldr_sim.policies.shortlist import picks_from_shortlists
from eldr_sim.validation.live.client import prefill_body
from eldr_sim.validation.live.http import import_aiohttp, open_session
from eldr_sim.validation.live.live_run import REQUESTS
from eldr_sim.validation.live.router import Router, build_decode_policy
from eldr_sim.validation.live.signals import watch_engines
from eldr_sim.validation.live.signatures import SignatureReader

__all__ = ["ProxyConfig", "join_proxy_log", "make_app", "serve"]

#: A prompt of a million token ids is about 7 MB.
_MAX_BODY = 64 << 20


class ProxyConfig(BaseModel):
    """What the proxy is started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Where it listens."""
    port: int
    """Where it listens."""
    prefill_urls: list[str] = []
    """Prefill engines, which take requests in turn; none where the others compute prompts too."""
    decode_urls: list[str] = Field(min_length=1)
    """Engines that the policy chooses among."""
    policy: str = "round_robin"
    """Decode policy with its parameters, such as ``eldr:artifact=fit.npz``."""
    seed: int = 0
    """Of a policy that draws."""
    capture: list[str] = []
    """What ``ELDR_SIM_CAPTURE`` names in the prefill engines; for policies that read signatures."""
    signal_interval_ms: float = Field(default=100.0, gt=0)
    """How often the engines' metrics are read, ms, for policies that may look at more than the
    requests in flight."""
    log: str
    """File that gets a line of JSON for each request when it is routed: see `join_proxy_log`."""

    def build_policy(self) -> DecodePolicy:
        """Return the policy object."""
        return build_decode_policy(self.policy, len(self.decode_urls), seed=self.seed)


def make_app(config: ProxyConfig, policy: DecodePolicy | None = None) -> Any:
    """Return the proxy, an ``aiohttp.web.Application``.

    Parameters
    ----------
    config
        Engines and policy.
    policy
        Takes the place of the policy that ``config`` names.

    Raises
    ------
    InputError
        If aiohttp is not installed, or the policy cannot be built or used here.
    """
    import_aiohttp()
    from aiohttp import web

    proxy = _Proxy(config, policy or config.build_policy())
    app = web.Application(client_max_size=_MAX_BODY)
    app.cleanup_ctx.append(proxy.run)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_get("/health", proxy.health)
    return app


def serve(path: str | os.PathLike[str]) -> None:
    """Serve until the process is told to stop.

    Parameters
    ----------
    path
        JSON file with a `ProxyConfig`.

    Raises
    ------
    InputError
        If the configuration is not valid or its address is taken.
    """
    try:
        config = ProxyConfig.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise InputError("config", f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "config"
        raise InputError(field, f"{path}: {first['msg']}") from None
    app = make_app(config)
    from aiohttp import web

    try:
        web.run_app(
            app,
            host=config.host,
            port=config.port,
            print=None,
            access_log=None,
            shutdown_timeout=1.0,
        )
    except OSError as error:
        raise InputError("port", f"{config.host}:{config.port}: {error.strerror}") from None


def join_proxy_log(requests: pa.Table, path: str | os.PathLike[str]) -> pa.Table:
    """Put what the proxy has logged into the client's table.

    Parameters
    ----------
    requests
        `live_run.REQUESTS` as `client.send_load` returns it.
    path
        ``ProxyConfig.log``: ``request_id``, ``prefilled_s`` and ``routed_s`` (s of
        `time.monotonic`; no ``prefilled_s`` without prefill engines) and ``engine`` of each
        request, in the order of routing.

    Raises
    ------
    InputError
        If the file is no log of a proxy, or one of the requests is not in it exactly once.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found.setdefault(entry["request_id"], []).append(entry)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("proxy log", f"{path}: {error}") from None
    entries = []
    for name in requests["request_id"].to_pylist():
        mine = found.get(name, [])
        if len(mine) != 1:
            raise InputError("proxy log", f"{path} names request {name} {len(mine)} times", "once")
        entries += mine
    for key in ("prefilled_s", "routed_s", "engine"):
        field = REQUESTS.field(key)
        column = pa.array([entry[key] for entry in entries], field.type)
        requests = requests.set_column(requests.column_names.index(key), field, column)
    return requests


class _Proxy:
    """The requests that pass through."""

    def __init__(self, config: ProxyConfig, policy: DecodePolicy) -> None:
        self._prefill_urls, self._decode_urls = config.prefill_urls, config.decode_urls
        self._log_path = Path(config.log)
        self._router = Router(policy, len(config.decode_urls))
        self._interval_s = config.signal_interval_ms / 1e3
        self._watches = not picks_from_shortlists(policy)
        self._signatures = _signature_reader(config, policy)
        self._prefill_router: Router | None = None
        if config.prefill_urls:
            n = len(config.prefill_urls)
            in_turn = prefill_policy("round_robin", PolicyContext(n, np.random.default_rng(0)))
            self._prefill_router = Router(in_turn, n)
        self._numbers = count()
        self._session: Any = None
        self._log: IO[str] | None = None

    async def run(self, _app: Any) -> AsyncIterator[None]:
        """Hold the log and the connections open while the application runs."""
        try:
            log = self._log_path.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError("log", f"{self._log_path}: {error.strerror}") from None
        with log:
            async with open_session() as self._session:
                self._log = log
                watch = None
                if self._watches:
                    watching = watch_engines(
                        self._session, self._decode_urls, self._router, self._interval_s
                    )
                    watch = asyncio.create_task(watching)
                yield
                if watch is not None:
                    watch.cancel()

    async def health(self, _request: Any) -> Any:
        """Answer that the proxy is up; the engines answer for themselves."""
        from aiohttp import web

        return web.Response()

    async def complete(self, request: Any) -> Any:
        """Serve one completion."""
        from aiohttp import ClientError, web

        name = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        try:
            body = json.loads(await request.read())
            _check_body(body)
        except (ValueError, TypeError) as error:
            return _error(400, str(error))
        prompt = body["prompt"]
        info = RequestInfo(
            next(self._numbers),
            len(prompt) if isinstance(prompt, list) else 0,
            domain=-1,
            session=body.get("user"),
            max_tokens=body.get("max_tokens"),
        )
        prefilled_s = None
        answer: Any = None
        try:
            if self._prefill_router is not None:
                status, reply = await self._prefill(self._prefill_router, info, body, name)
                prefilled_s = time.monotonic()
                if status != 200:
                    return web.Response(body=reply, status=status, content_type="application/json")
                info = self._after_prefill(info, body, reply, name)
            elif self._signatures is not None:
                if not body.get("kv_transfer_params"):
                    return _error(400, "kv_transfer_params: missing, the policy reads signatures")
                info = info._replace(signature=self._signatures.counts(name))  # computed ahead
            answer = web.StreamResponse()
            await self._decode(request, answer, info, body, name, prefilled_s)
        except InputError as error:
            return _error(500, str(error))
        except (ClientError, OSError) as error:
            if answer is None or not answer.prepared:
                return _error(502, str(error) or type(error).__name__)
            # Part of the answer is out: break it off, lest it look whole.
            if request.transport is not None:
                request.transport.abort()
        return answer

    async def _prefill(
        self, router: Router, info: RequestInfo, body: dict[str, Any], name: str
    ) -> tuple[int, bytes]:
        """Let a prefill engine compute the prompt; return status and body of its answer."""
        asked = prefill_body(body)
        engine = await router.route(info)
        try:
            async with self._post(self._prefill_urls[engine], asked, name) as response:
                return response.status, await response.read()
        finally:
            router.complete(info.request_id, engine)

    def _after_prefill(
        self, info: RequestInfo, body: dict[str, Any], reply: bytes, name: str
    ) -> RequestInfo:
        """Put the prefill engine's answer into the body; return what the policy may see."""
        try:
            answer = json.loads(reply)
            body["kv_transfer_params"] = answer["kv_transfer_params"]
            prompt_len = int(answer["usage"]["prompt_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "prefill engine",
                f"its answer lacks {error}",
                "an engine with a KV connector (--kv-transfer-config)",
            ) from None
        if body["kv_transfer_params"] is None:
            raise InputError(
                "prefill engine",
                "its answer has no kv_transfer_params",
                "an engine with a KV connector (--kv-transfer-config)",
            )
        signature = None if self._signatures is None else self._signatures.counts(name)
        return info._replace(prompt_len=prompt_len, signature=signature)

    async def _decode(
        self,
        request: Any,
        answer: Any,
        info: RequestInfo,
        body: dict[str, Any],
        name: str,
        prefilled_s: float | None,
    ) -> None:
        """Route a request and pass the engine's answer on as it comes."""
        engine = await self._router.route(info)
        try:
            routed_s = time.monotonic()
            self._write(request_id=name, prefilled_s=prefilled_s, routed_s=routed_s, engine=engine)
            async with self._post(self._decode_urls[engine], body, name) as response:
                answer.set_status(response.status)
                answer.content_type = response.content_type
                await answer.prepare(request)
                async for part in response.content.iter_any():
                    await answer.write(part)
        finally:
            self._router.complete(info.request_id, engine)
        await answer.write_eof()

    def _post(self, url: str, body: dict[str, Any], name: str) -> Any:
        data = json.dumps(body, separators=(",", ":")).encode()
        address = url.rstrip("/") + "/v1/completions"
        return self._session.post(address, data=data, headers={"X-Request-Id": name})

    def _write(self, **entry: object) -> None:
        assert self._log is not None
        self._log.write(json.dumps(entry) + "\n")
        self._log.flush()


def _signature_reader(config: ProxyConfig, policy: DecodePolicy) -> SignatureReader | None:
    """Return where signatures come from; None for a policy that reads none."""
    if not getattr(policy, "reads_signature", False):
        return None
    score = getattr(policy, "signature_score", "count")
    if score != "count":
        raise InputError(
            "artifact", f"needs {score} scores; engines log counts", "a count signature"
        )
    if not config.capture:
        raise InputError(
            "capture",
            f"missing, policy {policy.name!r} reads expert signatures",
            "what ELDR_SIM_CAPTURE names in the prefill engines",
        )
    return SignatureReader(config.capture)


def _check_body(body: Any) -> None:
    """Raise ValueError for what cannot be passed on as one request."""
    if not isinstance(body, dict) or not body.get("prompt"):
        raise ValueError("prompt: missing (allowed: one text or one list of token ids)")
    prompt = body["prompt"]
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    ):
        raise ValueError("prompt: several (allowed: one text or one list of token ids)")
    if body.get("n") not in (None, 1):
        raise ValueError("n: more than one answer (allowed: 1)")


def _error(status: int, message: str) -> Any:
    """Return an error as OpenAI's and vLLM's servers word it."""
    from aiohttp import web

    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def main() -> None:
    """Run the proxy; bad input is one line and exit code 2."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m eldr_sim.validation.live.proxy CONFIG.json")
    try:
        serve(sys.argv[1])
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
