"""Latency tables of whole engine steps: the additive fit, and step times that rest on it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.kernel_latency import EngineStepLatency
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import (
    LatencyTable,
    TableMetadata,
    engine_step_shape,
    load_table,
    table_name,
)

from ..step_times import fixed_s

DECODES = [(b, b) for b in (1, 2, 4, 8, 16, 32)]
PROMPTS = [(64, 1), (128, 1), (128, 4), (256, 2), (512, 1), (512, 8)]
QWEN = load_model("Qwen3-30B-A3B")


def engine_table(points, latency):
    tokens, sequences = (np.array(column) for column in zip(*points, strict=True))
    metadata = TableMetadata(
        kind="engine_step",
        gpu="H100",
        shape=engine_step_shape(QWEN.n_layers, QWEN.hidden_size, QWEN.vocab_size),
        dtype="bfloat16",
        kernel_source="engine",
        framework="vllm 0.32.0",
        provenance="measured",
        origin="a formula",
        device="test",
    )
    columns = {"tokens": tokens, "sequences": sequences}
    return LatencyTable(metadata, columns | {"latency_s": np.asarray(latency)})


def whole(fitted, tokens, sequences):
    return fitted.token_part_s(tokens) + fitted.sequence_part_s(sequences)


@given(
    base=st.floats(1e-4, 1e-2),
    token=st.floats(1e-7, 1e-4),
    sequence=st.floats(0, 1e-3),
    bend=st.floats(1.0, 3.0),
)
def test_additive_rows_are_recovered(base, token, sequence, bend):
    """The curve of the tokens bends at 128, a knot."""

    def truth(tokens, sequences):
        return base + token * (tokens + (bend - 1) * max(tokens - 128, 0)) + sequence * sequences

    fitted = EngineStepLatency.from_table(
        engine_table(DECODES + PROMPTS, [truth(*p) for p in DECODES + PROMPTS])
    )
    assert fitted.fit_error["rows_max"] < 1e-6
    mixed = [(70, 5), (144, 16), (300, 1), (600, 32)]  # no rows: 600 tokens lie past the last
    for point in mixed:
        assert whole(fitted, *point) == pytest.approx(truth(*point), rel=1e-6)
    assert fitted.sequence_part_s(0) == 0.0


def test_noise_stays_in_the_fit_error_and_curves_rise():
    rng = np.random.default_rng(0)
    points = DECODES + PROMPTS
    exact = np.array([2e-3 + 2e-5 * t + 1e-4 * s for t, s in points])
    noisy = exact * (1 + 0.03 * rng.standard_normal(len(points)))
    fitted = EngineStepLatency.from_table(engine_table(points, noisy))
    assert 0.0 < fitted.fit_error["rows_mean"] <= fitted.fit_error["rows_max"] < 0.1
    assert (np.diff(fitted.token_part_s(np.arange(1000))) >= 0).all()
    assert (np.diff(fitted.sequence_part_s(np.arange(64))) >= 0).all()
    for point, seconds in zip(points, exact, strict=True):
        assert whole(fitted, *point) == pytest.approx(seconds, rel=0.1)


def test_rows_of_many_repeats_count_more():
    points = [*DECODES, *PROMPTS, (65, 1)]
    exact = np.array([2e-3 + 2e-5 * t + 1e-4 * s for t, s in points])
    exact[-1] *= 0.8  # one token more than the row before, and disturbed
    table = engine_table(points, exact)
    often = {"repeats": np.array([100] * (len(points) - 1) + [1])}
    weighted = EngineStepLatency.from_table(LatencyTable(table.metadata, table.columns | often))
    plain = EngineStepLatency.from_table(table)
    truth = exact[points.index((64, 1))]
    assert abs(whole(weighted, 64, 1) - truth) < 0.1 * abs(whole(plain, 64, 1) - truth)


def test_rows_of_decodes_alone_are_refused():
    with pytest.raises(InputError, match="the cost of a token"):
        EngineStepLatency.from_table(engine_table(DECODES, np.ones(len(DECODES))))


def test_a_table_of_engine_steps_stands_for_all_but_moe_and_attention(tmp_path):
    def truth(tokens, sequences):
        return 3e-3 + 1e-6 * tokens + 5e-5 * sequences

    points = DECODES + PROMPTS
    table = engine_table(points, [truth(*p) for p in points])
    table.save(tmp_path / table_name(table.metadata))
    table = load_table(tmp_path / table_name(table.metadata))
    sizes = {"max_num_seqs": 32, "max_model_len": 2048, "max_num_batched_tokens": 512}
    plain = build_step_time_model(QWEN, "H100", **sizes)
    model = build_step_time_model(QWEN, "H100", tables=[table], **sizes)
    assert fixed_s(model)[0] == 0.0
    batches = np.arange(1, 33)
    np.testing.assert_allclose(fixed_s(model)[1:], truth(batches, batches), rtol=1e-6)
    assert (model.cost.moe_s == plain.cost.moe_s).all()
    assert (model.cost.attention_s == plain.cost.attention_s).all()
    chunks = [(0, 200), (50, 100)]
    prompts, beside = model.parts(chunks=chunks), plain.parts(chunks=chunks)
    assert (prompts.moe, prompts.attention) == (beside.moe, beside.attention)
    assert prompts.dense + prompts.head == pytest.approx(truth(300, 2))
    assert prompts.collectives == prompts.host == 0.0
    mixed = model.parts(7, 700, chunks)
    assert mixed.dense + mixed.head == pytest.approx(truth(307, 9))
    assert set(model.provenance) == {"moe", "attention", "engine_step"}
    assert model.provenance["engine_step"]["fit_error"]["rows_max"] < 1e-6
    with pytest.raises(InputError, match="host_gap_s"):
        build_step_time_model(QWEN, "H100", tables=[table], host_gap_s=1e-3, **sizes)


def test_known_experts_replace_the_expected_ones():
    model = build_step_time_model(
        QWEN, "H100", max_num_seqs=8, max_model_len=2048, max_num_batched_tokens=512,
    )  # fmt: skip
    expected = model.prefill_s([300], [0])
    few, many = (model.prefill_s([300], [0], [d] * QWEN.n_moe_layers) for d in (8, 128))
    assert few < expected <= many * (1 + 1e-9)
    assert many == pytest.approx(expected, rel=1e-3)  # 300 tokens touch nearly all experts
