"""Storms of a few seeds; `make chaos` runs many. Each job comes out as if nothing had happened."""

import pytest

from tests.chaos.storm import DEADLINE_S, KINDS, NETWORKS, PROCESSES, draw, stormy

NUM_FAULTS = 12
SEEDS = [1, 8]  # 8 is `bounded`


@pytest.fixture(scope="module")
def sky(tmp_path_factory):
    with stormy(tmp_path_factory.mktemp("storm")) as sky:
        yield sky


@pytest.mark.timeout(DEADLINE_S + 200)
@pytest.mark.parametrize("seed", SEEDS)
def test_job_in_a_storm_is_as_if_nothing_had_happened(sky, seed):
    strikes = sky.storm(seed, NUM_FAULTS)
    assert sum(strike.has_struck for strike in strikes) > NUM_FAULTS / 2


def test_these_storms_have_all_kinds_and_targets():
    faults = [fault for seed in SEEDS for fault in draw(seed, NUM_FAULTS)]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.target for fault in faults} == {*PROCESSES, *NETWORKS}
