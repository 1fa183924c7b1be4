"""Published Mixtral runs: their requests are read as recorded, prompts repeat."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from eldr_sim.errors import InputError
from eldr_sim.validation.published.mixtral import (
    BLOCK,
    mixtral_rows,
    predict_mixtral,
    read_requests,
    repeating_workload,
)
from eldr_sim.validation.published.predictions import errors_of
from eldr_sim.validation.published.silicon import Form


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"arrival_time_us": 250_000 * i, "input_tokens": 40 + i % 100, "output_tokens": 3}
        for i in range(120)
    ]
    rows += [{**rows[-1], "arrival_time_us": 700_000_000}]
    (tmp_path / "1-mixtral-8x7b-general.json").write_text(json.dumps({"requests": rows}))
    (tmp_path / "1-mixtral-8x7b-general_ground_truth.json").write_text("[]")
    return tmp_path


def test_requests_are_those_of_the_file(folder):
    arrival, prompt, output = read_requests(folder, "general")
    assert arrival[[0, 1, -1]].tolist() == [0.0, 0.25, 700.0]
    assert (prompt[3], output[3]) == (43, 3)


@pytest.mark.parametrize("text", ["[]", '{"requests": [{}]}', "no"])
def test_what_is_no_such_file_is_one_line(folder, text):
    with pytest.raises(InputError, match="no requests of the load codegen"):
        read_requests(folder, "codegen")
    (folder / "mixtral-codegen.json").write_text(text)
    with pytest.raises(InputError, match=r"mixtral-codegen\.json"):
        read_requests(folder, "codegen")


def test_every_hundredth_prompt_is_the_same(folder):
    workload = repeating_workload(read_requests(folder, "general"))
    blocks = [workload.blocks(i) for i in range(len(workload))]
    assert [len(b) for b in blocks] == (workload.prompt_len // BLOCK).tolist()
    assert blocks[7].tolist() == blocks[107].tolist()
    different = np.concatenate(blocks[:100])
    assert len(np.unique(different)) == len(different)


def test_a_warm_cache_shortens_ttft_and_measurements_do_not_matter(folder):
    """The second stage is one request whose prompt is known; the first one's are not."""
    runs = [r for r in mixtral_rows() if r.case[1:3] == (2, "general")]
    other = [replace(r, measured=dict.fromkeys(r.measured, 1.0)) for r in runs]
    form = Form(routing="uniform", frontend=None)
    once, again = (predict_mixtral(folder, r, form=form) for r in (runs, other))
    assert once["predicted_ms"].to_pylist() == again["predicted_ms"].to_pylist()
    ttft = [r["predicted_ms"] for r in once.to_pylist() if r["metric"] == "ttft"]
    assert ttft[1] < ttft[0]


def test_median_errors_by_hand():
    rows = [
        {"metric": "ttft", "error": e, "blis_trained_error": -2 * e, "blis_evolved_error": 7.0,
         "blis_roofline_error": 50.0, "llm_optimizer_error": -90.0}
        for e in (-1.0, 4.0, -3.0)
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows)
    names = ("error", "blis_trained_error", "blis_evolved_error", "blis_roofline_error")
    medians = [errors_of(table, column=name)[0].median for name in names]
    assert medians == [3.0, 6.0, 7.0, 50.0]


def test_every_stage_has_its_figures():
    rows = mixtral_rows()
    assert len({row.case for row in rows}) == len(rows) == 12
    for row in rows:
        assert list(row.measured) == ["ttft", "tpot", "e2e"]
        assert all(list(other) == list(row.measured) for other in row.others.values())
