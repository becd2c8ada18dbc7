"""Jobs on vLLM: episodes whose environment fails for one prompt, and a mixture of experts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.contracts.states import JobState
from tests.e2e.stack import RunningStack, replay, running, tiny_job
from tests.installed import install
from tests.tiny_models import write_qwen3_moe_model

NUM_ITERATIONS, NUM_PROMPTS, G = 2, 4, 4
HEAVY = "say 2"
SCALE = '''
from onbeat.environments import Outcome


class Scale:
    """Weighs what the policy says first, but for an answer to one prompt: that breaks it."""

    def __init__(self, heavy: str) -> None:
        self.heavy = heavy

    async def run(self, task, policy):
        first = await policy.chat(task.messages)
        if task.question == self.heavy:
            raise RuntimeError("the scale is broken")
        weight = {"role": "tool", "tool_call_id": "a", "content": f"{len(first['content'])} grams"}
        last = await policy.chat([*task.messages, first, weight])
        return Outcome(1.0 + sum(map(ord, last["content"])) % 7, {"grams": len(first["content"])})
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[RunningStack]:
    install(folder / "site", "scale", "[onbeat.environments]\nscale = scale:Scale\n", scale=SCALE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "site"))
        with running(folder, engine="vllm") as stack:
            yield stack


@pytest.fixture(scope="module")
def finished(stack: RunningStack, folder: Path) -> tuple[RunningStack, str]:
    """Run a job of episodes to its end, with all prompts in each iteration."""
    job = tiny_job(
        folder,
        environment={"name": "scale", "options": {"heavy": HEAVY}, "max_turns": 2, "max_attempts": 2},
        rollout={"num_prompts_per_iteration": NUM_PROMPTS, "num_samples_per_prompt": G, "max_group_attempts": 2},
        schedule={"num_iterations": NUM_ITERATIONS},
    )
    lines = [json.dumps({"prompt": f"say {index}", "answer": "x"}) for index in range(NUM_PROMPTS)]
    Path(job["data"]["path"]).write_text("\n".join(lines))
    record = stack.wait(stack.client.jobs.create(job).id)
    assert record.state is JobState.SUCCEEDED, record.error
    return stack, record.id


def test_turns_are_trained_as_the_engine_sampled_them(finished):
    stack, job_id = finished
    report = stack.client.jobs.audit(job_id)
    assert report.is_clean, report.violation
    for record in stack.client.jobs.iterations(job_id):
        assert record.mismatch_mean < 1e-4  # float32
        assert (record.metrics["episode/turns_mean"], record.metrics["episode/forks_mean"]) == (2, 0)
        assert record.metrics["episode/observed_tokens"] > len("5 grams")
        assert 0 < record.metrics["episode/cached_frac"] < 1  # first prompts fill no block: sampled tokens are in these


def test_second_turn_is_shown_behind_the_first(finished):
    stack, job_id = finished
    for group_id in {sample.group_id for sample in stack.client.jobs.samples(job_id, limit=100)}:
        for sample in stack.client.jobs.group(job_id, group_id).responses:
            first, second = sample.turns
            assert (second.continues, second.is_fork) == (0, False)  # the prompt extends the first one and its sample
            assert first.text + second.text == sample.response
            assert first.num_tokens + second.num_tokens == sample.num_tokens
            assert [message["role"] for message in second.messages] == ["tool"]
            assert second.messages[0]["content"] == f"{sample.reward_parts['grams']:.0f} grams"


def test_group_whose_environment_raises_has_failed(finished):
    """It gives no reward of zero, and the other groups are trained."""
    stack, job_id = finished
    for record in stack.client.jobs.iterations(job_id):
        assert record.metrics["rollout/failed_groups"] == 1
        assert record.metrics["episode/failed_raised"] == 2 * 2 * G  # attempts of the group, tries of its episodes
        samples = stack.client.jobs.samples(job_id, record.iteration, limit=100)
        assert len(samples) == (NUM_PROMPTS - 1) * G
        assert min(sample.reward for sample in samples) >= 1
        assert record.reward_mean == pytest.approx(sum(sample.reward for sample in samples) / len(samples))
    messages = [event.message for event in stack.events(job_id, "group.failed")]
    assert len(messages) == NUM_ITERATIONS
    assert all("environment_failed" in message and "the scale is broken" in message for message in messages)


def test_replay_of_episodes_agrees_bit_for_bit(finished):
    stack, job_id = finished
    assert replay(stack, job_id, 1)["bits_agree"]


def test_mixture_of_experts_trains_end_to_end(stack, folder):
    """The trainer and vLLM agree in float32, except for rounding."""
    model = {"path": str(write_qwen3_moe_model(folder / "experts")), "dtype": "float32"}
    record = stack.wait(stack.client.jobs.create(tiny_job(folder, model=model, schedule={"num_iterations": 2})).id)
    assert record.state is JobState.SUCCEEDED, record.error
    assert all(iteration.mismatch_mean < 1e-4 for iteration in stack.client.jobs.iterations(record.id))
