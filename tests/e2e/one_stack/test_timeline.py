"""The timeline and the stream of a real local stack: lanes of several processes on one clock."""

from itertools import groupby, pairwise

import pytest

from onbeat.contracts.intervals import total_s
from onbeat.terminal.report import make_report

SLACK_S = 0.5  # clocks, and how long a process may be kept from telling what it has measured


@pytest.fixture(scope="module")
def timeline(stack, finished):
    return stack.client.jobs.timeline(finished.id, iterations=finished.num_iterations)


def test_trainer_works_between_commits_on_groups_that_arrived(stack, finished, timeline):
    rounding_s = 0.01  # rounding of the trainer's spans
    records = stack.client.jobs.iterations(finished.id)
    assert timeline.iterations == list(range(finished.num_iterations))
    for record in records:
        spans = [s for s in timeline.spans if s.lane == "trainer" and s.iteration == record.iteration]
        before = record.committed_at - record.wall_s
        assert all(before - SLACK_S <= s.start <= s.end <= record.committed_at + SLACK_S for s in spans)
        assert all(earlier.end <= later.start + rounding_s for earlier, later in pairwise(spans))
        steps = [kind for kind, _ in groupby(s.kind for s in spans if s.kind != "wait")]
        assert steps == ["checkpoint"] * (record.iteration > 0) + ["micro_batch", "optimizer", "publish"]
        assert "wait" in {s.kind for s in spans}
        first_trained = min(s.start for s in spans if s.kind == "micro_batch")
        assert first_trained >= record.first_accepted_at - SLACK_S
        trained_s = sum(s.end - s.start for s in spans if s.kind in ("micro_batch", "optimizer"))
        measured_s = record.metrics["train/micro_batches_s"] + record.metrics["train/step_s"]  # around the spans
        assert measured_s - 0.2 <= trained_s <= measured_s + rounding_s


def test_rollout_generates_between_the_hand_overs_of_weights(stack, finished, timeline):
    (worker,) = [lane.id for lane in timeline.lanes if lane.id != "trainer"]
    spans = [s for s in timeline.spans if s.lane == worker]
    loads = {s.iteration: s for s in spans if s.kind == "load"}
    pulls = {s.iteration: s for s in spans if s.kind == "pull"}
    for record in stack.client.jobs.iterations(finished.id):
        generated = [s for s in spans if s.kind == "generate" and s.iteration == record.iteration]
        assert {s.group_id for s in generated} == {f"{record.iteration}-{i}" for i in range(record.num_groups)}
        if record.policy_version in loads:
            assert min(s.start for s in generated) >= loads[record.policy_version].end - SLACK_S
    assert loads.keys() >= set(range(1, finished.num_iterations))
    for version, load in loads.items():
        if version > 0:  # the first one was pulled before the timeline begins
            assert pulls[version].start <= pulls[version].end <= load.end
    idle = {lane.id: lane.idle_frac for lane in timeline.lanes}
    busy_s = (1 - idle[worker]) * (timeline.end - timeline.start)
    reported_s = sum((1 - r.rollout_idle_frac) * r.wall_s for r in stack.client.jobs.iterations(finished.id))
    assert busy_s == pytest.approx(reported_s, rel=0.1, abs=SLACK_S)  # as the rollout has measured it


def test_overlap_is_that_of_the_spans(stack, finished, timeline):
    """The records keep a share; the timeline shows the same seconds, from the groups themselves."""
    records = stack.client.jobs.iterations(finished.id)
    assert all(0 <= record.overlap_frac <= 1 for record in records)
    seconds = 0.0
    for record in records:
        generated = [
            (s.start, s.end) for s in timeline.spans if s.kind == "generate" and s.iteration == record.iteration
        ]
        seconds += record.overlap_frac * total_s(generated)
    assert sum(end - start for start, end in timeline.both_work) == pytest.approx(seconds, abs=0.1)
    assert stack.job(finished.id).sharing in ("cores", "nothing")
    assert timeline.overlap


def test_the_adviser_speaks_by_the_report_of_the_same_run(stack, finished, timeline):
    records, job = stack.client.jobs.iterations(finished.id), stack.job(finished.id)
    assert timeline.advice is not None
    assert timeline.advice == make_report(job, records)["advice"]
