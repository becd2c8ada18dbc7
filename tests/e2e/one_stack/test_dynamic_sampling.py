"""Dynamic sampling on a real stack: groups of equal rewards are replaced while others are still generated."""

from onbeat.contracts.states import JobState
from tests.e2e.stack import replay, tiny_job

NUM_PROMPTS, MAX_PROMPTS = 4, 24


def test_equal_groups_are_replaced_and_the_bits_replay(stack, folder):
    job = tiny_job(
        folder,
        objective={"type": "dapo"},
        rollout={
            "num_prompts_per_iteration": NUM_PROMPTS,
            "max_prompts_per_iteration": MAX_PROMPTS,
            "num_samples_per_prompt": 2,
        },
        schedule={"num_iterations": 3},
        checkpoint={"every_iterations": 3},
    )
    job_id = stack.client.jobs.create(job).id
    assert stack.wait(job_id).state is JobState.SUCCEEDED
    records = stack.client.jobs.iterations(job_id)
    for record in records:
        num_equal = record.metrics["rollout/uniform_groups"]
        assert record.num_groups == NUM_PROMPTS + record.num_replaced <= MAX_PROMPTS
        assert record.num_replaced == num_equal or record.num_groups == MAX_PROMPTS
        assert record.num_responses == 2 * record.num_groups
    assert sum(record.num_replaced for record in records) > 0
    assert stack.client.jobs.audit(job_id).is_clean
    assert replay(stack, job_id, 2)["bits_agree"]  # a replay from the beginning
