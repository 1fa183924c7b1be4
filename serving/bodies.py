"""Bodies of completion requests: what is passed on, and what is refused before anything is done."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeGuard

from eldr_sim.errors import needed
from eldr_sim.inputs import parse_json

_LEFT_OUT = ("stream", "stream_options", "min_tokens")
#: Limits on the output: of completions, and of chat completions besides.
_LIMITS = ("max_tokens", "max_completion_tokens")
#: What ``/tokenize`` takes of a request whose prompt is text.
TOKENIZED = ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt",
             "continue_final_message", "chat_template", "chat_template_kwargs",
             "tools")  # fmt: skip
_NO_CACHE_YET = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class CompletionRequest(NamedTuple):
    """A request for a completion."""

    body: dict[str, Any]  #: what the client has sent
    raw: bytes  #: the bytes of it
    streamed: bool  #: whether the answer is to come token by token
    prompt_len: int  #: tokens of a prompt that is given as token ids; 0 where it is text
    max_tokens: int | None  #: most output tokens; None where the client sets no limit


def parse_body(raw: bytes, *, handed_over: bool) -> CompletionRequest:
    """Read a request's body, JSON. Raises ValueError (InputError is one) if it is no object, or
    cannot be handed over.

    ``handed_over``: a prefill engine computes the prompt and sees no limits of the output: what a
    decode engine would refuse of them is refused here, before. Else a body needs to make sense of
    what policies read: prompt, limits, streaming; engines judge the rest."""
    try:
        body = _decoder()(raw)
    except (ValueError, RecursionError):  # or what msgspec refuses and json takes: half surrogates
        body = _parsed(raw)
    if not isinstance(body, dict):
        raise ValueError("body: no JSON object")
    _check(body, handed_over)
    prompt = body.get("prompt")
    limits = [body[key] for key in _LIMITS if _is_count(body.get(key))]
    prompt_len = len(prompt) if _is_ids(prompt) else 0
    return CompletionRequest(
        body, raw, bool(body.get("stream")), prompt_len, limits[-1] if limits else None
    )


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request for a prefill engine: one token, KV cache kept."""
    return one_token_body(body, _NO_CACHE_YET)


def one_token_body(body: dict[str, Any], kv_transfer_params: dict[str, Any]) -> dict[str, Any]:
    """Return the same request for one token, not streamed, with other ``kv_transfer_params``."""
    asked = {key: value for key, value in body.items() if key not in _LEFT_OUT}
    asked |= {"max_tokens": 1, "kv_transfer_params": kv_transfer_params}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return asked


@cache
def _decoder() -> Callable[[bytes], Any]:
    """Return msgspec's reader of JSON, several times as fast as json's."""
    decode: Callable[[bytes], Any] = needed("msgspec", "live run").json.Decoder().decode
    return decode


def _parsed(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")  # engines read nothing else (RFC 8259, section 8.1)
    except UnicodeDecodeError:
        raise ValueError("body: not UTF-8 (allowed: JSON in UTF-8)") from None
    if text.startswith("\ufeff"):
        raise ValueError("body: begins with a byte order mark (allowed: JSON in UTF-8 without one)")
    return parse_json(text, "body")


def _check(body: dict[str, Any], handed_over: bool) -> None:
    """Raise ValueError for what is no request, or cannot be passed on as one to two engines."""
    if body.get("stream") not in (None, True, False):
        raise ValueError(f"stream: {_shown(body['stream'])} (allowed: true, false)")
    fewest = 1 if handed_over else 0  # 0: an engine that computes the prompt may echo it
    for key in _LIMITS:
        if body.get(key) is not None and not (_is_count(body[key]) and body[key] >= fewest):
            allowed = f"a whole number, {fewest} or more"
            raise ValueError(f"{key}: {_shown(body[key])} (allowed: {allowed})")
    if not handed_over:
        if not (body.get("prompt") is None or _is_prompt(body["prompt"])):
            allowed = "texts, or lists of token ids"
            raise ValueError(f"prompt: {_shown(body['prompt'])} (allowed: {allowed})")
        if not isinstance(body.get("messages", []), list):
            raise ValueError(f"messages: {_shown(body['messages'])} (allowed: a list of messages)")
        return
    if "messages" in body:
        if not isinstance(body["messages"], list) or not body["messages"]:
            raise ValueError("messages: missing (allowed: a list of messages)")
    else:
        prompt = body.get("prompt")
        if not prompt:
            raise ValueError("prompt: missing (allowed: one text or one list of token ids)")
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise ValueError("prompt: several (allowed: one text or one list of token ids)")
    if body.get("n") not in (None, 1):
        raise ValueError("n: more than one answer (allowed: 1)")
    least = body.get("min_tokens")
    if least is not None:
        most = min((body[key] for key in _LIMITS if body.get(key) is not None), default=least)
        if not _is_count(least) or not 0 <= least <= most:
            allowed = "a whole number up to max_tokens"
            raise ValueError(f"min_tokens: {_shown(least)} (allowed: {allowed})")
    options = body.get("stream_options")
    if options is not None and not (body.get("stream") and isinstance(options, dict)):
        raise ValueError("stream_options: without stream, or no object")


def _is_prompt(prompt: object) -> bool:
    if not isinstance(prompt, list):
        return isinstance(prompt, str)
    return _is_ids(prompt) or all(isinstance(p, str) for p in prompt) or all(map(_is_ids, prompt))


def _is_ids(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and set(map(type, prompt)) <= {int}


def _is_count(value: object) -> bool:
    return type(value) is int


def _shown(value: object) -> str:
    return json.dumps(value)[:40]
