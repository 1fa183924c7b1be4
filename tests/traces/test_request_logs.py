"""Request logs: three formats against hand-written files and independent readings of real ones."""

import csv
import datetime
import json
from contextlib import suppress

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_columns import chain_blocks
from eldr_sim.traces.requests.logs.request_logs import known_log, read_request_log

from ..on_each import on_each
from ..paths import SHARED

REQUESTS = SHARED / "data" / "requests"


def shared_log(name):
    if not (REQUESTS / name).is_file():
        pytest.skip(f"{name} is not here")
    return REQUESTS / name


def write(tmp_path, text, name="log"):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_azure(tmp_path):
    log = read_request_log(
        write(
            tmp_path,
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
                "2023-11-16 18:15:46.6805900,374,44\r\n"
                "2023-11-16 18:15:50.9951691,396,109\r\n"
                "2023-11-16 18:15:51,5,0\r\n"
                "2023-11-16 18:16:00,7,1"
            ),
        )
    )
    assert log.format == "azure"
    assert log.arrival_s.tolist() == [0.0, 4.3145791, 13.31941]
    assert log.prompt_len.tolist() == [374, 396, 7]
    assert log.output_len.tolist() == [44, 109, 1]
    assert log.n_dropped == 1
    assert log.session.tolist() == [0, 1, 2]
    assert log.prefix_block_tokens == 0
    assert log.prefix_indptr.tolist() == [0, 0, 0, 0]


def test_azure_2024_writes_a_zone(tmp_path):
    log = read_request_log(
        write(
            tmp_path,
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\n"
                "2024-05-10 00:00:00.009930+00:00,2162,5\n"
                "2024-05-10 02:00:01+02:00,2399,6\n"
            ),
        )
    )
    assert log.arrival_s.tolist() == [0.0, 0.99007]


def test_burstgpt(tmp_path):
    log = read_request_log(
        write(
            tmp_path,
            (
                "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                "5,ChatGPT,472,18,490,Conversation log\n"
                "45.5,GPT-4,1087,230,1317,Conversation log\n"
                "118,ChatGPT,417,0,417,Conversation log\n"
            ),
        )
    )
    assert log.format == "burstgpt"
    assert log.arrival_s.tolist() == [0.0, 40.5]
    assert log.prompt_len.tolist() == [472, 1087]
    assert log.n_dropped == 1


BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log\n"
    "19440113.0,,2,ChatGPT,36,29,65,API log\n"
    "19440161.0,d5983bf9-4b48-497b-892b-a58995247443,2,ChatGPT,36,29,65,Conversation log\n"
    "19440192.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,8,GPT-4,1779,123,1902,Conversation log\n"
    "19440192.0,,1,ChatGPT,20,0,20,API log\n"
    "19440112.0,,3,ChatGPT,35,13,48,API log\n"
)


def test_burstgpt_sessions(tmp_path):
    """Rows of one conversation share a UUID, API requests have none; the last row comes second."""
    log = read_request_log(write(tmp_path, BURSTGPT_3))
    assert log.arrival_s.tolist() == [0.0, 2.0, 3.0, 51.0, 82.0]
    assert log.prompt_len.tolist() == [906, 35, 36, 36, 1779]
    assert log.session.tolist() == [0, 1, 2, 3, 0]
    assert log.n_dropped == 1


def test_mooncake(tmp_path):
    log = read_request_log(
        write(
            tmp_path,
            (
                '{"timestamp": 1000, "input_length": 513, "output_length": 5, "hash_ids": [7, 9]}\n'
                "\n"
                '{"timestamp": 2500, "input_length": 1024, "output_length": 6, '
                '"hash_ids": [7, 8]}\n'
            ),
        )
    )
    assert log.format == "mooncake"
    assert log.arrival_s.tolist() == [0.0, 1.5]
    assert log.prefix_block_tokens == 512
    assert log.prefix_hash.tolist() == [7, 9, 7, 8]
    assert log.prefix_indptr.tolist() == [0, 2, 4]


def test_a_text_stands_for_a_token_every_four_bytes_where_no_length_is_said(tmp_path):
    rows = (
        '{"timestamp": 0, "text_input": "caf\u00e9 au lait", "output_length": 5}\n'
        '{"timestamp": 1500, "text_input": "x", "input_length": 40, "output_length": 6}\n'
        '{"timestamp": 2500, "input_length": 50, "output_length": 7}\n'
    )
    log = read_request_log(write(tmp_path, rows))
    assert log.prompt_len.tolist() == [4, 40, 50]


def test_mooncake_with_full_blocks_of_16_and_timestamp_ms(tmp_path):
    hashes = list(range(2**64 - 3, 2**64))
    log = read_request_log(
        write(
            tmp_path,
            json.dumps(
                {"timestamp_ms": 46.927, "input_length": 63, "output_length": 1, "hash_ids": hashes}
            ),
        )
    )
    assert log.prefix_block_tokens == 16
    assert log.prefix_hash.tolist() == hashes


def test_mooncake_without_hashes(tmp_path):
    log = read_request_log(write(tmp_path, '{"timestamp":1,"input_length":2,"output_length":3}'))
    assert log.prefix_block_tokens == 0


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n"
MOONCAKE = '{"timestamp": 0, "input_length": 8, "output_length": 1}\n'


@on_each(
    "text, message",
    [
        ("", "unknown format, first line ''"),
        ("a,b,c\n1,2,3\n", "unknown format.*a, b, c.*trace formats"),
        (
            "timestamp,prompt_tokens,completion_tokens\n1,2,3\n",
            "--columns time_UNIT=timestamp,input=prompt_tokens,output=completion_tokens",
        ),
        (AZURE + "yesterday,1,1\n", "line 3: got 'yesterday,1,1'"),
        (AZURE + "2023-11-16 18:15:46,1.5,1\n", "line 3: got"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 3: got"),
        (AZURE + "2023-11-16 18:15:46,-1,1\n", "request 2: -1 prompt"),
        (AZURE + "2023-11-16 18:15:46,1,99999999999\n", "request 2: 1 prompt and 99999999999"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("Timestamp,Request tokens,Response tokens\nnan,1,1\n", "line 2: got 'nan,1,1'"),
        ("Timestamp,Request tokens,Response tokens\ninf,1,1\n", "line 2: got"),
        ("Timestamp,Request tokens,Response tokens\n1,1,0\n", "holds no request"),
        (MOONCAKE + "{oops\n", "line 2: got '{oops'"),
        (MOONCAKE + "[1]\n", "line 2: got"),
        (MOONCAKE + '{"timestamp": 0, "input_length": 8}\n', "line 2: got"),
        (MOONCAKE + '{"timestamp": 0, "input_length": "8", "output_length": 1}\n', "line 2: got"),
        (MOONCAKE + '{"timestamp": 0, "input_length": true, "output_length": 1}\n', "line 2: got"),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 8, "output_length": 1}\n', "line 2: got"),
        ('{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": 5}\n', "line 1: got"),
        (
            '{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": ["x"]}',
            "line 1: got",
        ),
        (
            '{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [-1]}',
            "a hash id or a number is out of range",
        ),
        (
            '{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5]}',
            "fit no block size",
        ),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_bad_file_is_told_in_one_line(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as caught:
        read_request_log(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_request_log(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="Is a directory"):
        read_request_log(tmp_path)


def test_real_azure_log():
    path = shared_log("azure2023_conv.csv")
    log = read_request_log(path)
    rows = list(csv.DictReader(path.open()))
    assert len(log.arrival_s) + log.n_dropped == len(rows) == 19_366
    times = [datetime.datetime.fromisoformat(r["TIMESTAMP"][:26]) for r in rows]
    first = min(times)
    seconds = sorted((t - first).total_seconds() for t in times)
    np.testing.assert_allclose(log.arrival_s, seconds, atol=2e-6)  # datetime drops 100 ns digits
    assert log.prompt_len.sum() == sum(int(r["ContextTokens"]) for r in rows)
    assert log.output_len.sum() == sum(int(r["GeneratedTokens"]) for r in rows)
    assert log.prompt_len.mean() == pytest.approx(1155, abs=0.5)
    assert log.output_len.mean() == pytest.approx(211, abs=0.5)
    assert len(log.arrival_s) / log.arrival_s[-1] == pytest.approx(5.5, abs=0.05)


def test_real_mooncake_log():
    log = read_request_log(shared_log("mooncake_conversation.jsonl"))
    assert len(log.arrival_s) == 12_031
    assert log.prefix_block_tokens == 512
    blocks = len(log.prefix_hash)
    assert 1 - len(np.unique(log.prefix_hash)) / blocks == pytest.approx(0.366, abs=0.001)
    assert (np.diff(log.prefix_indptr) == -(-log.prompt_len // 512)).all()


def test_real_small_block_log():
    log = read_request_log(shared_log("llmservingsim_sharegpt_300.jsonl"))
    assert len(log.arrival_s) == 300
    assert log.prefix_block_tokens == 16
    assert (np.diff(log.prefix_indptr) == log.prompt_len // 16).all()


@pytest.mark.parametrize(
    ("text", "priority"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens,priority\n2023-01-01 00:00:00,5,6,-2\n", [-2]),
        ("Timestamp,Request tokens,Response tokens,priority\n1,5,6,3\n", [3]),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 6, "priority": 7}\n'
            '{"timestamp": 1000, "input_length": 5, "output_length": 6}\n',
            [7, 0],
        ),
        ('{"timestamp": 0, "input_length": 5, "output_length": 6}\n', None),
    ],
)
def test_priorities(tmp_path, text, priority):
    found = read_request_log(write(tmp_path, text)).priority
    assert (None if found is None else found.tolist()) == priority


@pytest.mark.parametrize("given", ["1.5", '"high"', "true", str(2**40)])
def test_bad_priorities(tmp_path, given):
    line = f'{{"timestamp": 0, "input_length": 5, "output_length": 6, "priority": {given}}}'
    with pytest.raises(InputError):
        read_request_log(write(tmp_path, line))


# -- results of benchmarks, and tables with named columns -----------------------------------------


VLLM = {
    "backend": "vllm",
    "completed": 2,
    "total_input_tokens": 300,
    "input_lens": [100, 200, 150],
    "output_lens": [7, 9, 0],
    "start_times": [50.5, 50.25, 51.0],
    "ttfts": [0.1, 0.2, 0.0],
    "errors": ["", "", "refused"],
}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_result_of_vllm_bench(tmp_path, indent):
    log = read_request_log(write(tmp_path, json.dumps(VLLM, indent=indent)))
    assert log.format == "vllm bench"
    assert log.arrival_s.tolist() == [0.0, 0.25]
    assert log.prompt_len.tolist() == [200, 100]
    assert log.output_len.tolist() == [9, 7]
    assert log.n_dropped == 1


def test_an_older_result_of_vllm_bench_has_no_times(tmp_path):
    older = {key: value for key, value in VLLM.items() if key != "start_times"}
    log = read_request_log(write(tmp_path, json.dumps(older)))
    assert log.arrival_s.tolist() == [0.0, 0.0]
    assert log.prompt_len.tolist() == [100, 200]


def aiperf(start, prompt, output, **metadata):
    lengths = {"input_sequence_length": prompt, "output_sequence_length": output}
    return {
        "metadata": {"request_start_ns": start, "benchmark_phase": "profiling"} | metadata,
        "metrics": {k: {"value": v, "unit": "tokens"} for k, v in lengths.items() if v is not None},
        "error": None,
    }


def test_records_of_aiperf(tmp_path):
    records = [
        aiperf(1_000, 9, 9, benchmark_phase="warmup"),
        aiperf(2_000_000_000, 550, 62, conversation_id="a"),
        aiperf(2_500_000_000, 600, None, conversation_id="b"),
        aiperf(3_500_000_000, 700, 63.0, conversation_id="a"),
    ]
    log = read_request_log(write(tmp_path, "\n".join(map(json.dumps, records)) + "\n"))
    assert log.format == "aiperf"
    assert log.arrival_s.tolist() == [0.0, 1.5]
    assert log.prompt_len.tolist() == [550, 700]
    assert log.output_len.tolist() == [62, 63]
    assert log.session.tolist() == [0, 0]
    assert log.header.left_out == {"of the warm-up": 1, "without an answer": 1}
    assert (log.n_dropped, log.header.rows) == (2, 4)


def test_a_conversation_that_aiperf_sends_again_is_another_session(tmp_path):
    """``conversation_id`` is the data set's: x_correlation_id is who sends it."""
    records = [
        aiperf(number * 10**9, 550, 62, conversation_id="a", x_correlation_id=user)
        for number, user in enumerate("xyxz")
    ]
    log = read_request_log(write(tmp_path, "\n".join(map(json.dumps, records)) + "\n"))
    assert log.session.tolist() == [0, 1, 0, 2]
    assert log.parent.tolist() == [-1, -1, 0, -1]


def test_session_0_is_one_and_null_is_none(tmp_path):
    import pandas as pd

    lines = [
        {"timestamp": 1000 * i, "input_length": 9, "output_length": 2, "session_id": session}
        for i, session in enumerate([0, None, 0, None])
    ]
    path = tmp_path / "log"
    path.write_text("\n".join(map(json.dumps, lines)))
    columns = "time_ms=timestamp,input=input_length,output=output_length,session=session_id"
    assert read_request_log(path).session.tolist() == [0, 1, 0, 2]
    assert read_request_log(path, columns).session.tolist() == [0, 1, 0, 2]
    table = pd.DataFrame(lines).astype({"session_id": float})  # null is no number there
    table.to_parquet(path)
    assert read_request_log(path, columns).session.tolist() == [0, 1, 0, 2]


def test_sessions_beside_a_log_that_is_not_in_order_are_refused(tmp_path):
    path, sessions = tmp_path / "log", tmp_path / "sessions.csv"
    lines = [{"timestamp": at, "input_length": 9, "output_length": 2} for at in (5, 0, 2000)]
    path.write_text("\n".join(map(json.dumps, lines)))
    sessions.write_text("request,parent,gap_s\n2,0,1.5\n")
    with pytest.raises(InputError, match="not in order of arrival"):
        known_log(path, sessions=str(sessions))


def test_columns_of_any_table(tmp_path):
    import pandas as pd

    table = pd.DataFrame(
        {
            "started": [3.5, 1.0, 2.0],
            "in": [10, 20, 30],
            "out": [1, 2, 3],
            "user": ["x", "y", "x"],
            "importance": [0, 1, 2],
            "when": pd.to_datetime([1767225603500, 1767225601000, 1767225602000], unit="ms"),
        }
    )  # fmt: skip
    table.to_csv(tmp_path / "csv", index=False)
    table.to_parquet(tmp_path / "parquet")
    in_ms = table.assign(when=[1767225603500, 1767225601000, 1767225602000])
    (tmp_path / "json").write_text(in_ms.to_json(orient="records", lines=True))
    for name, times in (
        ("csv", ("time_s=started", "time=when")),
        ("parquet", ("time_s=started", "time=when")),
        ("json", ("time_s=started", "time_ms=when")),
    ):
        for time in times:
            columns = f"{time}, input=in, output=out, session=user, priority=importance"
            log = read_request_log(tmp_path / name, columns)
            assert log.arrival_s.tolist() == [0.0, 1.0, 2.5]
            assert log.prompt_len.tolist() == [20, 30, 10]
            assert log.output_len.tolist() == [2, 3, 1]
            assert log.session.tolist() == [0, 1, 1]
            assert log.priority.tolist() == [1, 2, 0]


@on_each(
    "text, columns, message",
    [
        ("a,b\n1,2\n", "input=a", "no output lengths (allowed: --output-len N"),
        ("a,b\n1,2\n", "input=a,output=c", "has no column 'c'"),
        ("a,b\n1,2\n", "input=a,output=b,inputs=a", "columns: 'inputs=a'"),
        ("a,b\n1,2\n", "input=a,output=b,time_s=a,time=b", "columns: more than one time column"),
        ("a,b\n1,2\n1,x\n", "input=a,output=b", "line 3: got '1,x' (could not convert 'x'"),
        ("a,b\n1,2\n1\n", "input=a,output=b", "line 3: got '1' (no 'b')"),
        ("a,b\n1.5,2\n", "input=a,output=b", "line 2: got '1.5,2' ('1.5' is not a whole number)"),
        ('{"a": 1, "b": 2}\n{"a": 1}\n', "input=a,output=b", "line 2: got '1' (no 'b')"),
        ("{]\n", "input=a,output=b", "JSON lines, or one"),
        ("PAR1x", "input=a,output=b", "no Parquet file"),
        (json.dumps(VLLM | {"output_lens": [1]}), None, "differ in length"),
        (json.dumps(VLLM) + "\n" + json.dumps(VLLM), None, "more than one result"),
        ('{"total_input_tokens": 3, "completed": 1}', None, "--save-detailed"),
        (json.dumps(VLLM | {"start_times": ["x", 1, 2]}), None, "request 0: got 100"),
        (json.dumps(aiperf("soon", 1, 2)), None, "line 1: got"),
    ],
)
def test_bad_tables_and_results(tmp_path, text, columns, message):
    with pytest.raises(InputError) as error:
        read_request_log(write(tmp_path, text), columns)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_time_that_is_a_number_needs_its_unit(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("t,i,o\n0.5,10,2\n1.5,10,2\n")
    with pytest.raises(InputError, match=r"time 0\.5 is a number: time_s= or time_ms="):
        read_request_log(log, columns="time=t,input=i,output=o")
    assert len(read_request_log(log, columns="time_s=t,input=i,output=o").arrival_s) == 2


def test_sessions_by_name_and_by_parent(tmp_path):
    lines = [
        {"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "type": "text", "turn": 1},
        {"chat_id": 9, "parent_chat_id": -1, "timestamp": 2.0, "type": "text", "turn": 1},
        {"chat_id": 12, "parent_chat_id": 7, "timestamp": 8.25, "type": "text", "turn": 2},
    ]
    path = tmp_path / "bailian.jsonl"
    lengths = {"input_length": 20, "output_length": 3, "hash_ids": [1, 2]}
    path.write_text("\n".join(json.dumps(line | lengths) for line in lines))
    log = read_request_log(path)
    assert (log.format, log.prefix_block_tokens) == ("bailian", 16)
    assert log.session.tolist() == [0, 1, 0]
    assert log.parent.tolist() == [-1, -1, 0]
    assert log.gaps(1000, 100).tolist() == [0, 0, 6.75 - 1.2]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "session_id": name, "delay": delay} | lengths)
            for at, name, delay in ((0, "a", None), (1000, "b", None), (2000, "a", 500))
        )
    )
    log = read_request_log(path)
    assert log.parent.tolist() == [-1, -1, 0]
    assert log.gaps(1000, 100)[2] == 0.5


def test_rows_that_wait_for_others(tmp_path):
    path = tmp_path / "agents.jsonl"
    rows = [("a", []), ("b", ["a"]), ("c", ["a"]), ("d", ["b", "c"])]
    lengths = {"input_length": 20, "output_length": 3, "hash_ids": [1, 2]}
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": 500 * at, "request_id": name, "wait_for": waits} | lengths)
            for at, (name, waits) in enumerate(rows)
        )
    )
    log = read_request_log(path)
    assert log.parent.tolist() == [-1, 0, 0, 2]
    assert log.joins.tolist() == [[3, 1]]
    assert len(set(log.session.tolist())) == 1


@pytest.mark.parametrize(
    "entry", [{"t": 0}, {"type": "subagent"}, 3, {"t": "x", "in": 4, "out": 1}]
)
def test_a_bad_session_of_an_agent_is_one_line(tmp_path, entry):
    path = tmp_path / "weka.json"
    good = {"t": 0.0, "in": 10, "out": 2, "hash_ids": [1]}
    path.write_text("\n".join(json.dumps({"requests": [one]}) for one in (good, entry)))
    with pytest.raises(InputError, match="session 2: has an unexpected form"):
        read_request_log(path)


def conversations(tmp_path, **changes):
    """Write what vLLM's multi-turn benchmark generates conversations from."""
    constant = {
        "num_turns": {"distribution": "constant", "value": 5},  # three requests
        "common_prefix_num_tokens": {"distribution": "constant", "value": 40},
        "prefix_num_tokens": {"distribution": "constant", "value": 30},
        "num_tokens": {"distribution": "constant", "value": 20},
    }
    path = tmp_path / "generate_multi_turn.json"
    made = {
        "filetype": "generate_conversations", "num_conversations": 2, "text_files": ["a.txt"],
        "prompt_input": constant | changes,
        "prompt_output": {"num_tokens": {"distribution": "constant", "value": 10}},
    }  # fmt: skip
    path.write_text(json.dumps(made, indent=4))
    return path


def test_vllms_conversations_are_sessions(tmp_path):
    log = read_request_log(conversations(tmp_path))
    assert log.format == "vllm conversations"
    assert log.prompt_len.tolist() == [90, 120, 150] * 2
    assert log.output_len.tolist() == [10] * 6
    assert log.session.tolist() == [0, 0, 0, 1, 1, 1]
    assert log.parent.tolist() == [-1, 0, 1, -1, 3, 4]
    assert (log.gaps(0.0, 0.0) == 0.0).all()
    assert log.prefix_block_tokens == 16
    blocks = np.split(log.prefix_hash, log.prefix_indptr[1:-1])
    assert (blocks[1][:6] == blocks[0]).all()
    assert (blocks[0][:2] == blocks[3][:2]).all()  # 40 common tokens: two whole blocks
    assert not set(blocks[0][2:]) & set(blocks[3][2:])


def test_vllms_conversations_are_drawn(tmp_path):
    drawn = {
        "num_turns": {"distribution": "uniform", "min": 12, "max": 18},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
        "num_tokens": {"distribution": "poisson", "alpha": 30, "max": 40},
    }
    text = conversations(tmp_path, **drawn).read_text().replace('s": 2,', 's": 2000,')
    path = tmp_path / "many.json"
    path.write_text(text)
    log = read_request_log(path)
    first = log.parent < 0
    turns = np.bincount(log.session)
    assert (turns.min(), turns.max()) == (6, 9)
    assert turns.mean() == pytest.approx(np.mean([6, 7, 7, 8, 8, 9, 9]), rel=0.02)
    assert log.prompt_len[first].mean() == pytest.approx(40 + 1000 + 30, rel=0.02)
    new = np.diff(log.prompt_len)[~first[1:]] - 10
    assert new.max() == 40
    assert new.mean() == pytest.approx(30, rel=0.02)


@pytest.mark.parametrize("turns", [{"distribution": "best"}, {"distribution": "constant"}, 5])
def test_bad_conversations_are_refused(tmp_path, turns):
    with pytest.raises(InputError, match="not conversations to generate"):
        read_request_log(conversations(tmp_path, num_turns=turns))


def multi_turn(tmp_path, *sessions):
    """Write a data set of AIPerf's."""
    path = tmp_path / "multi_turn.jsonl"
    path.write_text("\n".join(map(json.dumps, sessions)))
    return path


def test_aiperfs_turns_hold_what_was_said_before(tmp_path):
    system = {"role": "system", "text": "s" * 128}  # 32 tokens: two blocks
    path = multi_turn(
        tmp_path,
        {
            "session_id": "a",
            "turns": [
                system,
                {"text": "x" * 37, "output_length": 6},  # ten tokens, the last of one byte
                {"texts": ["y" * 40, {"contents": ["z" * 8]}], "output_length": 20, "delay": 1500},
            ],
        },
        {"turns": [system, {"text": "x" * 37}, {"text": "y" * 40}]},
        {"session_id": "a", "turns": [{"input_length": 7, "output_length": 4, "delay": 250}]},
    )
    log = read_request_log(path, output_len=6)
    assert log.format == "aiperf multi_turn"
    order = np.lexsort((log.prompt_len, log.session))
    assert log.session[order].tolist() == [0, 0, 0, 1, 1]
    assert log.prompt_len[order].tolist() == [42, 60, 87, 42, 58]
    assert log.output_len[order].tolist() == [6, 20, 4, 6, 6]
    assert log.after_end.all()
    assert log.gaps(1000.0, 1000.0)[order].tolist() == [0, 1.5, 0.25, 0, 0]
    parent = log.parent[order]
    assert (parent < 0).tolist() == [True, False, False, True, False]
    assert parent[[1, 2, 4]].tolist() == order[[0, 1, 3]].tolist()
    assert log.prefix_block_tokens == 16
    blocks = [log.prefix_hash[slice(*log.prefix_indptr[i : i + 2])].tolist() for i in order]
    assert blocks[0] == blocks[3]  # the same was said
    assert blocks[1][:2] == blocks[4][:2] == blocks[0][:2]
    assert not set(blocks[1][2:]) & set(blocks[4][2:])  # the answers are not the same
    assert blocks[2][:3] == blocks[1][:3]


def test_aiperfs_answers_are_not_taken_for_equal(tmp_path):
    """Where two sessions say the same, the first turn is found, and the answers are not."""
    turns = [{"text": "hello" * 20, "output_length": n} for n in (64, 64, 1)]
    log = read_request_log(multi_turn(tmp_path, {"turns": turns}, {"turns": turns}))
    chained = chain_blocks(log.prefix_hash, log.prefix_indptr)
    first, other = (
        [chained[slice(*log.prefix_indptr[i : i + 2])].tolist() for i in found]
        for found in (np.flatnonzero(log.session == k) for k in (0, 1))
    )
    assert first[0] == other[0]
    assert first[2][:1] == other[2][:1]
    assert not set(first[2][1:]) & set(other[2][1:])
    assert len(set(first[2])) == len(first[2])


def test_aiperfs_timestamps_are_arrivals(tmp_path):
    turns = [{"text": "hello", "output_length": 2, "timestamp": at} for at in (500, 2500.5)]
    log = read_request_log(multi_turn(tmp_path, {"turns": turns}))
    assert log.arrival_s.tolist() == [0.0, 2.0005]
    assert log.gaps(1000.0, 100.0).tolist() == [0.0, 0.9005]


@on_each(
    "turns, said",
    [
        ([{"text": "hi"}], "session line 1 has a turn without output_length"),
        ([{"text": "hi", "output_length": 0}], "has an unexpected form"),
        ([{"text": "hi", "output_length": 1, "delay": -1}], "has an unexpected form"),
        (
            [{"text": "hi", "output_length": 1, "delay": 1, "timestamp": 1}],
            "has an unexpected form",
        ),
        ([{"output_length": 1}], "has an unexpected form"),
        ([{"text": 3, "output_length": 1}], "has an unexpected form"),
        ([{"text": "hi", "image": "a.png", "output_length": 1}], "a turn holds image"),
        ([{"text": "hi", "output_length": 1, "timestamp": at} for at in (2, 1)], "descend"),
        ([], "no request"),
        ([7], "has an unexpected form"),
    ],
)
def test_bad_turns_of_aiperf_are_refused(tmp_path, turns, said):
    with pytest.raises(InputError, match=said):
        read_request_log(multi_turn(tmp_path, {"turns": turns}))


def test_a_report_of_guidellm(tmp_path):
    """Its requests in the order of their starts; a sweep has no one rate."""
    made = {"request_start_time": 1e9 + 2.5, "prompt_tokens": 30, "output_tokens": 4}
    rows = [made, made | {"request_start_time": 1e9, "prompt_tokens": 50}]
    benchmark = {"requests": {"successful": rows, "errored": [{}]}}
    (tmp_path / "log").write_text(json.dumps({"benchmarks": [benchmark]}, indent=1))
    log = read_request_log(tmp_path / "log")
    assert log.format == "guidellm"
    assert log.arrival_s.tolist() == [0.0, 2.5]
    assert log.prompt_len.tolist() == [50, 30]
    for benchmarks, said in (([benchmark] * 2, "2 benchmarks"), ([{}], "lacks requests")):
        (tmp_path / "log").write_text(json.dumps({"benchmarks": benchmarks}))
        with pytest.raises(InputError, match=said):
            read_request_log(tmp_path / "log")


def test_a_pause_is_in_the_unit_of_its_column(tmp_path):
    """Mooncake's and AIPerf's ``delay`` counts ms from the answer before."""
    row = {"input_length": 100, "output_length": 5, "session_id": "a"}
    file = tmp_path / "log.jsonl"
    rows = [row | {"timestamp": 0}, row | {"delay": 2500}, row | {"delay": 40}]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    log = read_request_log(file, time_unit="ms")
    assert log.gap_s.tolist() == [0.0, 2.5, 0.04]
    assert log.arrival_s.tolist() == [0.0, 2.5, 2.54]  # where they are sent as recorded
    assert log.after_end.tolist() == [False, True, True]


MOONCAKE = {"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0, 1]}
AIPERF = {
    "metadata": {"request_start_ns": 10**18},
    "metrics": {f"{name}_sequence_length": {"value": 5} for name in ("input", "output")},
}


@on_each(
    "whole",
    [
        "".join(json.dumps(MOONCAKE | {"timestamp": 1000 * i}) + "\n" for i in range(4)),
        (json.dumps(AIPERF) + "\n") * 3,
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "1.5,10,5\n2.5,11,6\n" * 2,
    ],
)
def test_a_log_that_is_cut_anywhere_is_read_or_refused_in_a_line(whole, tmp_path):
    file = tmp_path / ("log.jsonl" if whole[0] == "{" else "log.csv")
    for end in range(len(whole)):
        file.write_text(whole[:end])
        with suppress(InputError):
            read_request_log(file, time_unit=None if "metadata" in whole else "s")
