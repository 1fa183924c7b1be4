"""Files of strangers give the right load or one refusal, never a load that is silently another."""

import gzip
import json
import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import offered_load
from eldr_sim.simulator.setup.config.log_part import log_of
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.load_shapes import load_shape
from eldr_sim.traces.requests.logs.formats import known_formats
from eldr_sim.traces.requests.logs.log_columns import Columns, joined
from eldr_sim.traces.requests.logs.log_header import header_in_words
from eldr_sim.traces.requests.logs.log_rows import Row
from eldr_sim.traces.requests.logs.request_logs import read_request_log

from ..on_each import on_each
from .odd_logs import odd_log


def differs(odd, log):
    """Return how the load that was read differs from the file's, or nothing."""
    answered = [i for i, (_, output) in enumerate(odd.lengths) if output]
    if len(log.arrival_s) != len(answered):
        return f"{len(log.arrival_s)} requests of {len(answered)}"
    if log.header.rows != len(odd.lengths) or log.n_dropped != len(odd.lengths) - len(answered):
        return f"{log.header.rows} rows, {log.n_dropped} left out"
    when = np.sort([odd.when_s[i] for i in answered])
    span = float(log.arrival_s[-1])
    if log.timed != odd.timed:
        return f"timed: {log.timed}"
    if odd.timed and abs(span - (when[-1] - when[0])) > odd.rounded_s + 1e-6:
        return f"{span} s, not {when[-1] - when[0]}"
    prompts, outputs = (sum(odd.lengths[i][k] for i in answered) for k in (0, 1))
    if (int(log.prompt_len.sum()), int(log.output_len.sum())) != (prompts, outputs):
        return "other lengths"
    return ""


def judged(odd):
    """Return what is wrong with how a file is read, or nothing, and whether it was read."""
    try:
        log = read_request_log(odd.path, **odd.options)
    except InputError as error:
        if "\n" in str(error):
            return f"not one line: {error}", False
        if odd.must_read:
            return f"refused: {error}", False
        hint = re.search(r"--columns (\S+=[^;)]+)", str(error))
        if odd.options or hint is None or "NAME" in hint[1] or "UNIT" in hint[1]:
            return "", False
        try:
            log = read_request_log(odd.path, columns=hint[1].strip())
        except InputError as second:
            bad = not odd.must_refuse
            return (f"the hint {hint[1]} is refused: {second}" if bad else ""), False
        return (f"the hint {hint[1]} gives {differs(odd, log)}" if differs(odd, log) else ""), True
    if odd.must_refuse:
        return f"read: {log.header}", True
    if "called" in odd.what and log.header.notes:
        return "", True  # a unit that the user says wrongly is doubted aloud
    return differs(odd, log), True


@pytest.mark.parametrize(
    ("cases", "seed"), [(400, 1), pytest.param(20_000, 2, marks=pytest.mark.slow)]
)
def test_a_strangers_file_gives_the_right_load_or_one_refusal(cases, seed, tmp_path):
    """Of 400 files, more than half are read."""
    faults, read = [], 0
    for number in range(cases):
        odd = odd_log(seed, number, tmp_path)
        wrong, was_read = judged(odd)
        read += was_read
        if wrong:
            faults.append((number, odd.what, wrong))
    assert faults == []
    assert read > 0.4 * cases


@on_each("known", known_formats())
def test_the_example_of_a_format_is_read_or_refused_by_name(known, tmp_path):
    path = tmp_path / "example"
    path.write_text(known.example)
    if known.use == "workload":
        log = read_request_log(path)
        assert (log.format, len(log.arrival_s) > 0) == (known.name, True)
        return
    with pytest.raises(InputError) as refused:
        read_request_log(path)
    assert "\n" not in str(refused.value)
    if known.use == "load":
        assert load_shape(str(path)).mean > 0
    else:
        assert known.way in str(refused.value)


def test_rates_of_counts_and_of_prometheus(tmp_path):
    usage = tmp_path / "usage.csv"
    usage.write_text("start_time,end_time,num_model_requests,input_tokens\n"
                     "1715299200,1715302800,3600,9\n1715306400,1715310000,7200,9\n")  # fmt: skip
    shape = load_shape(str(usage))
    assert shape.rates.tolist() == [1.0, 0.0, 2.0]
    assert shape.edges_s.tolist() == [0.0, 3600.0, 7200.0, 10800.0]
    answer = tmp_path / "prometheus.json"
    series = {"metric": {"__name__": "vllm:request_success_total"},
              "values": [[100, "5"], [160, "65"], [220, "30"]]}  # fmt: skip
    answer.write_text(
        json.dumps({"status": "success", "data": {"resultType": "matrix", "result": [series]}})
    )
    assert load_shape(str(answer)).rates.tolist() == [1.0, 0.5]


def test_rows_of_one_step_of_time_add_up(tmp_path):
    """A row a model: the requests of an hour are those of its rows, and its length is an hour."""
    usage = tmp_path / "usage.csv"
    rows = [(0, 1800), (0, 1800), (3600, 7200), (3600, 0)]
    text = "".join(f"{1715299200 + at},{1715302800 + at},{n}\n" for at, n in rows)
    usage.write_text("start_time,end_time,num_model_requests\n" + text)
    shape = load_shape(str(usage))
    assert shape.edges_s.tolist() == [0.0, 3600.0, 7200.0]
    assert shape.rates.tolist() == [1.0, 2.0]


@on_each("named, given", product(("s", "ms", "us", "ns"), repeat=2))
def test_dates_in_another_unit_than_named_are_doubted(named, given, tmp_path_factory):
    """An hour of dates in seconds that is read as milliseconds is a fair load, and 1,000 times as
    fast; a log that begins at 0 has no dates."""
    scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[given]
    file = tmp_path_factory.mktemp("dates") / "log.csv"

    def notes(begin):
        rows = "".join(f"{(begin + 60 * i) * scale},90,{9 + i % 2}\n" for i in range(60))
        file.write_text("sent,isl,osl\n" + rows)
        try:
            log = read_request_log(file, columns=f"time_{named}=sent,input=isl,output=osl")
        except InputError as error:
            return str(error)
        return " ".join(log.header.notes)

    said = notes(1_793_696_400)
    doubted = "'sent' in" in said or "is it in" in said or "is not a time" in said
    assert doubted == (named != given), said
    assert "holds dates" not in notes(0)


def test_times_that_are_all_the_same_are_doubted(tmp_path):
    """A column of durations was read as arrivals, all at once, without a word."""
    (tmp_path / "log.csv").write_text("took,isl,osl\n" + "300,90,9\n" * 30)
    log = read_request_log(tmp_path / "log.csv", columns="time_ms=took,input=isl,output=osl")
    assert "all requests come at once: does 'took' say" in " ".join(log.header.notes)
    with pytest.raises(InputError, match="'isl' is input and output"):
        read_request_log(tmp_path / "log.csv", columns="time_ms=took,input=isl,output=isl")


def test_a_log_longer_than_a_month_asks_for_its_unit(tmp_path):
    """Mooncake's ``timestamp`` has its unit by custom alone; a column's name may say it."""
    step = 40 * 86_400_000 // 400
    rows = [{"timestamp": i * step, "input_length": 90, "output_length": 9} for i in range(401)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"spans 40 days .*--time-unit"):
        read_request_log(tmp_path / "log.jsonl")
    text = "".join(f"{i * step},90,9\n" for i in range(401))
    (tmp_path / "log.csv").write_text("sent_ms,isl,osl\n" + text)
    columns = "time_ms=sent_ms,input=isl,output=osl"
    notes = " ".join(read_request_log(tmp_path / "log.csv", columns=columns).header.notes)
    assert "spans 40 days: is 'sent_ms' in ms?" in notes


def test_blocks_are_read_alike_by_arrow_and_row_by_row(tmp_path, monkeypatch):
    """Small blocks, of which some hold a row that Arrow cannot read: the same log."""
    from eldr_sim.traces.requests.logs import table_files

    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{i % 60:02d}.5,{100 + i},{1 + i % 7}" for i in range(200)]
    plain = tmp_path / "plain.csv"
    plain.write_text("\n".join(lines))
    lines[77] = lines[77].replace(".5,", ".500000000Z,").replace(",", " , ", 1)
    odd = tmp_path / "odd.csv"
    odd.write_text("\n".join(lines))
    with monkeypatch.context() as arrow_alone:  # which reads what is plain
        arrow_alone.delattr(table_files, "rows_of")
        whole = read_request_log(plain)
    monkeypatch.setattr(table_files, "BLOCK", 500)
    for path in (plain, odd):
        log = read_request_log(path)
        for name in ("arrival_s", "prompt_len", "output_len", "session"):
            np.testing.assert_array_equal(getattr(log, name), getattr(whole, name))
    lines[150] = "2023-11-16 18:15:00,x,1"
    odd.write_text("\n".join(lines))
    with pytest.raises(InputError, match="line 151: got '2023-11-16 18:15:00,x,1'"):
        read_request_log(odd)


_ROWS = st.builds(
    Row,
    when_ns=st.integers(0, 9),
    prompt=st.integers(1, 9),
    output=st.integers(0, 9),
    hashes=st.lists(st.integers(0, 9), max_size=2),
    priority=st.none() | st.integers(0, 3),
    session=st.sampled_from(["", "", "a", "b"]),
    name=st.sampled_from(["", "", "x", "y"]),
    parent=st.sampled_from(["", "x"]),
    after_s=st.none(),
    joins=st.just(()),
)


@given(st.lists(st.lists(_ROWS, max_size=3), min_size=1, max_size=4))
def test_parts_of_a_log_join_to_the_whole(parts):
    """Whatever the rows of one part have and those of another have not."""
    whole = Columns.of_rows([row for part in parts for row in part])
    both = joined([Columns.of_rows(part) for part in parts])
    assert both.links == whole.links
    for name in ("when_ns", "prompt", "output", "hashes", "blocks", "priority"):
        np.testing.assert_array_equal(getattr(both, name), getattr(whole, name), name)


def test_the_unit_of_a_logs_times_holds_for_its_rate_too(tmp_path):
    rows = [{"timestamp": i / 2, "input_length": 9, "output_length": 2} for i in range(120)]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match="--time-unit"):
        load_shape(str(path))
    assert load_shape(str(path), "s").rates.tolist() == [2.0]


def test_a_results_own_limit_and_rate_are_its_load(tmp_path):
    lens = {"input_lens": [100] * 40, "output_lens": [5] * 40, "completed": 40}
    path = tmp_path / "result.json"
    fields = {"workload": str(path), "topology": "1C", "model": "Llama-3.1-8B"}
    path.write_text(json.dumps(lens | {"request_rate": "inf", "max_concurrency": 3}))
    with pytest.raises(InputError, match="--max-concurrency 3"):
        log_of(make_config(fields).requests, "recorded")
    assert log_of(make_config(fields | {"max_concurrency": 5}).requests, "recorded") is not None
    path.write_text(json.dumps(lens | {"request_rate": 4.0, "max_concurrency": None}))
    log = log_of(make_config(fields).requests, "recorded")
    assert log is not None
    assert log.header.times == "drawn at its request rate of 4/s"
    assert 39 / log.arrival_s[-1] == pytest.approx(4.0, rel=0.2)
    path.write_text(json.dumps([{"number_input_tokens": 9, "number_output_tokens": 3}] * 4))
    with pytest.raises(InputError, match="request_rate: missing"):
        offered_load(make_config(fields), None)
    workload, _ = offered_load(make_config(fields | {"request_rate": 2.0}), None)
    assert 3 / workload.arrival_s[-1] == pytest.approx(2.0)


def table(header, row, n=20):
    return header + "\n" + "".join(",".join(map(str, row(i))) + "\n" for i in range(n))


#: Files whose rows are no requests, or whose times are none; what must be said, and what must not.
MISLEADING = {
    "gaps": (table("inter_arrival_s,isl,osl", lambda i: (0.5, 90, 9)), "gaps between", "time_s="),
    "iat": (table("IAT,prompt,output", lambda i: (0.5, 90, 9)), "gaps between", "time_s="),
    "means": (
        table("timestamp,avg_input_tokens,mean_output_tokens,request_count",
              lambda i: (1767225600 + 60 * i, 400, 100, 30)),
        "--input-len 400 --output-len 100", "--columns",
    ),
    "daily sums": (
        table("day,total_prompt_tokens,total_completion_tokens",
              lambda i: (f"2026-10-{i + 1:02d}", 10_000_000, 1_000_000)),
        "sums ('total_prompt_tokens': 10,000,000 tokens)", "--columns",
    ),
    "European dates": (
        table("date,isl,osl", lambda i: (f"28/11/2026 10:00:{i:02d}", 90, 9)),
        "'date' holds '28/11/2026 10:00:00', which is neither ISO 8601 nor a number", "time",
    ),
    "time of day": (
        table("time,isl,osl", lambda i: (f"10:00:{i:02d}.5", 90, 9)), "'10:00:00.5'", "time_",
    ),
    "minutes": (
        table("minute,isl,osl", lambda i: (i / 7, 90, 9)),
        "'0.0', which is in no known unit", "time_s",
    ),
    "two columns of a name": (
        table("time_s,isl,osl,isl", lambda i: (i, 90, 9, 70)), "unknown format", "input=isl",
    ),
    "times beside a known format's lengths": (
        table("time,input_length,output_length", lambda i: (f"03/01/2026 10:{i:02d}:00 AM", 90, 9)),
        "'time' holds '03/01/2026 10:00:00 AM', which is neither", "request_rate",
    ),
    "other times beside a known format's lengths": (
        table("sent_s,input_length,output_length", lambda i: (i / 7, 90, 9)),
        "--columns time_s=sent_s", "request_rate",
    ),
    "characters": (
        table("time_s,prompt_chars,answer_chars", lambda i: (i, 900, 90)), "=NAME", "=prompt_c",
    ),
    "bytes": (
        table("time_s,input_bytes,output_bytes", lambda i: (i, 900, 90)), "=NAME", "=input_b",
    ),
    "prompts without what a cache read": (
        table("time_s,input_tokens,output_tokens,cache_read_input_tokens",
              lambda i: (i, 20, 90, 4000)),
        "leave out 'cache_read_input_tokens'", "input=",
    ),
    "answers without their reasoning": (
        table("time_s,input_tokens,output_tokens,reasoning_tokens", lambda i: (i, 200, 90, 900)),
        "leave out 'reasoning_tokens'", "output=",
    ),
}  # fmt: skip


@on_each("name", MISLEADING)
def test_a_refusal_does_not_lead_to_a_wrong_load(name, tmp_path):
    text, said, unsaid = MISLEADING[name]
    file = tmp_path / "log.csv"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read_request_log(file)
    allowed = f"{refused.value.problem} ({refused.value.allowed})"
    assert said in allowed
    assert unsaid not in allowed


def test_lengths_are_read_however_a_table_spells_whole_numbers(tmp_path):
    """Spreadsheets and pandas write 300.0."""
    file = tmp_path / "log.csv"
    file.write_text(table("timestamp,input_length,output_length", lambda i: (i, "90.0", "9.0")))
    assert read_request_log(file, time_unit="s").prompt_len.tolist() == [90] * 20


@pytest.mark.parametrize("columns", ["time_s=inter_arrival_s,input=isl,output=osl"])
def test_gaps_are_no_times_even_if_named(columns, tmp_path):
    (tmp_path / "log.csv").write_text(MISLEADING["gaps"][0])
    with pytest.raises(InputError, match="gaps between requests"):
        read_request_log(tmp_path / "log.csv", columns=columns)


@pytest.mark.parametrize("name", ["minute", "arrival_minutes", "startHour", "day", "t_min"])
@pytest.mark.parametrize("unit", ["s", "ms"])
def test_a_column_of_minutes_or_more_has_no_finer_unit(name, unit, tmp_path):
    (tmp_path / "log.csv").write_text(f"{name},isl,osl\n" + "".join(f"{i},9,9\n" for i in range(9)))
    with pytest.raises(InputError, match=r"but the name says (?i:min|hour|day)") as said:
        read_request_log(tmp_path / "log.csv", columns=f"time_{unit}={name},input=isl,output=osl")
    assert "in s, ms, us or ns" in str(said.value)


def test_a_name_of_two_columns_is_ambiguous(tmp_path):
    (tmp_path / "log.csv").write_text(MISLEADING["two columns of a name"][0])
    with pytest.raises(InputError, match="has 2 columns 'isl'"):
        read_request_log(tmp_path / "log.csv", columns="time_s=time_s,input=isl,output=osl")


def test_names_may_hold_dots(tmp_path):
    """OpenTelemetry's attributes: a nested object whose names have dots in them."""
    rows = [
        {"startTimeUnixNano": str(1_767_225_600_000_000_000 + 10**9 * i),
         "attributes": {"gen_ai.usage.input_tokens": 90 + i, "gen_ai.usage.output_tokens": 9}}
        for i in range(20)
    ]  # fmt: skip
    file = tmp_path / "spans.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError) as refused:
        read_request_log(file)
    columns = refused.value.allowed.split("--columns ")[1].partition(";")[0]
    log = read_request_log(file, columns=columns)
    assert log.prompt_len.tolist() == [90 + i for i in range(20)]
    assert log.arrival_s[-1] - log.arrival_s[0] == pytest.approx(19.0)


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        pytest.param(gzip.compress(b"a"), "gunzip", id="gzip"),
        pytest.param("a,b".encode("utf-16"), "UTF-16", id="utf-16"),
        pytest.param(b"PK\x03\x04\xff", "Excel", id="zip"),
    ],
)
def test_packed_files_are_named(begin, said, tmp_path):
    (tmp_path / "log.csv").write_bytes(begin)
    with pytest.raises(InputError, match=said):
        read_request_log(tmp_path / "log.csv")


#: Files of other tools that hold a field by which a format was once taken to be known.
OTHERS = {
    "genai-perf": {"experiments": [{"requests": [{"timestamp": 1, "response_timestamps": [2]}]}]},
    "requests": {"requests": [{"id": 1, "arrival": 0.5, "prompt_len": 90, "output_len": 9}]},
    "pytest-benchmark": {"machine_info": {}, "benchmarks": [{"name": "a", "stats": {"mean": 1.0}}]},
    "completions": {"id": "a", "metadata": {"user": "x"}, "prompt": "hello", "created": 1719000000},
    "mt-bench": {"question_id": 81, "turns": ["Compose a post.", "Rewrite it."]},
    "questions": {"id": "a", "turns": [{"question": "x", "answer": "y"}]},
    "usage": {"date": "2026-01-01", "total_input_tokens": 1000, "total_output_tokens": 100},
    "counts": {"name": "a", "num_requests": 100, "median_ms": 4.0},
    "prompts": {"data": [{"payload": [{"model": "m", "messages": []}]}]},
    "throughput": {"elapsed_time": 10.0, "num_requests": 100, "requests_per_second": 10.0},
}
_TOOLS = ("weka", "aiperf", "genai-perf", "guidellm", "mooncake", "usage export", "vllm")
_NAMED = {"genai-perf": {"genai-perf", "aiperf"}, "prompts": {"genai-perf", "aiperf"},
          "throughput": {"vllm"}}  # fmt: skip


@on_each("suffix", ["json", "jsonl"])
@on_each("name", OTHERS)
def test_a_refusal_names_no_other_format(name, suffix, tmp_path):
    """A file is refused by its own name, or as unknown, never as a bad file of another tool."""
    lines = 1 if suffix == "json" or name in _NAMED else 2
    file = tmp_path / f"a.{suffix}"
    file.write_text((json.dumps(OTHERS[name]) + "\n") * lines)
    with pytest.raises(InputError) as refused:
        read_request_log(file)
    said = str(refused.value).replace(str(file), "").lower()
    assert {tool for tool in _TOOLS if tool in said} == _NAMED.get(name, set())


@pytest.mark.parametrize(
    ("lengths", "n_blocks", "size"),
    [
        pytest.param([20], 3, None, id="fits 8 by chance"),
        pytest.param([20, 23, 17], 3, None, id="few lengths fit 8"),
        pytest.param([20, 600], 3, None, id="fits nothing"),
        pytest.param([1100, 1500], 3, 512, id="512"),
        pytest.param([40, 44], 3, 16, id="16"),
        pytest.param([17, 18, 19, 20, 21], 3, 8, id="many lengths fit 8"),
    ],
)
def test_ids_of_blocks_fit_their_prompts_or_are_refused(lengths, n_blocks, size, tmp_path):
    """The size of the blocks is said; malformed ids do not become prefixes that are shared."""
    rows = [
        {
            "timestamp": 1000 * i,
            "input_length": n,
            "output_length": 5,
            "hash_ids": [*range(n_blocks)],
        }
        for i, n in enumerate(lengths)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if size is None:
        with pytest.raises(InputError, match=r"hash_ids fit .*, e\.g\. 3 of"):
            read_request_log(tmp_path / "a.jsonl")
        return
    header = read_request_log(tmp_path / "a.jsonl").header
    assert f"prefix blocks of {size} tokens" in header_in_words(header.as_dict())
