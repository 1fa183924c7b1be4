"""What clients ask a simulated server for: prompts, lengths, and what their answers look like. What
would change an answer and is not simulated is refused, never ignored."""

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eldr_sim.serving.bodies import parse_body
from eldr_sim.serving.simulated.handover import Role, check

#: The filler that answers consist of; letters of a text that are taken for a token where there is
#: no tokenizer, as of each of ours.
WORD = " tok"
LETTERS = len(WORD)
_MOST_PROMPTS, _MOST_ANSWERS, _MOST_LOGPROBS = 1024, 128, 20
_MOST_STOPS = 16

#: Fields that are refused unless they have one of these values: they would change the answer.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((None, False), "prompts are not sent back"),
    "suffix": ((None, ""), "text is not inserted"),
    "use_beam_search": ((None, False), "beam search is not simulated"),
    "prompt_logprobs": ((None,), "prompts have no probabilities"),
    "truncate_prompt_tokens": ((None,), "prompts are not cut"),
    "structured_outputs": ((None,), "answers are filler words"),
    "guided_json": ((None,), "answers are filler words"),
    "guided_regex": ((None,), "answers are filler words"),
    "guided_choice": ((None,), "answers are filler words"),
    "guided_grammar": ((None,), "answers are filler words"),
    "priority": ((None, 0), "requests have no priorities"),
    "previous_response_id": ((None,), "responses are not stored"),
    "background": ((None, False), "responses are not stored"),
    "conversation": ((None,), "responses are not stored"),
    "audio": ((None,), "audio is not simulated"),
    "modalities": ((None, [], ["text"]), "answers are text"),
    "image": ((None,), "images are not simulated"),
    "prediction": ((None,), "predicted outputs are not simulated"),
    "verbosity": ((None, "medium"), "the workload gives the length of answers"),
    "reasoning_effort": ((None, "none"), "answers hold no reasoning"),
    "reasoning": ((None, {}, {"effort": "none"}), "answers hold no reasoning"),
    "web_search_options": ((None,), "the web is not searched"),
    "moderation": ((None,), "content is not moderated"),
    "include": ((None, []), "answers have no further parts"),
    "truncation": ((None, "disabled"), "prompts are not cut"),
    "context_management": ((None, []), "prompts are not cut"),
    "access_programs": ((None, []), "answers run no programs"),
    "background_options": ((None,), "responses are not stored"),
    "prompt_cache_options": ((None,), "KV caches follow the engine's rules"),
    "prompt_cache_retention": ((None, "in_memory"), "KV caches follow the engine's rules"),
    "return_token_ids": ((None, False), "filler words have no token ids"),
    "prompt_embeds": ((None,), "embeddings are not simulated"),
}
#: Fields that have no effect on filler words, and those that are read elsewhere.
_KNOWN = frozenset((
    "model", "prompt", "messages", "input", "instructions", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "min_tokens", "stream", "stream_options", "n", "best_of", "stop",
    "stop_token_ids", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "response_format", "text", "ignore_eos", "user", "seed", "temperature", "top_p", "top_k",
    "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
    "cache_salt", "kv_transfer_params", "add_special_tokens", "include_stop_str_in_output",
    "skip_special_tokens", "store", "spaces_between_special_tokens", "length_penalty", "metadata",
    "service_tier", "request_id", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "safety_identifier", "prompt_cache_key", "bad_words",
    "allowed_token_ids", "functions", "function_call", "max_tool_calls",
)) | set(_REFUSED)  # fmt: skip


class Prompt(NamedTuple):
    """A prompt. ``text``: where there is no tokenizer, so that an answer goes on with it."""

    ids: list[int]
    text: str | None


class Asked(NamedTuple):
    """A request for answers, checked."""

    body: dict[str, Any]
    prompts: list[Prompt]
    adapter: str | None  #: LoRA adapter that is named as the model
    n: int  #: answers to each prompt
    most: int | None  #: output tokens
    least: int
    streamed: bool
    stops: list[str]
    logprobs: int | None  #: alternatives a token; None: not wanted
    ignored: list[str]  #: fields that are not known


class Parser:
    """Reads requests. ``model``: its name; ``adapters``: names of LoRA adapters; ``tokenizer``: of
    the package ``tokenizers``, or None; ``longest``: tokens of the longest context; ``role``: of
    the worker, see `handover.check`."""

    def __init__(
        self,
        model: str,
        adapters: Sequence[str],
        tokenizer: Any,
        longest: int,
        role: Role | None = None,
    ) -> None:
        self._model, self._adapters, self._tokenizer = model, adapters, tokenizer
        self.longest, self._role = longest, role

    def read(self, raw: bytes, kind: str) -> Asked:
        """Read a body; raises ValueError for what cannot be answered. ``kind``: ``completion``,
        ``chat`` or ``response``."""
        body = parse_body(raw, handed_over=False).body
        if kind == "response":
            body = _from_response(body)
        for name, (allowed, why) in _REFUSED.items():
            if not any(body.get(name) is v or body.get(name) == v for v in allowed):
                raise ValueError(f"{name}: {why}")
        _check_form(body)
        prompts = self._prompts(body, kind)
        n = _count(body, "n", 1, 1, _MOST_ANSWERS)
        if body.get("best_of") not in (None, n):
            raise ValueError(f"best_of: answers are not ranked (allowed: n, {n})")
        check(body, self._role, n * len(prompts))
        limits = [_count(body, name, None, 1, 1 << 31)
                  for name in ("max_tokens", "max_completion_tokens")]  # fmt: skip
        max_tokens = next((limit for limit in reversed(limits) if limit is not None), None)
        least = self._least(body, max_tokens)
        for prompt in prompts:
            self._check_length(prompt, max_tokens)
        stops, logprobs = _stops(body), _logprobs(body, kind)
        ignored = sorted(set(body) - _KNOWN)
        streamed = bool(body.get("stream"))
        options = body.get("stream_options")
        if options is not None and not (streamed and isinstance(options, dict)):
            raise ValueError("stream_options: without stream, or no object")
        adapter = self._adapter(body)
        return Asked(
            body, prompts, adapter, n, max_tokens, least, streamed, stops, logprobs, ignored
        )

    def tokenize(self, raw: bytes) -> list[int]:
        """Return the tokens of a body of ``/tokenize``; raises ValueError."""
        body = parse_body(raw, handed_over=False).body
        self._adapter(body)
        kind = "chat" if "messages" in body else "completion"
        prompts = self._prompts(body, kind)
        if len(prompts) != 1:
            raise ValueError("prompt: several (allowed: one)")
        return prompts[0].ids

    def most_of(self, asked: Asked, prompt: Prompt) -> int:
        """Return the most tokens of an answer."""
        return asked.most or self.longest - len(prompt.ids)

    def _adapter(self, body: Mapping[str, Any]) -> str | None:
        name = body.get("model")
        if name in (None, "", self._model):
            return None
        if name in self._adapters:
            return str(name)
        allowed = ", ".join((self._model, *self._adapters))
        raise ValueError(f"model: {name!r} is not served (allowed: {allowed})")

    def _prompts(self, body: Mapping[str, Any], kind: str) -> list[Prompt]:
        if kind != "completion":
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise ValueError("messages: missing (allowed: a list of messages)")
            return [self._of_text("".join(map(_text_of, messages)))]
        prompt = body.get("prompt")
        if not prompt:
            raise ValueError("prompt: missing (allowed: texts, or lists of token ids)")
        several = (
            prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        )
        if len(several) > _MOST_PROMPTS or not all(several):
            raise ValueError(f"prompt: empty, or above {_MOST_PROMPTS}")
        return [self._of_text(p) if isinstance(p, str) else self._of_ids(p) for p in several]

    def _of_text(self, text: str) -> Prompt:
        if self._tokenizer is not None:
            text.encode()  # a lone surrogate is no text
            return Prompt(list(self._tokenizer.encode(text).ids) or [0], None)
        return Prompt(pieces(text) or [0], text)

    def _of_ids(self, ids: Sequence[int]) -> Prompt:
        if not 0 <= min(ids) <= max(ids) < 1 << 31:
            raise ValueError("prompt: a token id is out of range")
        return Prompt(list(ids), None)

    def _least(self, body: Mapping[str, Any], most: int | None) -> int:
        least = _count(body, "min_tokens", 0, 0, most or self.longest)
        return most if body.get("ignore_eos") and most else max(1, least or 0)

    def _check_length(self, prompt: Prompt, most: int | None) -> None:
        n = len(prompt.ids)
        if n + (most or 1) > self.longest:
            wanted = "" if most is None else f" and {most} output tokens"
            raise ValueError(f"context length {self.longest}: {n} prompt tokens{wanted}")


def pieces(text: str) -> list[int]:
    """Return a number for each four characters of a text: its tokens, without a tokenizer."""
    return [
        zlib.crc32(text[at : at + LETTERS].encode("utf-8", "surrogatepass")) >> 1
        for at in range(0, len(text), LETTERS)
    ]


def blocks_of(
    prompt: Prompt, output_len: int, size: int, salt: object
) -> tuple[list[bytes], list[int]]:
    """Return a digest of each whole block of a prompt and, if it is text, of its answer; and the
    tokens of all. ``salt``: what keeps the blocks of some requests apart."""
    ids = prompt.ids if prompt.text is None else pieces(prompt.text + WORD * output_len)
    parts = [tuple(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)]
    salts = [salt] + [None] * len(parts)  # a block's number stands for all before it
    return [_digest(part, own) for part, own in zip(parts, salts, strict=False)], ids


def _digest(part: tuple[int, ...], salt: object) -> bytes:
    text = repr(part) if salt is None else repr((part, salt))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def stopped(output_len: int, stops: Sequence[str]) -> tuple[int, int | None]:
    """Return the tokens of an answer that ends at the first of ``stops``, and how many of its
    characters come before it; None where none comes."""
    text = WORD * min(output_len, max([0, *map(len, stops)]) // LETTERS + 2)
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return output_len, None
    end, at = min(found)
    return min(output_len, math.ceil(end / LETTERS)), at


def _from_response(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request of ``/v1/responses`` as one for a chat."""
    if body.get("prompt") is not None:
        raise ValueError("prompt: prompt templates are not stored")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise ValueError("input: missing (allowed: a text, or a list of messages)")
    messages = []
    for item in items:
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise ValueError("input: an item that is not a message")
        messages.append(item)
    if not isinstance(body.get("instructions", ""), str | None):
        raise ValueError("instructions: no text")
    if body.get("instructions") is not None:
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    most = _count(body, "max_output_tokens", None, 1, 1 << 31)
    form = body.get("text")
    if form is not None and not isinstance(form, dict):
        raise ValueError("text: no object")
    form = form or {}
    if form.get("format") not in (None, {"type": "text"}):
        raise ValueError("text.format: answers are filler words, not JSON (allowed: text)")
    made = {**body, "messages": messages, "max_tokens": most}
    return made | {"verbosity": form.get("verbosity")}


def _check_form(body: Mapping[str, Any]) -> None:
    """Raise ValueError for an answer that is not text."""
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise ValueError("response_format: answers are filler words, not JSON (allowed: text)")
    for name in ("tools", "functions"):
        if body.get(name) is not None and not isinstance(body[name], list):
            raise ValueError(f"{name}: no list")
    for name in ("tool_choice", "function_call"):
        if body.get(name) not in (None, "none", "auto"):
            raise ValueError(f"{name}: answers call no tools (allowed: none, auto)")


def _stops(body: Mapping[str, Any]) -> list[str]:
    stops = body.get("stop")
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("stop: no text, and no list of texts")
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"stop: more than {_MOST_STOPS}")
    ids = body.get("stop_token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise ValueError("stop_token_ids: no list of token ids")
    return stops


def _logprobs(body: Mapping[str, Any], kind: str) -> int | None:
    wanted = body.get("logprobs")
    if kind == "completion":
        return _count(body, "logprobs", None, 0, _MOST_LOGPROBS) if wanted is not False else None
    if wanted not in (None, True, False):
        raise ValueError("logprobs: allowed: true, false")
    top = _count(body, "top_logprobs", None, 0, _MOST_LOGPROBS)
    if top and not wanted and kind == "chat":
        raise ValueError("top_logprobs: without logprobs")
    return (top or 0) if wanted else None


def _count(body: Mapping[str, Any], name: str, usual: int | None, least: int, most: int) -> Any:
    """Return a whole number of a body; raises ValueError where it is none or out of range."""
    value = body.get(name)
    if value is None:
        return usual
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{name}: {repr(value)[:40]} (allowed: a whole number from {least} to {most})"
        )
    return value


def _text_of(message: Any) -> str:
    """Return the text of a message; ValueError where it is none, or holds more."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("messages: each is an object with role and content")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_parts(content))
    if content is not None and not isinstance(content, str):
        raise ValueError("messages: content is not text")
    return content or ""


def _parts(content: Sequence[Any]) -> Iterator[str]:
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"messages: parts of type {kind!r} are not simulated (allowed: text)")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ValueError("messages: a part without text")
        yield text
