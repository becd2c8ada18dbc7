"""Every order of calls in a small job keeps the rules; and each rule is seen to break when a script is broken.

Larger bounds: `python -m tests.model`.
"""

from collections.abc import Iterator

import pytest
import redis

from tests.conftest import own_redis
from tests.model.bounds import SMALL, Bounds
from tests.model.search import Search

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """Run a separate Redis, where jobs are taken out and put back."""
    with own_redis(tmp_path_factory.mktemp("model")) as url:
        yield redis.Redis.from_url(url)


@pytest.mark.parametrize("name", list(SMALL))
def test_every_order_of_calls_keeps_the_rules(client: redis.Redis, name: str) -> None:
    report = Search(client, SMALL[name]).run()
    assert not report.violation, str(report)
    assert report.num_ended > 0, str(report)


# Each mutant is a text to take out of the scripts, bounds that are enough to notice it, and the violation.
LEASE = "if not pending[1] or pending[1][2] ~= worker or ledger ~= 'waiting:' .. entry then"
ONE_WORKER = Bounds(num_workers=1)
MUTANTS = {
    "a group is accepted twice": (
        {"if string.sub(ledger, 1, 9) == 'accepted:' then": "if false then", LEASE: "if false then"},
        ONE_WORKER,
        "submit",
    ),
    "a group is accepted without its lease": ({LEASE: "if false then"}, Bounds(), "was accepted from"),
    "tokens of any version are accepted": (
        {"(failure == '' and span_versions ~= version)": "false"},
        ONE_WORKER,
        "is of versions",
    ),
    "an accepted prompt stays in the stream": (
        {"redis.call('XDEL', prompts, entry)": ""},
        ONE_WORKER,
        "still has prompts",
    ),
    "an accepted prompt stays claimed": (
        {"redis.call('XACK', prompts, consumers, entry)\nredis.call('XDEL'": "redis.call('XDEL'"},
        ONE_WORKER,
        "still has prompts",
    ),
    "a group that counts is replaced": (
        {"has_signal == '0' and": ""},
        Bounds(num_workers=1, num_spares=2, num_iterations=1),
        "were not replaced",
    ),
    "a group is replaced from another source": (
        {
            "redis.call('LPOS', spares, source)": "redis.call('LLEN', spares) - 2",
            "'LREM', spares, 1, source": "'LLEN', spares",
        },
        Bounds(num_sources=2, num_spares=2, num_workers=1, num_trainers=1, num_iterations=1, num_faults=0),
        "brought",
    ),
    "a solved source takes the prompts of another one": (
        {"if not place then return nil end": "if not place then place = redis.call('LLEN', spares) - 2 end"},
        Bounds(num_sources=2, num_spares=3, num_trainers=1, num_iterations=1, num_faults=0),
        "brought",
    ),
    "an iteration ends without the group that replaces one": (
        {"redis.call('HINCRBY', unit, 'num_groups', 1)": ""},
        Bounds(num_workers=1, num_spares=1, num_iterations=1),
        "has 3 groups, not 2",
    ),
    "an iteration opens again": (
        {"if field('num_opened') ~= iteration then": "if false then"},
        Bounds(num_workers=1, num_brokers=2),
        "open_iteration",
    ),
    "an iteration opens on an outdated version": (
        {"if field('policy_version') ~= version then": "if false then"},
        Bounds(max_staleness=1, num_workers=1),
        "opened on version 0, published is 1",
    ),
    "a zombie commits": (
        {"if not is_owner(epoch) or (state": "if (state"},
        ONE_WORKER,
        "fenced off, and changed something",
    ),
    "a zombie acknowledges": (
        {"if not is_owner(epoch) then return nil end\nfor _, groups": "for _, groups"},
        ONE_WORKER,
        "fenced off, and changed something",
    ),
    "a commit is not repeatable": (
        {"if tonumber(field('next_iteration')) >= next_iteration then": "if false then"},
        ONE_WORKER,
        "is open",
    ),
    "a group is granted to two ranks": (
        {"if redis.call('SADD', taken, group_id) == 1 then": "redis.call('SADD', taken, group_id) do"},
        Bounds(num_ranks=2, num_workers=1, num_faults=0),
        "granted twice",
    ),
    "a micro-batch is not repeatable": (
        {"if recorded then return string.match(recorded, '|(.*)') end": ""},
        ONE_WORKER,
        "when the call was repeated",
    ),
    "a living trainer is robbed": (
        {"is_owned and tonumber(field('lease_until') or '0') < tonumber(time)": "is_owned"},
        ONE_WORKER,
        "claimed from a living trainer",
    ),
    "a job moves on from its end": (
        {"if allowed_state == current then": "if allowed_state == current or current == 'SUCCEEDED' then"},
        SMALL["users"],
        "the job moved from",
    ),
    "a dead worker's prompts are never taken over": (
        {"worker, lease_ms, cursor": "worker, 1e15, cursor"},
        Bounds(num_workers=1, num_iterations=1),
        "cannot end any more",
    ),
    "a dead trainer's job is never taken over": (
        {"if not (is_pending or is_orphan) then return nil end": "if not is_pending then return nil end"},
        Bounds(num_workers=1, num_iterations=1),
        "cannot end any more",
    ),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_script_is_caught_with_the_way_to_it(client: redis.Redis, name: str) -> None:
    changes, bounds, expected = MUTANTS[name]
    left = dict(changes)

    def mutate(script: str) -> str:
        for old in changes:
            if old in script:
                script = script.replace(old, changes[old])
                left.pop(old, None)
        return script

    report = Search(client, bounds, mutate).run()
    assert not left, f"no script has {list(left)} any more: change the mutant"
    assert expected in report.violation, str(report)
    assert report.trace
