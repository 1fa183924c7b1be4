"""From the logs of an engine to tables and recorded runs.

The logs are written as the plug-ins write them, with times that follow a formula: the tables must
give the formula back.
"""

import json
import threading

import numpy as np
import pyarrow as pa
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture.step_log import Header, StepLog
from eldr_sim.validation.live.calibration.calibrate import (
    calibration_bursts,
    engine_tables,
    outside_times,
)
from eldr_sim.validation.live.calibration.engine_calibration import CalibrationInfo, model_of
from eldr_sim.validation.live.engine_log import read_complete_log, read_engine_log
from eldr_sim.validation.live.engines.load import domain_slices
from eldr_sim.validation.live.engines.plugin import FORCED_LEVELS
from eldr_sim.validation.live.engines.run_writer import steps_table
from eldr_sim.validation.live.live_run import REQUESTS

LAYERS, EXPERTS, TOP_K = 3, 16, 2
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def moe_s(tokens, distinct):
    """Seconds of one MoE layer."""
    return 1e-4 * distinct + 1e-5 * tokens


def attention_s(rows):
    """Seconds of attention of one layer."""
    pairs = [
        (start + count) ** 2 - start**2 if count > 1 else start + 1 for _, start, count in rows
    ]
    return 1e-6 * sum(pairs)


def rest_s(tokens, sequences):
    return 2e-3 + 1e-5 * tokens + 1e-4 * sequences


class FakeEngine:
    """Writes what the plug-ins of one engine would log."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True)
        header = Header("m", list(range(LAYERS)), LAYERS, EXPERTS, TOP_K, "fake", {})
        self.capture = StepLog(folder, header)
        about = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 16,
            "n_blocks": 99,
            "max_model_len": 512,
        }
        self.engine, self.worker = [{"engine": about}], []
        self.now = 100.0
        self.step_number = 0

    def receive(self, name, at):
        self.engine.append({"received": name, "at": at})

    def step(self, rows, distinct):
        """Run a step; returns its start and end."""
        tokens = sum(count for _, _, count in rows)
        ids = (np.arange(tokens * TOP_K) % distinct).reshape(tokens, 1, TOP_K)
        self.capture.step(rows, np.repeat(ids, LAYERS, axis=1), {})
        layer, attention = moe_s(tokens, min(distinct, tokens * TOP_K)), attention_s(rows)
        inside = LAYERS * (layer + attention)
        start, cycle = self.now, inside + rest_s(tokens, len(rows))
        end = start + cycle - 1e-4  # the rest passes before the next step starts
        counts = {name: count for name, _, count in rows}
        self.engine.append({"start": start, "end": end, "tokens": counts})
        self.worker.append(
            {
                "start": start,
                "end": start + inside,
                "moe": [layer] * LAYERS,
                "attention": [attention] * LAYERS,
            }
        )
        self.now += cycle
        return start, end

    def close(self):
        self.capture.close()
        for kind, lines in (("engine", self.engine), ("worker", self.worker)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.folder / f"{kind}-1.jsonl").write_text(text)


def burst(engine, name, requests, prompt, output):
    names = [f"cmpl-{name}-{i}-0-0123abcd" for i in range(requests)]
    level = engine.step_number
    chunks = [(at, min(64 // requests, prompt - at)) for at in range(0, prompt, 64 // requests)]
    for start, size in [*chunks, *((prompt + k, 1) for k in range(output - 1))]:
        distinct = round(TOP_K + (EXPERTS - TOP_K) * (level % FORCED_LEVELS) / (FORCED_LEVELS - 1))
        engine.step([(n, start, size) for n in names], distinct)
        level += 1
    engine.step_number = level
    engine.now += 1.0  # nothing to do until the next burst


@pytest.fixture(scope="module")
def calibration_log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live") / "engine"
    engine = FakeEngine(folder)
    for b in calibration_bursts(8, 64, 512):
        prompt = b.prompt_len if b.requests == 1 else min(b.prompt_len, 64 // b.requests)
        burst(engine, b.name, b.requests, prompt, b.output_len)
    engine.close()
    return read_engine_log(folder)


def test_bursts_cover_batches_levels_and_budget():
    bursts = calibration_bursts(24, 256, 1024)
    assert {b.requests for b in bursts if "decode-16-" in b.name} >= {1, 8, 24}
    assert all(b.prompt_len + b.output_len <= 1024 for b in bursts)
    prompts = [b for b in bursts if "prompt-" in b.name]
    assert max(b.prompt_len for b in prompts) == 768  # in three chunks
    sizes = {b.requests for b in bursts if "decode-16-" in b.name}
    for size in sizes:  # a size comes back in every round, so that no burst of drift has it all
        places = [i for i, b in enumerate(bursts) if b.name.startswith(f"forced-decode-16-{size}-")]
        assert len(places) == 4
        assert max(places) - min(places) > len(bursts) / 2
    assert len([b for b in prompts if b.prompt_len == 256]) == FORCED_LEVELS
    assert len({b.name for b in bursts}) == len(bursts)
    small = calibration_bursts(24, 256, 1024, kv_tokens=2048, block_size=64)
    assert all(b.requests * -(-(b.prompt_len + b.output_len) // 64) <= 32 for b in small)


def test_tables_give_the_times_of_the_engine_back(calibration_log):
    found, drift = engine_tables(calibration_log, model_of(CONFIG), "cpu", "vllm 0", {})
    assert drift is None  # these logs have no probe
    tables = {table.metadata.kind: table for table in found}
    assert set(tables) == {"moe", "attention_decode", "attention_prefill", "engine_step"}
    moe = tables["moe"].columns
    assert set(moe["routing"]) == {"forced"}
    assert len(np.unique(moe["distinct_experts"][moe["batch"] == 8])) == FORCED_LEVELS
    points = zip(moe["batch"], moe["distinct_experts"], strict=True)
    np.testing.assert_allclose(moe["latency_s"], [moe_s(b, d) for b, d in points])
    step = tables["engine_step"].columns
    np.testing.assert_allclose(
        step["latency_s"],
        [rest_s(t, s) for t, s in zip(step["tokens"], step["sequences"], strict=True)],
        rtol=1e-6,
    )
    prefill = tables["attention_prefill"].columns
    whole_s = 1e-6 * prefill["batch"] * prefill["new_tokens"] ** 2
    chunks = -(-prefill["batch"] * prefill["new_tokens"] // 64)
    assert chunks.max() == 6
    # The simulator adds the smallest call to every chunk but the first.
    np.testing.assert_allclose(
        prefill["latency_s"], whole_s - (chunks - 1) * whole_s.min(), rtol=1e-9
    )


def test_cycles_end_where_the_engine_had_nothing_to_do(calibration_log):
    cycles = calibration_log.cycles_s()
    n_bursts = len(calibration_bursts(8, 64, 512))
    assert np.isnan(cycles).sum() == n_bursts  # the last step of each
    assert np.nanmax(cycles) < 1.0


def test_times_outside_the_steps_come_back(tmp_path):
    prefill, decode = FakeEngine(tmp_path / "p"), FakeEngine(tmp_path / "d")
    ingress, handoff, wait, egress = 3e-3, 7e-3, 11e-3, 1e-3
    rows = []
    for i, n in enumerate((16, 32, 64) * 2):
        name = f"cmpl-unloaded-{i}-0-0123abcd"
        sent = prefill.now
        prefill.receive(name, sent + ingress)
        prefill.now += ingress
        _, end = prefill.step([(name, 0, n)], 8)
        received = end + handoff
        decode.receive(name, received)
        decode.now = received + wait
        steps = [decode.step([(name, n - 1 + k, 1)], 2) for k in range(4)]
        following = [start for start, _ in steps[1:]] + [decode.now]
        token_s = [start + egress for start in following]
        rows.append(
            {
                "request_id": f"unloaded-{i}",
                "domain": "",
                "prompt_len": n,
                "output_len": 4,
                "sent_s": sent,
                "token_s": token_s,
            }
        )
        prefill.now = decode.now + 1.0
    prefill.close()
    decode.close()
    requests = pa.Table.from_pylist(rows, schema=REQUESTS)
    logs = {"prefill0": read_engine_log(prefill.folder), "decode0": read_engine_log(decode.folder)}
    model = model_of(CONFIG)
    info = outside_times(
        requests,
        logs,
        ["prefill0"],
        False,
        model,
        lambda: ({(4096, 1): 1e-5, (65536, 16): 1e-4, (131072, 16): 2e-4, (8192, 2): 2e-5}, "test"),
    )
    assert isinstance(info, CalibrationInfo)
    assert info.ingress_s.of(64) == pytest.approx(ingress, rel=1e-6)
    assert info.handoff_s.of(64) == pytest.approx(handoff, rel=1e-6)
    assert info.egress_s == pytest.approx(egress, rel=1e-6)
    moved = info.transfer.descriptor_s * 6 + 16 * model.kv_bytes_per_token / info.transfer.bandwidth
    assert info.transfer.setup_s + 2 * moved == pytest.approx(wait, rel=1e-6)  # the median prompt


def test_steps_of_a_run_leave_those_of_others_out(calibration_log):
    rows = {f"forced-decode-16-8-0-{i}": i for i in range(8)}
    table = steps_table({"engine0": calibration_log}, rows, 100.0)
    assert 0 < table.num_rows < len(calibration_log.steps)
    assert {tuple(r) for r in table["request"].to_pylist()} == {tuple(range(8))}
    assert table["tokens"].to_pylist()[1] == [1] * 8
    assert table["start_s"].to_pylist() == sorted(table["start_s"].to_pylist())


def test_logs_of_different_steps_are_refused(tmp_path):
    engine = FakeEngine(tmp_path / "e")
    for k in range(4):
        engine.step([("cmpl-a-0-0123abcd", k, 1)], 2)
    del engine.engine[2:4]
    engine.close()
    with pytest.raises(InputError, match="logged 2, 4 and 4 steps"):
        read_engine_log(engine.folder)
    with pytest.raises(InputError, match="holds 0"):
        read_engine_log(tmp_path)


def test_a_line_cut_off_is_left_out(tmp_path):
    engine = FakeEngine(tmp_path / "e")
    for k in range(4):
        engine.step([("cmpl-a-0-0123abcd", k, 1)], 2)
    engine.close()
    file = engine.folder / "worker-1.jsonl"
    file.write_text(file.read_text()[:-9])
    assert len(read_engine_log(engine.folder).steps) == 3


@pytest.mark.parametrize("late", ["engine", "worker"])
def test_a_log_is_read_when_it_holds_every_last_token(tmp_path, late):
    """The client has its last token before a process of the engine logs the step that made it."""
    engine = FakeEngine(tmp_path / "e")
    engine.step([("cmpl-a-0-0123abcd", 0, 5), ("cmpl-b-0-0123abcd", 0, 5)], 2)
    for k in range(3):
        engine.step([("cmpl-a-0-0123abcd", 5 + k, 1), ("cmpl-b-0-0123abcd", 5 + k, 1)], 2)
    engine.close()
    file = engine.folder / f"{late}-1.jsonl"
    whole = file.read_text()
    file.write_text(whole[: whole.rstrip().rindex("\n") + 20])  # in the midst of its last line
    computed = {"a": 8, "b": 8}
    assert len(read_engine_log(engine.folder).steps) == 3
    writer = threading.Timer(0.3, lambda: file.write_text(whole))
    writer.start()
    assert len(read_complete_log(engine.folder, computed, limit_s=5.0).steps) == 4
    writer.join()
    with pytest.raises(InputError, match="1 of 3 requests have no end here, such as c") as error:
        read_complete_log(engine.folder, computed | {"c": 8}, limit_s=0.2)
    assert "\n" not in str(error.value)


def test_domains_cut_the_vocabulary_into_slices():
    slices = domain_slices(2048)
    assert sum(stop - first for first, stop in slices.values()) <= 2044
    ids = [i for first, stop in slices.values() for i in range(first, stop)]
    assert len(ids) == len(set(ids))
    assert min(ids) == 4
