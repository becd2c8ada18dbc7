"""On-policy distillation on a real stack: the teacher is the last checkpoint of a job that the same stack trained."""

import json
import shutil
import time

import pytest

from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.states import JobState
from tests.e2e.stack import replay, tiny_job

NUM_ITERATIONS = 4


def distill_job(folder, teacher, hint=None, **sections):
    """Build a job without a reward, with one response to each prompt. `hint`: field of the teacher's prompts."""
    rollout = {"num_prompts_per_iteration": 8, "num_samples_per_prompt": 1}
    schedule = {"num_iterations": NUM_ITERATIONS}
    job = tiny_job(folder, rollout=rollout, schedule=schedule, checkpoint={"every_iterations": 1}, **sections)
    del job["reward"]
    return job | {"objective": {"type": "distill"}, "teacher": {"path": str(teacher), "prompt_field": hint}}


def hints(folder):
    """Write rows with a second prompt, as the section `data`."""
    path = folder / "data" / "hints.jsonl"
    rows = [{"prompt": f"say {index}", "answer": "x", "hint": f"say {index}, as in {index}"} for index in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {"path": str(path)}


@pytest.fixture(scope="module")
def teacher(stack, finished, folder):
    """Return a copy of the finished job's model."""
    checkpoint = stack.client.jobs.get(finished.id).checkpoint
    return shutil.copytree(checkpoint, folder / "teacher", ignore=shutil.ignore_patterns("optimizer"))


def test_a_job_learns_from_a_trained_model_and_replays(stack, folder, teacher):
    """The teacher reads another prompt. The trainer is killed on the way; later, another model lies in its place."""
    job_id = stack.client.jobs.create(distill_job(folder, teacher, "hint", data=hints(folder))).id
    while stack.job(job_id).next_iteration < 1:
        time.sleep(0.1)
    assert stack.signal("trainer")
    job = stack.wait(job_id)
    assert job.state is JobState.SUCCEEDED, job.error
    (event,) = stack.events(job_id, "job.teacher")
    assert job.teacher_digest in event.message
    assert all(record.reward_mean is None for record in stack.client.jobs.iterations(job_id))
    assert all(sample.reward is None for sample in stack.client.jobs.samples(job_id))
    audit = stack.client.jobs.audit(job_id)
    assert (audit.is_clean, audit.num_trained_groups) == (True, 8 * NUM_ITERATIONS), audit.violation
    assert replay(stack, job_id, NUM_ITERATIONS - 1)["bits_agree"]
    config = json.loads((teacher / "config.json").read_text(encoding="utf-8"))
    (teacher / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}), encoding="utf-8")
    with pytest.raises((OnbeatError, ValueError), match="and the job has learned from one with"):
        replay(stack, job_id, NUM_ITERATIONS - 1)


def test_a_teacher_of_another_vocabulary_is_refused(stack, folder, teacher):
    other = shutil.copytree(teacher, folder / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(OnbeatError, match="it has another vocabulary than the model: 2 of 259 shared ids"):
        stack.client.jobs.create(distill_job(folder, other))
