"""A job that starts from the checkpoint of another one: which may, and that readers begin at its first iteration."""

import json
from pathlib import Path

import httpx
import pytest

from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.auditor import run_audit
from tests.waiting import eventually
from tests.world import LEASE_S, World, job_body

FIRST = 2


async def parent_of(broker: httpx.AsyncClient, ledger: Ledger, folder: Path, *kept: int) -> str:
    """Start a job that has written checkpoints and keeps them, and return its id."""
    job_id = str((await broker.post("/v1/jobs", json=job_body())).json()["id"])
    epoch = await World(ledger).start_training(job_id)
    for number in kept:
        path = folder / "checkpoints" / f"iteration-{number:06d}"
        path.mkdir(parents=True)
        (path / "state.json").touch()
        await ledger.trainer.checkpointed(job_id, epoch, 0, number, str(path))
    return job_id


def fork_body(parent: str, iteration: int = FIRST, **sections: object) -> dict[str, object]:
    return job_body(fork={"job": parent, "iteration": iteration}, **({"schedule": {"num_iterations": 4}} | sections))


async def refusal(broker: httpx.AsyncClient, body: dict[str, object]) -> tuple[str, str]:
    """Return the field and the message of the only refusal."""
    answer = await broker.post("/v1/jobs", json=body)
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    return error["field"], error["message"]


async def test_refused_fork_names_the_reason_and_the_remedy(broker, ledger, tmp_path):
    parent = await parent_of(broker, ledger, tmp_path, 1, 2)
    without = await parent_of(broker, ledger, tmp_path / "none")
    copy = tmp_path / "checkpoints" / "iteration-000002-best"
    copy.mkdir()
    (copy / "state.json").touch()
    too_late = f"job {parent} has no checkpoint after 9 iterations; there are those after 1, 2; take one of them"
    for body, field, reason in (
        (fork_body("nobody"), "fork.job", "there is no job 'nobody'"),
        (fork_body(without), "fork.iteration", f"job {without} has no checkpoint after 2 iterations; it has none yet"),
        (fork_body(parent, lora={"rank": 4}), "model.path", f"trains the model of job {parent}, bundled:smollm2"),
        (fork_body(parent, schedule={"num_iterations": 2}), "schedule.num_iterations", "already has 2 iterations"),
        (fork_body(parent, 9), "fork.iteration", too_late),  # the parent's own end, 4 iterations, is not the error
    ):
        wrong_field, message = await refusal(broker, body)
        assert (wrong_field, reason in message) == (field, True), message


async def test_unseen_disk_is_left_to_the_trainer(broker, ledger, tmp_path):
    parent = await parent_of(broker, ledger, tmp_path, 2)
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    assert (await broker.post("/v1/jobs", json=fork_body(parent, 1))).status_code == 201
    _, message = await refusal(broker, fork_body(parent, 3))
    assert f"job {parent} has no checkpoint after 3 iterations; its newest is after 2" in message


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_fork_counts_on_and_is_read_from_there(broker, ledger, world, tmp_path, max_staleness):
    parent = await parent_of(broker, ledger, tmp_path, FIRST)
    bounded = {"mode": "bounded", "max_staleness": max_staleness} if max_staleness else {}
    evaluation = {"data": {"type": "jsonl", "path": "prompts.jsonl"}, "every_iterations": 2, "num_prompts": 1}
    body = fork_body(parent, schedule={"num_iterations": 4, **bounded}, evaluation=evaluation)
    job_id = str((await broker.post("/v1/jobs", json=body)).json()["id"])
    url = f"/v1/jobs/{job_id}"
    for path in ("/iterations", "/evaluations", "/metrics", "/samples", "/timeline", "/weights", "/audit"):
        assert (await broker.get(f"{url}{path}")).status_code == 200, path
    epoch = await ledger.trainer.claim_job(job_id, "trainer-a", LEASE_S)
    assert epoch is not None
    await ledger.versions.announce(job_id, epoch, FIRST, "127.0.0.1:1", "d2")
    for iteration in (2, 3):
        await world.wait_open(job_id, iteration)
        await eventually("it is due", lambda: ledger.evaluations.state(job_id, FIRST))
        await world.drain(job_id)
        assert await world.commit(job_id, epoch, iteration, reward_mean=0.5)
    record = (await broker.get(url)).json()
    assert (record["first_iteration"], record["next_iteration"], record["num_iterations"]) == (2, 4, 4)
    answers = {path: (await broker.get(f"{url}/{path}")).json() for path in ("iterations", "metrics", "timeline")}
    assert [record["iteration"] for record in answers["iterations"]["iterations"]] == [2, 3]
    assert [step for step, _ in answers["metrics"]["metrics"]["iteration/reward_mean"]] == [2, 3]
    assert answers["timeline"]["iterations"] == [2, 3]
    evaluations = (await broker.get(f"{url}/evaluations")).json()["evaluations"]
    assert evaluations[0]["evaluation"] == FIRST
    report = await run_audit(ledger, job_id)
    assert (report.violation, report.num_commits, report.num_groups) == (None, 2, 4)


@pytest.mark.parametrize(
    ("section", "rules", "words"),
    [
        (
            "reward",
            "answer_rules",
            "the answers of job {} were compared without recorded rules, here they are by rules 1",
        ),
        ("model", "rendering_rules", "the prompts of job {} were rendered by other rules than 1"),
    ],
)
async def test_fork_of_a_job_with_other_rules_says_so(broker, ledger, tmp_path, section, rules, words):
    parent = await parent_of(broker, ledger, tmp_path, FIRST)
    config = json.loads((await ledger.jobs.fields(parent))["config"])
    assert config[section].pop(rules) == 1
    await ledger.redis.hset(JobKeys(parent).job, "config", json.dumps(config))
    field, message = await refusal(broker, fork_body(parent))
    assert field == f"{section}.{rules}"
    assert words.format(parent) in message
    wanted = {section: config[section] | {rules: 1}}
    assert (await broker.post("/v1/jobs", json=fork_body(parent, **wanted))).status_code == 201
