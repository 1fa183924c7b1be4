"""The joint study's arithmetic on made-up figures, and that every run of it can be configured."""

import itertools

import pytest

from eldr_sim.planning.studies.figures import Runner, write_reproduction
from eldr_sim.simulator.setup.config.run_config import make_config
from studies.metro.locality import locality


class Multiplied(Runner):
    """Figures in which policy and redundancy have effects that multiply, and seeds their luck."""

    def __init__(self):
        self.configs = []

    def run(self, cases):
        configs = [make_config(case) for case in cases]
        self.configs += configs
        return [self.summary(config) for config in configs]

    def summary(self, config):
        routed = 0.9 if config.policies.policy != "jsq" else 1.0
        spread = 1.05 if config.pool("decode").num_redundant_experts else 1.0
        value = (10 + config.requests.seed) * routed * spread
        return {
            "mean_busiest_rank_experts_per_step": value,
            "median_tpot_ms": value,
            "p99_tpot_ms": value,
            "mean_decode_batch": 8.0,
            "mean_active_experts_per_step": 100.0,
            "group": {"mean_moe_ms": value, "mean_busy_engines": 8.0},
        }


@pytest.mark.parametrize("quick", [False, True])
def test_differences_are_paired_and_the_interaction_is_what_the_parts_leave(tmp_path, quick):
    runner = Multiplied()
    found = locality(runner, quick)
    names = [name for name in found.table.column_names if "interaction" in name]
    rows = found.table.to_pylist()
    for row in rows:
        routed = 0.9 if row["policy"] != "jsq" else 1.0
        spread = 1.0 if "no redundancy" in row["redundancy"] else 1.05
        percent = 100 * (routed * spread - 1)
        ends = [row[f"moe_ms_percent{end}"] for end in ("", "_low", "_high")]
        assert ends == pytest.approx([percent] * 3)
        if row["moe_ms_interaction"] is not None:
            left = 100 * (routed - 1) * (spread - 1)
            assert [row[name] for name in names] == pytest.approx([left] * 6)
    assert any(row["moe_ms_interaction"] is not None for row in rows)
    asked = [config.model_dump_json() for config in runner.configs]
    assert len(set(asked)) == len(asked)
    write_reproduction(tmp_path, found)
    assert (tmp_path / "beyond_locality.png").stat().st_size > 1000


def test_redundancy_is_an_eighth_of_the_experts():
    runner = Multiplied()
    locality(runner)
    sizes = {c.pool("decode").num_redundant_experts for c in runner.configs}
    assert sizes == {0, 16}
    seeds = [c.requests.seed for c in itertools.islice(runner.configs, 5)]
    assert seeds == [0, 1, 2, 3, 4]
