"""One storm with all kinds of faults; `make chaos` runs many. The job comes out as if nothing had happened."""

import pytest

from tests.chaos.storm import DEADLINE_S, KINDS, NETWORKS, PROCESSES, draw, stormy

SEED, NUM_FAULTS = 23, 14  # a `bounded` job


@pytest.mark.timeout(DEADLINE_S + 200)
def test_job_in_a_storm_is_as_if_nothing_had_happened(tmp_path):
    faults = draw(SEED, NUM_FAULTS)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.target for fault in faults} == {*PROCESSES, *NETWORKS}
    with stormy(tmp_path) as sky:
        strikes = sky.storm(SEED, NUM_FAULTS)
    assert sum(strike.has_struck for strike in strikes) > NUM_FAULTS / 2
