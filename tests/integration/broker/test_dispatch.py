"""The order in which prompts go out: the longest first, as far as an earlier epoch tells; nothing else differs."""

from onbeat.contracts.states import JobState
from onbeat.streams.codec import PromptTask, decode_task
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from tests.world import World, failed_group, make_group

LENGTHS = {"say 0": 3, "say 1": 40, "say 2": 7, "say 3": 25, "say 4": 12}  # tokens of a response, by prompt
NUM_ROWS = len(LENGTHS)


async def start(ledger: Ledger, dispatch: str) -> tuple[str, str]:
    rollout = {"num_prompts_per_iteration": NUM_ROWS, "dispatch": dispatch}
    return await World(ledger).started_job(rollout=rollout, pool=dispatch.replace("_", "-"))


async def on_stream(ledger: Ledger, job_id: str) -> list[PromptTask]:
    """Return the prompts on the stream, in the order in which rollouts get them."""
    return [decode_task(fields[b"task"]) for _, fields in await ledger.redis.xrange(JobKeys(job_id).prompts)]


def prompt(task: PromptTask) -> str:
    return str(task.messages[-1].content)


async def generate(ledger: Ledger, job_id: str, lengths: dict[str, int]) -> None:
    """Be a rollout; a prompt without a length fails."""
    for claim in await World(ledger).claim_all(job_id):
        group = make_group(claim.task)
        if claim.task.HasField("data_row"):
            group.data_row = claim.task.data_row
        if (length := lengths.get(prompt(claim.task))) is None:
            group = failed_group(claim.task)
        for response in group.responses:
            response.token_ids[:], response.rollout_logprobs[:] = [4] * length, [-0.5] * length
            response.version_spans[0].end = length
        await ledger.rollout.submit(job_id, claim.entry_id, group)


async def test_second_epoch_begins_with_longest_and_trains_the_same(broker, ledger, world):
    seen = {}
    for dispatch in ("longest_first", "in_order"):
        job_id, epoch = await start(ledger, dispatch)
        await world.wait_open(job_id, 0)
        assert [task.group_id for task in await on_stream(ledger, job_id)] == [f"0-{i}" for i in range(NUM_ROWS)]
        await generate(ledger, job_id, LENGTHS)
        await world.commit(job_id, epoch, 0)
        await world.wait_open(job_id, 1)
        seen[dispatch] = await on_stream(ledger, job_id)
        await ledger.jobs.move(job_id, JobState.FAILED)
    order = [prompt(task) for task in seen["longest_first"]]
    assert order == sorted(LENGTHS, key=lambda name: -LENGTHS[name])
    assert [task.group_id for task in seen["in_order"]] == [f"1-{i}" for i in range(NUM_ROWS)]
    # Group, prompt, seed and all else of a task are the same; and the update does not depend on the order of arrival
    # (tests/unit/trainer/test_train_loop.py).
    for task in seen["longest_first"]:
        task.ClearField("data_row")
    same = sorted(seen["longest_first"], key=lambda task: task.group_id)
    assert [task.SerializeToString() for task in same] == [task.SerializeToString() for task in seen["in_order"]]


async def test_prompt_that_is_not_known_counts_as_average(broker, ledger, world):
    job_id, epoch = await start(ledger, "longest_first")
    await world.wait_open(job_id, 0)
    known = {"say 0": 3, "say 1": 40, "say 3": 25}
    await generate(ledger, job_id, known)
    await world.commit(job_id, epoch, 0)
    await world.wait_open(job_id, 1)
    order = [prompt(task) for task in await on_stream(ledger, job_id)]
    assert (order[:2], order[4]) == (["say 1", "say 3"], "say 0")  # the mean of the known ones is 22.7
    assert set(order[2:4]) == {"say 2", "say 4"}


async def test_newest_length_counts(broker, ledger, world):
    job_id, epoch = await start(ledger, "longest_first")
    for iteration, lengths in enumerate((LENGTHS, LENGTHS | {"say 0": 99})):
        await world.wait_open(job_id, iteration)
        await generate(ledger, job_id, lengths)
        await world.commit(job_id, epoch, iteration)
    await world.wait_open(job_id, 2)
    assert prompt((await on_stream(ledger, job_id))[0]) == "say 0"
    kept = await ledger.redis.hgetall(JobKeys(job_id).lengths)
    assert sorted(map(int, kept.values())) == [7, 12, 25, 40, 99]


async def test_nothing_is_kept_where_nobody_asks(broker, ledger, world):
    job_id, _ = await start(ledger, "in_order")
    await world.wait_open(job_id, 0)
    await generate(ledger, job_id, LENGTHS)
    assert not await ledger.redis.exists(JobKeys(job_id).lengths)
