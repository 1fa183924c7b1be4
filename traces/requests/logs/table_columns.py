"""Which column of a table is what: by a known format, by ``--columns``, or as a guess for a hint.

``time_s=start,input=prompt_tokens,output=completion_tokens`` says which column is what. ``input``
and ``output`` are tokens; ``time`` an ISO 8601 time (or Parquet's type for times), ``time_s``,
``time_ms``, ``time_us`` and ``time_ns`` a number since any origin; ``session`` and ``priority`` as
in every log. Names of nested JSON are joined by dots: ``info.input_tokens``."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.formats import LogFormat
from eldr_sim.traces.requests.logs.log_rows import Row, scaled_ns, session_of, timestamp_ns

_FIRST_RECORDS = 200  #: of JSON, which say which columns there are
UNITS_NS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
DATE = "date"  #: the unit of times that are no numbers
KEYS = ("time", *(f"time_{unit}" for unit in UNITS_NS), "input", "output", "session", "priority")
TOKEN_BYTES = 4  #: of UTF-8 text that stand for a token (OpenAI's rule of thumb for English)
#: Endings of a column's name that say its unit.
_ENDINGS = (
    (re.compile(r"(?:[_\W](?:ns|nanos\w*)|Ns|Nanos)$"), "ns"),
    (re.compile(r"(?:[_\W](?:us|µs|micros\w*)|Us|Micros)$"), "us"),
    (re.compile(r"(?:[_\W](?:ms|millis\w*)|Ms|Millis)$"), "ms"),
    (re.compile(r"(?:[_\W](?:s|sec|secs|seconds)|Seconds|Sec)$"), "s"),
)
_COARSE = re.compile(r"(?:(?:^|[_\W])(?:min|minute|hour|hr|day)s?|(?:Minute|Hour|Day)s?)$")


@dataclass(frozen=True)
class TableColumns:
    """The column of each field of a request; None where a table has none."""

    time: str | None = None
    unit: str = DATE  #: of the time: a key of `UNITS_NS`, or `DATE`
    input: str | None = None
    output: str | None = None
    text: str | None = None  #: text of the prompt, where no column has its length
    session: str | None = None
    priority: str | None = None
    hashes: str | None = None
    name: str | None = None
    parent: str | None = None
    joins: str | None = None
    after_ms: str | None = None  #: from the answer before
    after_s: str | None = None
    model: str | None = None
    status: str | None = None  #: what a request ended with
    succeeded: tuple[Any, ...] = ()  #: what that is of one that has an answer
    strict: bool = False  #: whether lengths must be JSON integers
    ambiguous: bool = False  #: whether nothing but custom says the time's unit

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all columns, each once."""
        fields = ("time", "input", "output", "text", "session", "priority", "hashes", "name",
                  "parent", "joins", "after_ms", "after_s", "model", "status")  # fmt: skip
        found = (getattr(self, field) for field in fields)
        return tuple(dict.fromkeys(name for name in found if name is not None))

    @property
    def links(self) -> bool:
        """Whether requests name others, or say what they wait for."""
        return any((self.name, self.parent, self.joins, self.after_ms, self.after_s))


def unit_of(column: str) -> str | None:
    """Return the unit that a column's name ends with, if any."""
    last = column.rpartition(".")[2]
    return next((unit for ending, unit in _ENDINGS if ending.search(last)), None)


def parse_columns(text: str) -> dict[str, str]:
    """Return the column of each key; raises InputError."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        key, equals, column = (piece.strip() for piece in part.partition("="))
        if not equals or not column or key not in KEYS or key in columns:
            problem = f"{part.strip()!r}" + (" is given twice" if key in columns else "")
            raise InputError("columns", problem, f"KEY=COLUMN,... with keys {', '.join(KEYS)}")
        columns[key] = column
    if "input" in columns and columns["input"] == columns.get("output"):
        problem = f"{columns['input']!r} is input and output"
        raise InputError("columns", problem, "a column of prompts' tokens and one of answers'")
    times = [key for key in columns if key.startswith("time")]
    if len(times) > 1:
        raise InputError(
            "columns", "more than one time column", "input, output and at most one time"
        )
    for key in times:
        if _GAPS.search(columns[key]):
            problem = f"{columns[key]!r} holds gaps between requests by its name, not times"
            raise InputError("columns", problem, "a column of times: the running sum of the gaps")
        if key != "time" and (coarse := _COARSE.search(columns[key])):
            problem = f"{key}={columns[key]}, but the name says {coarse[0].strip('_')}"
            raise InputError("columns", problem, "a column of times in s, ms, us or ns")
        named = unit_of(columns[key])
        if key != "time" and named is not None and key != f"time_{named}":
            problem = f"{key}={columns[key]}, but the name says {named}"
            raise InputError("columns", problem, f"time_{named}={columns[key]}")
    return columns


def columns_of(
    known: LogFormat | None, given: Mapping[str, str], names: Iterable[str], time_unit: str | None
) -> TableColumns:
    """Return the columns of a table, by its format (None: not known) and what ``--columns`` says.

    ``names``: of the columns that the table has, as far as known; ``time_unit``: what
    ``--time-unit`` says. Raises InputError where these contradict each other."""
    there = set(names)
    found: dict[str, Any] = {}
    if known is not None:
        for key, candidates in known.columns.items():
            chosen = next((name for name in candidates if name in there), None)
            if chosen is None:
                continue
            if key.startswith("time"):
                if "time" in found or any(k.startswith("time") for k in given):
                    continue
                found |= {"time": chosen, "unit": key.partition("_")[2] or DATE}
            else:
                found[key] = chosen
        found |= {"succeeded": (None, *known.succeeded), "strict": known.strict}
        found["ambiguous"] = known.ambiguous and found.get("time") == known.ambiguous
    for key, column in given.items():
        if key.startswith("time"):
            found |= {"time": column, "unit": key.partition("_")[2] or DATE, "ambiguous": False}
        else:
            found[key] = column
    columns = TableColumns(**found)
    if known is None and columns.input is None:
        raise InputError("columns", "no input", "input, output and at most one time")
    return columns if time_unit is None else _in_unit(columns, time_unit)


def _in_unit(columns: TableColumns, time_unit: str) -> TableColumns:
    """Return columns whose times are in the unit of ``--time-unit``."""
    if columns.time is None:
        raise InputError("time_unit", f"{time_unit}, but the log has no times", "none")
    said = unit_of(columns.time)
    explicit = columns.unit if not columns.ambiguous and columns.unit != DATE else said
    if explicit is not None and explicit != time_unit:
        problem = f"{time_unit}, but column {columns.time} has {explicit}"
        raise InputError("time_unit", problem, explicit)
    return replace(columns, unit=time_unit, ambiguous=False)


def field_of(record: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, nested or not; raises KeyError where there is none."""
    if column in record:
        return record[column]
    for dot in re.finditer(r"\.", column):  # the names inside of it may hold dots themselves
        inside = record.get(column[: dot.start()])
        if isinstance(inside, Mapping):
            with suppress(KeyError):
                return field_of(inside, column[dot.end() :])
    raise KeyError(column)


def names_of(record: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the columns of a JSON object, nested ones joined by dots."""
    names = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            names += names_of(value, f"{above}{name}.")
        else:
            names.append(above + name)
    return names


def json_names(records: Iterable[Any]) -> list[str]:
    """Return the columns of the first JSON objects, nested ones joined by dots."""
    found: dict[str, None] = {}
    for record in islice(records, _FIRST_RECORDS):
        if isinstance(record, Mapping):
            found |= dict.fromkeys(names_of(record))
    return list(found)


def row_reader(columns: TableColumns, output_len: int | None) -> Callable[[Any], tuple[Row, Any]]:
    """Return what makes a request of a record, and whether it failed or which model it had.

    ``output_len``: tokens of an answer where a record has no such field. What it returns raises
    ValueError, KeyError, TypeError or OverflowError."""
    whole = strict_whole if columns.strict else whole_number
    open_output = 0 if output_len is None else output_len

    def optional(record: Any, column: str | None) -> Any:
        if column is None:
            return None
        try:
            return field_of(record, column)
        except KeyError:
            return None

    last: dict[str, int] = {}  # of each session, for turns that say only their pause

    def read(record: Any) -> tuple[Row, Any]:
        when = 0
        after = None
        if columns.after_ms is not None:
            after = _seconds(optional(record, columns.after_ms), 1e3)
        if columns.after_s is not None:
            after = _seconds(optional(record, columns.after_s), 1.0)
        session = session_of(optional(record, columns.session))
        if columns.time is not None:
            said = optional(record, columns.time)
            if after is not None and session in last and _is_empty(said):
                when = last[session] + round(1e9 * after)  # not before its pause, as far as known
            else:
                when = time_ns(columns.unit, field_of(record, columns.time))
            if session and (columns.after_ms or columns.after_s):
                last[session] = when
        output = open_output
        if columns.output is not None:
            said = field_of(record, columns.output) if output_len is None else optional(
                record, columns.output
            )  # fmt: skip
            output = 0 if _is_empty(said) else whole(said)
            if output_len is not None and _is_empty(said):
                output = output_len
        prompt_of = optional(record, columns.input) if columns.text else None
        if columns.input is not None and (columns.text is None or prompt_of is not None):
            said = field_of(record, columns.input)
            prompt = 0 if _is_empty(said) else whole(said)
        else:
            assert columns.text is not None
            prompt = tokens_of(field_of(record, columns.text))
        priority = optional(record, columns.priority)
        hashes = optional(record, columns.hashes) or ()
        if not isinstance(hashes, list | tuple) or any(type(n) is not int for n in hashes):
            raise TypeError("hash ids are no list of whole numbers")
        parent = session_of(optional(record, columns.parent))
        return Row(
            when,
            prompt,
            output,
            hashes,
            session,
            None if _is_empty(priority) else whole(priority),
            after,
            session_of(optional(record, columns.name)),
            "" if parent == "-1" else parent,
            [str(other) for other in optional(record, columns.joins) or ()],
        ), (optional(record, columns.status), optional(record, columns.model))

    return read


def _seconds(value: Any, divisor: float) -> float | None:
    return None if _is_empty(value) else float(value) / divisor


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or value != value


def tokens_of(text: str) -> int:
    """Return the tokens of a text, estimated from its bytes."""
    return -(-len(text.encode()) // TOKEN_BYTES)


def strict_whole(value: Any) -> int:
    """Return a JSON integer; raises TypeError."""
    if type(value) is not int:
        raise TypeError(f"{value!r:.30} is not a whole number")
    return value


def whole_number(value: Any) -> int:
    """Return a whole number, however it is written; raises ValueError, TypeError."""
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number")
    if type(value) is int:
        return value
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"could not convert {value!r:.40} to a number") from None
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def time_ns(unit: str, value: Any) -> int:
    """Return a time in ns; raises ValueError, TypeError or OverflowError."""
    if isinstance(value, bool):
        raise TypeError(f"time {value!r}")
    if unit != DATE:
        if isinstance(value, datetime | date):
            raise ValueError(f"{value} is a date: time= without a unit reads it")
        try:
            if unit == "ns" and isinstance(value, str | int):
                return scaled_ns(int(value), 1)
            return scaled_ns(float(value), UNITS_NS[unit])
        except ValueError:
            if isinstance(value, str) and is_date(value):
                text = f"{value!r:.40} is a date, no number: time= without a unit reads it"
                raise ValueError(text) from None
            raise ValueError(f"{value!r:.40} is not a time in {unit}") from None
    if isinstance(value, datetime):
        value = value.isoformat(sep=" ")
    try:
        return timestamp_ns(str(value))
    except ValueError:
        if is_number(value):
            text = f"time {value!s:.18} is a number: time_s= or time_ms= names its unit"
            raise ValueError(text) from None
        raise


def is_date(text: str) -> bool:
    """Whether a text is an ISO 8601 time."""
    try:
        timestamp_ns(text)
    except ValueError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Whether a value is a finite number or the text of one."""
    try:
        return not isinstance(value, bool) and abs(float(value)) < float("inf")
    except (TypeError, ValueError, OverflowError):
        return False


#: Names of columns, best first, without case and separators; then words that such names contain.
_PROMPT = ("inputtokens", "prompttokens", "inputlength", "promptlength", "promptlen", "inputlen",
           "numprefilltokens", "inputtoks", "numinputtokens", "numprompttokens", "contexttokens",
           "requesttokens", "numberinputtokens", "isl", "prefilltokens")  # fmt: skip
_ANSWER = ("outputtokens", "completiontokens", "outputlength", "completionlength", "outputlen",
           "numdecodetokens", "outputtoks", "numoutputtokens", "numcompletiontokens",
           "generatedtokens", "responsetokens", "numberoutputtokens", "osl",
           "decodetokens")  # fmt: skip
_PROMPT_WORDS = ("prompt", "input", "context", "prefill")
_ANSWER_WORDS = ("completion", "output", "generated", "response", "decode", "answer")
_TIME_WORDS = ("arriv", "timestamp", "start", "time", "created", "date", "sent", "received")
_NO_TIMES = ("end", "finish", "ttft", "latenc", "duration", "first", "last", "elapsed", "itl",
             "tpot", "complet", "think", "e2e", "wait", "queue", "deadline",
             "updated", "timeout", "inter", "gap", "delta", "delay", "since", "response time",
             "response_time")  # fmt: skip
_GAPS = re.compile(r"inter_?arrival|^iat(?![a-z])|arrival_?(?:gap|delta|interval|delay)", re.I)
#: Tokens that no row of requests has in the mean: such rows are sums.
_SUMS = 1_000_000
_NO_LENGTHS = ("cached", "cost", "price", "time", "rate", "throughput", "per", "reason", "image",
               "audio", "video", "id", "hash", "max", "text", "type", "char", "byte",
               "word")  # fmt: skip


def guessed_columns(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what ``--columns`` might say of a table; None where that gives no requests.

    ``names``: of its columns; ``records``: its first rows, on which the guess is tried. A unit
    that neither a name nor the size of a number tells stays ``time_UNIT``."""
    guesses = {
        "input": _length(names, records, _PROMPT, _PROMPT_WORDS),
        "output": _length(names, records, _ANSWER, _ANSWER_WORDS),
    }
    if None in guesses.values() or guesses["input"] == guesses["output"]:
        return None
    time = guessed_time(names, records)
    said = [] if time is None else ["=".join(time)]
    return ",".join([*said, *(f"{key}={name}" for key, name in guesses.items())])


def no_requests(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """Return why the rows of a table are no requests that columns could name; "" if they may be."""
    gaps = next((n for n in names if _GAPS.search(n.rpartition(".")[2])), None)
    if gaps is not None and guessed_time(names, records) is None:
        return f"gaps between requests ({gaps!r}), not times: their running sum says when"
    for words in (_PROMPT, _ANSWER), (_PROMPT_WORDS, _ANSWER_WORDS):
        for name in (_length(names, records, one, one) for one in words):
            values = [] if name is None else [float(v) for v in _values(records, name)]
            if values and sum(values) / len(values) >= _SUMS:
                return (
                    f"sums ({name!r}: {values[0]:,.0f} tokens), not requests: it is a usage export"
                )
    return ""


def parts_of_lengths(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """Return which column counts tokens beside those of the prompt or the answer; "" if none does.

    Anthropic's ``input_tokens`` leave out what its cache read or wrote; reasoning is a part of an
    answer (OpenAI's) unless some answer has fewer tokens."""
    for name in names:
        if re.search(r"cache_?(read|creation|write)", name, re.I) and any(_values(records, name)):
            return f"the prompt's tokens leave out {name!r}: their sum is its length"
    answer = _length(names, records, _ANSWER, _ANSWER_WORDS)
    for name in (n for n in names if answer and "reason" in _plain(n) and "token" in _plain(n)):
        pairs = zip(_values(records, name), _values(records, answer or ""), strict=False)
        if any(is_number(a) and float(a) > float(b) for a, b in pairs):
            return f"the answer's tokens leave out {name!r}: their sum is its length"
    return ""


def check_times(
    file: Path, columns: str | None, names: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> None:
    """Raise InputError where a table without times of its format has others, not in ``columns``."""
    if columns is not None and "time" in "".join(parse_columns(columns)):
        return
    if unread := unread_times(names, records):
        raise InputError(str(file), unread, "ISO 8601 times, or numbers")
    if (found := guessed_time(names, records)) is not None:
        problem = f"the format has no times in {found[1]!r}"
        raise InputError(str(file), problem, f"--columns {'='.join(found)}")


def unread_times(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """Return which column seems to hold times that cannot be read, and how it spells them."""
    if guessed_time(names, records) is not None:
        return ""
    for name in names:
        last = name.rpartition(".")[2].lower()
        values = _values(records, name)
        times = any(word in last for word in _TIME_WORDS) or last in ("day", "hour", "minute")
        if values and times and not any(word in last for word in _NO_TIMES):
            wrong = "in no known unit" if is_number(values[0]) else "neither ISO 8601 nor a number"
            return f"{name!r} holds {values[0]!r:.40}, which is {wrong}"
    return ""


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.rpartition(".")[2]).lower()


def _values(records: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    values = []
    for record in records:
        try:
            value = field_of(record, name)
        except KeyError:
            continue
        if not _is_empty(value):
            values.append(value)
    return values


def _length(
    names: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    exact: Sequence[str],
    words: Sequence[str],
) -> str | None:
    usable = []
    for name in names:
        values = _values(records, name)
        try:
            whole = [whole_number(value) for value in values]
        except (ValueError, TypeError, OverflowError):
            continue
        if whole and min(whole) >= 0 and max(whole) > 0 and names.count(name) == 1:
            usable.append(name)
    for wanted in exact:
        if (chosen := next((n for n in usable if _plain(n) == wanted), None)) is not None:
            return chosen
    fit = [
        name
        for name in usable
        if any(word in _plain(name) for word in words)
        and not any(word in _plain(name) for word in _NO_LENGTHS)
    ]
    return fit[0] if len(fit) == 1 else None


def guessed_time(
    names: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> tuple[str, str] | None:
    """Return the key and the column of the time; ``time_UNIT`` where nothing says the unit."""
    last = {name: name.rpartition(".")[2].lower() for name in names}
    fit = [name for name in names if not any(word in last[name] for word in _NO_TIMES)]
    short = {name: re.sub(r"[_\W](?:ns|us|ms|s)$", "", last[name]) for name in fit}
    plain = [name for name in fit if short[name] in ("ts", "t", "at", "when")]
    ranked = [n for word in _TIME_WORDS for n in fit if word in last[n]] + plain
    for name in dict.fromkeys(ranked):
        values = _values(records, name)
        if not values:
            continue
        if all(isinstance(v, datetime | date) or is_date(str(v)) for v in values):
            return "time", name
        if all(is_number(value) for value in values):
            unit = unit_of(name) or _unit_of_epoch([float(value) for value in values])
            return f"time_{unit or 'UNIT'}", name
        if any(is_number(value) or is_date(str(value)) for value in values):
            return "time_UNIT", name  # times, and something else
    return None


def _unit_of_epoch(values: Sequence[float]) -> str | None:
    """Return the unit in which numbers are times of 2010 to 2060, if they are in any."""
    for unit, ns in UNITS_NS.items():
        begin, end = (year * 1e9 / ns for year in (1.262e9, 2.84e9))
        if all(begin <= value <= end for value in values):
            return unit
    return None
