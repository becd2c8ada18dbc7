"""The feed of the only replica: what it waits for, and how long."""

from types import SimpleNamespace

import pytest

from onbeat.contracts.errors import JobFailed
from services.trainer import feed as feeds
from services.trainer.batch import cost
from services.trainer.feed import GroupFeed
from services.trainer.job.interface import Stopped
from tests.trainer_fixtures import RecordedJob, job_config, make_group, recorded_iterations, train

IDS = ["0-0", "0-1", "0-2", "0-3"]


class SlowJob(RecordedJob):
    """Groups come only to a reader that waits for them, one at a time; `num_empty`: waits in vain before the next."""

    num_empty = 0

    def take(self, count, timeout_s):
        if timeout_s < 0.5 or self.num_empty > 0:
            self.num_empty -= timeout_s >= 0.5
            return []
        self._is_pause = False
        return super().take(count, timeout_s)


def feed_of(monkeypatch, mode="periodic", deadline_s=0.2, **options):
    monkeypatch.setattr(feeds, "BROKER_FIRST_S", 0.0)
    config = job_config(schedule={"mode": mode, "iteration_deadline_s": deadline_s, "num_iterations": 1})
    job = SlowJob(config, recorded_iterations(1), **options)
    return job, GroupFeed(job, config).micro_batches(0, IDS)


def ids(groups):
    return [group.group_id for group in groups]


def test_repeated_micro_batches_take_no_time_from_the_deadline(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(feeds, "time", SimpleNamespace(monotonic=lambda: now_s))
    job, micro_batches = feed_of(monkeypatch, micro_batches={0: [["0-0"]]})
    assert ids(next(micro_batches)) == ["0-0"]
    now_s += 0.3  # the pass takes longer than the deadline
    job.num_empty = 1
    assert ids(next(micro_batches)) == ["0-1"]


def test_no_group_for_longer_than_the_deadline_fails_the_job(monkeypatch):
    job, micro_batches = feed_of(monkeypatch, deadline_s=0.01)
    job.num_empty = 10**6
    with pytest.raises(JobFailed, match="iteration 0: no group arrived for 0 s, 4 are missing"):
        next(micro_batches)


@pytest.mark.parametrize("mode", ["periodic", "sync"])
def test_stop_is_noticed_while_groups_keep_coming(mode, monkeypatch):
    job, micro_batches = feed_of(monkeypatch, mode)

    def stop():
        raise Stopped("this process was asked to stop")

    job.check = stop
    with pytest.raises(Stopped):
        list(micro_batches)
    assert not job.is_drained(0)


@pytest.mark.parametrize("num_updates", [1, 2])
def test_sync_trains_nothing_before_all_groups_are_there(num_updates, tmp_path):
    class WatchedJob(RecordedJob):
        was_drained = ()

        def record_micro_batch(self, iteration, group_ids):
            self.was_drained += (self.is_drained(iteration),)
            return super().record_micro_batch(iteration, group_ids)

    updates = {"num_updates_per_iteration": num_updates}
    config = job_config(schedule={"mode": "sync", "num_iterations": 2}, training=updates)
    _, job = train(config, [], tmp_path, job=WatchedJob(config, recorded_iterations(2)))
    assert job.was_drained == (True,) * 2 * num_updates


def test_deliveries_of_a_predecessor_are_read_in_their_turn(monkeypatch):
    monkeypatch.setattr(feeds, "LOOK_AGAIN_S", 1e9)
    monkeypatch.setattr(feeds, "BROKER_FIRST_S", 0.0)
    config = job_config(schedule={"num_iterations": 2, "iteration_deadline_s": 0.2})
    job, asked = RecordedJob(config, recorded_iterations(2)), []

    def accepted(iteration, known=()):
        asked.append(iteration)
        return [group for group in recorded_iterations(2) if group.iteration == iteration]

    monkeypatch.setattr(job, "num_opened", lambda: 2)
    monkeypatch.setattr(job, "accepted", accepted)
    monkeypatch.setattr(job, "take", lambda count, timeout_s: [])
    feed = GroupFeed(job, config)
    for iteration in range(2):
        wanted = [group_id.replace("0-", f"{iteration}-") for group_id in IDS]
        assert [group_id for groups in feed.micro_batches(iteration, wanted) for group_id in ids(groups)] == wanted
        assert asked == list(range(iteration + 1))


def test_groups_that_wait_are_not_counted_again_and_again(monkeypatch):
    calls, num_groups = [], 60
    config = job_config(training={"max_tokens_per_micro_batch": 40})
    groups = [make_group(f"0-{index}", 10, (10, 10, 10)) for index in range(num_groups)]
    job = RecordedJob(config, groups)
    deliveries = iter([groups[:-1]])  # the last group comes when all others are trained
    monkeypatch.setattr(job, "take", lambda count, timeout_s: groups if timeout_s == 0.5 else next(deliveries, []))
    monkeypatch.setattr(feeds, "cost", lambda *arguments: calls.append(1) or cost(*arguments))
    micro_batches = GroupFeed(job, config).micro_batches(0, [group.group_id for group in groups])
    assert len(list(micro_batches)) == num_groups
    assert len(calls) < 5 * num_groups
