"""Stops within an episode: a turn ends there, and the next prompt goes on behind everything that was sampled."""

from onbeat.environments import Outcome
from tests.episode_rig import QWEN_LIKE, playing, post

USER = {"role": "user", "content": "2+2="}
MORE = {"role": "user", "content": "3+3="}


async def test_turn_ends_at_a_stop_and_the_next_follows_it():
    answers = []

    async def run(task, policy):
        answers.append((await policy.chat([USER]))["content"])
        answers.append((await policy.chat([USER, {"role": "assistant", "content": answers[0]}, MORE]))["content"])
        return Outcome(1.0)

    async with playing(run, "4\n\nQ: 5", "6") as rig:
        group = await rig.group(num_samples=1, stop=["\n\n"])
        (path,) = rig.paths(group)
        (response,) = group.responses
        assert answers == ["4", "6"]
        assert [turn.finish_reason for turn in response.turns] == ["stop", "stop"]
        assert response.text == "46"
        assert rig.text(path[0][1]) == "4\n\n"
        assert rig.text(path[1][0]).endswith(
            "4\n\n<|im_end|>\n<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n"
        )
        assert response.turns[1].parent == 0
        assert sum(response.token_lengths) == 2


async def test_stop_token_of_the_job_does_not_end_the_turn():
    async def run(task, policy):
        content = (await policy.chat([USER]))["content"]
        await policy.chat([USER, {"role": "assistant", "content": content}, MORE])
        return Outcome(1.0)

    async with playing(run, "4\nmore", "6", template=QWEN_LIKE) as rig:
        newline = rig.tokenizer("\n")["input_ids"]
        group = await rig.group(num_samples=1, stop_token_ids=newline)
        (path,) = rig.paths(group)
        assert rig.text(path[1][0]).endswith("4\n<|im_end|>\n<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n")


async def test_clients_may_repeat_the_stops_of_the_job_only():
    answers = []
    bodies = [
        {"stop": ["END"]},
        {"stop": "END"},
        {"stop_token_ids": [7]},
        {"stop": ["\n"]},
        {"stop_token_ids": [8]},
        {"top_p": 0.9},
        {"top_p": 1},
        {"min_tokens": 2},
    ]

    async def run(task, policy):
        for body in bodies:
            answers.append(await post(policy, "/chat/completions", messages=[USER], **body))
        return Outcome(0.0)

    async with playing(run) as rig:
        rig.engine.takes = frozenset({"top_p"})
        await rig.group(num_samples=1, stop=["END"], stop_token_ids=[7], top_p=0.9)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 400, 200, 400, 400]
    assert "stop: leave it out; the job's own sampling is used (rollout.stop of the job)" in answers[3].text
