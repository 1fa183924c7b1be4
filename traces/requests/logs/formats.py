"""The formats of request logs: how each is recognised, what its columns are, and a line of it.

``formats.toml`` is the one table from which files are read, ``eldr-sim trace formats`` prints and
``docs/formats.md`` is written."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class LogFormat:
    """A format of request logs or of rates."""

    name: str  #: as results call it
    about: str = ""  #: what writes it, and what it holds
    example: str = ""  #: the first lines of such a file; none: another spelling of the one before
    #: What it is good for: ``workload``, ``load``, or neither: then ``way`` is the way out.
    use: Literal["workload", "load", ""] = "workload"
    way: str = ""  #: where it is not read: what to do instead
    #: Columns that tell a table; none: another module reads the format.
    needs: Sequence[str] = ()
    #: Columns that the fields of `table_columns.TableColumns` are in, the first that is there;
    #: ``time`` with its unit.
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    succeeded: Sequence[str] = ()  #: what ``status`` says of requests with answers, beside null
    strict: bool = False  #: whether lengths are JSON integers
    ambiguous: str = ""  #: column of a time whose unit is a custom that not all writers keep
    longest_s: float = 31 * 86400.0  #: a longer log is doubted where the unit is ambiguous


@cache
def formats() -> list[LogFormat]:
    """Return all formats, in the order in which a table is compared with them."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return [LogFormat(**entry) for entry in tomllib.loads(text)["format"]]


#: First line of such a configuration: the heading of a section.
_SECTION = re.compile("(?:load|api|data|server|storage|report|metrics|tokenizer|circuit_breakers):")
#: A line of a text log, of an access log and of an engine.
_ACCESS = re.compile(r'"(?:GET|POST) \S+ HTTP/[\d.]+"')
_ENGINE = re.compile(
    r"(?:\(\w+ pid=\d+\) )?(?:INFO|WARNING|DEBUG|ERROR) \d\d-\d\d \d\d:|\[[\d\- :]{19}[^\]]*\] \w"
)


def table_format(names: Iterable[str]) -> LogFormat | None:
    """Return the format of a table with such columns; None where it is not known."""
    there = set(names)
    tables = (known for known in formats() if known.needs)
    return next((known for known in tables if there.issuperset(known.needs)), None)


def named_format(name: str) -> LogFormat:
    """Return a format by its name."""
    return next(known for known in formats() if known.name == name)


def known_formats() -> list[LogFormat]:
    """Return the formats, each once."""
    return [known for known in formats() if known.example]


def _first_has(entries: Any, *names: str) -> bool:
    """Whether a list of objects begins with one that has a field of ``names``."""
    first = entries[0] if isinstance(entries, list) and entries else None
    return isinstance(first, Mapping) and any(name in first for name in names)


def refused_format(text: str, record: Any) -> LogFormat | None:
    """Return the format of a file that is not read; None where it is none of those known.

    ``text``: how the file begins; ``record``: its JSON value, where it is JSON."""
    if text.lstrip().startswith(("# HELP ", "# TYPE ")):
        return named_format("prometheus metrics")
    if text.startswith("Metric,avg,min,max"):
        return named_format("aiperf summary")
    if _SECTION.fullmatch(text.rstrip()):
        return named_format("inference-perf config")
    if _ACCESS.search(text):
        return named_format("access log")
    if _ENGINE.match(text):
        return named_format("engine log")
    if not isinstance(record, Mapping):
        return None
    if "response_flags" in record or {"path", "response_code"} <= record.keys():
        return named_format("access log")
    if "resourceSpans" in record or "scopeSpans" in record:
        return named_format("opentelemetry")
    if _first_has(record.get("requests"), "provider_tokens"):
        return named_format("freeinference")
    if _first_has(record.get("experiments"), "experiment", "requests"):
        return named_format("genai-perf")
    if _first_has(record.get("data"), "payload", "payloads"):
        return named_format("aiperf inputs")
    if "avg_latency" in record or {"elapsed_time", "num_requests"} <= record.keys():
        return named_format("vllm bench totals")
    if "load_summary" in record or ("successes" in record and "failures" in record):
        return named_format("inference-perf summary")
    if any(str(name).startswith("results_number_") for name in record):
        return named_format("llmperf summary")
    metrics = ("time_to_first_token", "request_latency", "input_sequence_length")
    if any(isinstance(record.get(name), Mapping) and "avg" in record[name] for name in metrics):
        return named_format("aiperf summary")
    return None
