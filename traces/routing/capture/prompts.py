"""Prompts to capture: one JSON object a line, with a domain label."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eldr_sim.errors import InputError
from eldr_sim.inputs import array_limit, parse_json, read_text
from eldr_sim.traces.routing.format import SPLITS

Content = str | list[int] | list[dict[str, Any]]  #: text, token ids, or the messages of a chat


@dataclass(frozen=True)
class Prompt:
    """One request to capture."""

    request_id: str  #: unique name; ``<domain>-<number>`` where the file names none
    domain: str  #: domain label
    #: Text, token ids or chat messages; None where the file has no prompt (see `read_prompts`).
    content: Content | None
    #: Split of the trace that it belongs to; None leaves the choice to the writer.
    split: Literal["calibration", "serving"] | None = None


def read_prompts(
    path: str | os.PathLike[str], *, domain_field: str = "domain", need_prompt: bool = True
) -> list[Prompt]:
    """Read prompts, a JSON object a line; raises InputError, also if a ``request_id`` comes twice.

    ``prompt`` (text, token ids, or chat messages with ``role`` and ``content``; not needed beside
    ``request_id`` without ``need_prompt``), the domain label (``domain_field``), and optionally
    ``request_id`` and ``split`` (``calibration`` or ``serving``)."""
    file = Path(path)
    lines = read_text(file, str(file), array_limit()).splitlines()
    prompts: list[Prompt] = []
    in_domain: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        row = parse_json(line, where)
        if not isinstance(row, dict):
            raise InputError(where, f"holds a JSON {type(row).__name__}", "an object")
        domain = row.get(domain_field)
        if not isinstance(domain, str) or not domain:
            raise InputError(where, f"{domain_field} is {domain!r:.40}", "a domain label")
        name = row.get("request_id", f"{domain}-{in_domain[domain]:04d}")
        if not isinstance(name, str) or not name:
            raise InputError(where, f"request_id is {name!r:.40}", "a string")
        in_domain[domain] += 1
        split = row.get("split")
        if split is not None and split not in SPLITS:
            raise InputError(where, f"split is {split!r:.40}", ", ".join(SPLITS))
        content = row.get("prompt")
        if content is None and not need_prompt and "request_id" in row:
            prompts.append(Prompt(name, domain, None, split))
            continue
        prompts.append(Prompt(name, domain, _check_content(where, content), split))
    if not prompts:
        raise InputError(str(file), "holds no prompt", "one JSON object a line")
    twice = [name for name, count in Counter(p.request_id for p in prompts).items() if count > 1]
    if twice:
        raise InputError(str(file), f"request_id {twice[0]!r} comes more than once", "unique names")
    return prompts


def _check_content(where: str, content: Any) -> Content:
    if isinstance(content, str) and content:
        return content
    if isinstance(content, list) and content:
        if all(type(token) is int and token >= 0 for token in content):
            return content
        if all(isinstance(part, dict) and {"role", "content"} <= part.keys() for part in content):
            return content
    allowed = "text, a list of token ids, or a list of messages with role and content"
    raise InputError(where, f"prompt is {content!r:.40}", allowed)


def tokenize(
    model: str, prompts: Sequence[Prompt], *, max_prompt_tokens: int | None = None
) -> list[list[int]]:
    """Turn prompts into token ids, at least one and the first ``max_prompt_tokens`` of each, with
    the model's own tokenizer, which is loaded only for text and chat messages. Raises
    InputError."""
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise InputError("max_prompt_tokens", f"got {max_prompt_tokens}", "at least 1")
    tokenizer: Any = None
    token_ids: list[list[int]] = []
    for prompt in prompts:
        content = prompt.content
        if isinstance(content, list) and not isinstance(content[0], dict):
            ids = [int(token) for token in content]
        else:
            if tokenizer is None:
                tokenizer = _load_tokenizer(model)
            if isinstance(content, str):
                ids = list(tokenizer(content)["input_ids"])
            else:
                ids = list(
                    tokenizer.apply_chat_template(
                        content, add_generation_prompt=True, tokenize=True, return_dict=False
                    )
                )
        if not ids:
            raise InputError("prompt", f"{prompt.request_id} has no token", "at least one")
        token_ids.append(ids[:max_prompt_tokens])
    return token_ids


def _load_tokenizer(model: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError(
            "prompt",
            "text needs the model's tokenizer, and transformers is not installed",
            "pip install 'eldr-sim[capture]', or prompts that are lists of token ids",
        ) from None
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise InputError("model", f"{model} has no tokenizer: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
