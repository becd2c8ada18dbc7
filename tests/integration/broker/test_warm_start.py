"""A warm start with a real broker: its refusals, the rows that it opens iterations with, and the prompts after them."""

import json

import pytest

from onbeat.contracts.states import JobState, Verdict
from onbeat.streams.codec import Response, RolloutGroup
from onbeat.streams.ledger import Ledger
from onbeat.streams.outcomes import Outcome
from services.broker.auditor import run_audit
from services.broker.datasets.process import DatasetProcess
from services.broker.watcher import JobWatcher, read_config
from tests.broker_fixtures import submit
from tests.world import World, job_body, make_group

EXAMPLES = {"type": "jsonl", "path": "examples.jsonl", "order": "in_order"}
START = {"data": EXAMPLES, "num_rows_per_iteration": 2, "epochs": 1}
ROWS = [{"prompt": f"p{number}", "response": f"r{number}"} for number in range(4)]
SOURCES = [
    {"type": "jsonl", "path": "prompts.jsonl", "name": "a", "order": "difficulty"},
    {"type": "jsonl", "path": "prompts.jsonl", "name": "b"},
]

LEVELS = {
    "type": "reasoning_gym",
    "task": "chain_sum",
    "order": "difficulty",
    "levels": [{"max_terms": 2}, {"max_terms": 3}],
}


@pytest.fixture
def examples(tmp_path):
    def write(rows):
        (tmp_path / "examples.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    write(ROWS)
    return write


async def supervise(world: World, ledger: Ledger, job_id: str, epoch: str, iteration: int) -> list[str]:
    """Be the trainer of a supervised iteration. Return the prompts of its rows."""
    await world.wait_open(job_id, iteration)
    rows = {group_id: json.loads(row) for group_id, row in (await ledger.iterations.rows(job_id, iteration)).items()}
    groups = [
        RolloutGroup(
            group_id=group_id,
            iteration=iteration,
            policy_version=iteration,
            is_supervised=True,
            prompt_token_ids=[1],
            responses=[Response(token_ids=[2], has_no_reward=True)],
            data_row=row["row"],
        )
        for group_id, row in rows.items()
    ]
    await ledger.trainer.record_rows(job_id, epoch, iteration, "trainer-a", groups)
    assert await world.commit(job_id, epoch, iteration, is_published=iteration == 1)
    return [row["messages"][0]["content"] for _, row in sorted(rows.items())]


@pytest.mark.parametrize(
    ("rows", "sections", "field", "sentence"),
    [
        (
            [*ROWS, {"prompt": "p", "response": ""}],
            {},
            "warm_start.data.response_field",
            "examples.jsonl, line 5 has an empty response",
        ),
        ([{"prompt": "p"}], {}, "warm_start.data.response_field", "line 1 has no 'response'; it has: prompt"),
        (ROWS, {"path": "other.jsonl"}, "warm_start.data.path", "there is no file other.jsonl"),
        (ROWS * 3, {}, "schedule.num_iterations", "1 epochs of 12 rows are 6 supervised iterations, and the job has 5"),
    ],
)
async def test_wrong_examples_refuse_the_job(broker, examples, rows, sections, field, sentence):
    examples(rows)
    start = START | {"data": EXAMPLES | sections}
    body = job_body(warm_start=start, schedule={"num_iterations": 5})
    answer = await broker.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == field
    assert sentence in error["message"]


async def test_the_preview_of_sft_shows_examples(broker, examples):
    job = job_body(objective={"type": "sft"}, warm_start={"data": EXAMPLES, "num_rows_per_iteration": 2})
    for section in ("data", "reward", "rollout"):
        del job[section]
    answer = (await broker.post("/v1/jobs:preview", params={"prompts": 2}, json=job)).json()
    assert [prompt["text"] for prompt in answer["prompts"]] == [f"user: p{i}\nassistant: r{i}" for i in range(2)]
    assert "the examples are shown as messages" in answer["notes"][0]
    examples([{"prompt": "p"}])
    (error,) = (await broker.post("/v1/jobs:preview", json=job)).json()["errors"]
    assert error["field"] == "warm_start.data.response_field"


@pytest.mark.usefixtures("examples")
async def test_a_repeated_request_finds_the_job(broker):
    body, key = job_body(warm_start=START, schedule={"num_iterations": 5}), {"Idempotency-Key": "k"}
    first, second = [await broker.post("/v1/jobs", json=body, headers=key) for _ in range(2)]
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["id"] == second.json()["id"]
    assert first.json()["config"]["warm_start"]["num_iterations"] == 2


@pytest.mark.usefixtures("examples")
async def test_rows_come_first_and_then_prompts(broker, ledger, world):
    """One of two sources chooses by outcomes; the audit follows both from the end of the warm start."""
    held_out = {"data": EXAMPLES, "num_rows": 3}
    start = START | {"held_out": held_out}
    job_id = await submit(broker, warm_start=start, data=SOURCES, schedule={"num_iterations": 4})
    epoch = await world.start_training(job_id)
    assert await supervise(world, ledger, job_id, epoch, 0) == ["p0", "p1"]
    assert await supervise(world, ledger, job_id, epoch, 1) == ["p2", "p3"]
    assert [json.loads(row)["row"] for row in await ledger.iterations.held_out_rows(job_id)] == [0, 1, 2]
    config = read_config(await ledger.jobs.fields(job_id))
    for iteration in (2, 3):
        await world.wait_open(job_id, iteration)
        for claim in await world.claim_all(job_id):
            group = make_group(claim.task)
            if claim.task.HasField("data_row"):
                group.data_row = claim.task.data_row
            outcome = Outcome.of_group(config, group)
            verdict = await ledger.rollout.submit(job_id, claim.entry_id, group, outcome=outcome)
            assert verdict is Verdict.ACCEPTED
        assert await world.commit(job_id, epoch, iteration)
    await ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch)
    assert (await run_audit(ledger, job_id)).violation is None
    records = (await broker.get(f"/v1/jobs/{job_id}/iterations")).json()["iterations"]
    assert ["is_supervised" in record for record in records] == [True, True, False, False]


@pytest.mark.usefixtures("examples")
async def test_rows_are_read_before_they_are_due(ledger, world, tmp_path):
    """The first ones before a trainer comes, and with them the first prompts; the next ones once these are open, so
    that their file may go."""
    process = DatasetProcess(tmp_path, timeout_s=20, memory_mb=4096)
    start = {"data": EXAMPLES, "num_rows_per_iteration": 2, "num_iterations": 2}
    job_id = await world.create_job(warm_start=start)
    watcher = JobWatcher(ledger, process, job_id)
    await watcher.step()
    assert list(watcher._prompts._prepared) == [0, 2]
    epoch = await world.start_training(job_id)
    await watcher.step()
    await watcher._prompts._prepared[1]
    (tmp_path / "examples.jsonl").unlink()
    assert await supervise(world, ledger, job_id, epoch, 0) == ["p0", "p1"]
    await watcher.step()
    assert await supervise(world, ledger, job_id, epoch, 1) == ["p2", "p3"]
    await watcher._prompts.close()
    await process.close()


@pytest.mark.usefixtures("examples")
async def test_levels_are_chosen_from_the_end_of_the_warm_start(broker, ledger, world):
    job_id = await submit(broker, warm_start=START, data=LEVELS, schedule={"num_iterations": 4})
    epoch = await world.start_training(job_id)
    for iteration in (0, 1):
        await supervise(world, ledger, job_id, epoch, iteration)
    await world.wait_open(job_id, 2)
    assert (await run_audit(ledger, job_id)).violation is None


@pytest.mark.usefixtures("examples")
async def test_doctor_speaks_of_rows(broker, world):
    """No rollout is alive, which a supervised iteration does not need."""
    job_id = await submit(broker, warm_start=START, schedule={"num_iterations": 5}, pool="alone")
    await world.start_training(job_id)
    await world.wait_open(job_id, 0)
    sentences = [finding["sentence"] for finding in (await broker.get(f"/v1/jobs/{job_id}:explain")).json()["findings"]]
    assert any("0 of 2 groups accepted; trainer-a has to tokenise the rows" in sentence for sentence in sentences)
    assert not any("no rollout is alive" in sentence for sentence in sentences)
