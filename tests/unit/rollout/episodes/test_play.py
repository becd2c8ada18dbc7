"""Episodes of a group: retries, failures, deadlines, the version gate, and what reaches the wire."""

import asyncio

import pytest

from onbeat.contracts.seeds import seed_of
from onbeat.environments import EpisodeOver, Outcome, SessionError
from services.rollout import producer as producer_module
from services.rollout.episodes import episode as episode_module
from services.rollout.episodes import runner as runner_module
from services.rollout.episodes.contract import Program
from services.rollout.episodes.runner import EnvironmentFailed
from services.rollout.producer import DeadlineExceeded
from tests.episode_rig import VERSION, flight_of, playing
from tests.waiting import until

USER = {"role": "user", "content": "more"}


async def two_turns(task, policy):
    first = await policy.chat(task.messages)
    second = await policy.chat([*task.messages, first, USER])
    return Outcome(float(len(second["content"])), {"length": 2.0}, {first["id"]: 0.25})


async def test_group_of_episodes_is_on_the_wire_as_it_was_sampled():
    async with playing(two_turns) as rig:
        group = await rig.group(num_samples=3)
    assert len(group.responses) == 3
    turns = [turn for paths in rig.paths(group) for turn in paths]
    assert sorted(turns) == sorted((prompt, sampled) for prompt, sampled, _ in rig.engine.seen)
    assert list(group.prompt_token_ids) == rig.engine.seen[0][0]  # the first prompt is common to all
    for index, response in enumerate(group.responses):
        first, second = response.turns
        assert (first.num_shared, second.parent) == (len(group.prompt_token_ids), 0)
        assert not first.observed_token_ids
        assert (first.reward, second.HasField("reward")) == (0.25, False)
        assert response.reward_parts == {"length": 2.0}
        assert [(s.policy_version, s.start, s.end) for s in response.version_spans] == [
            (VERSION, 0, len(response.token_ids))
        ]
        assert sum(response.token_lengths) == len(response.text)
        assert response.text == "".join(str(seed_of(11, index, turn) % 97) for turn in range(2))
    assert len(group.timings.in_engine) > 0


async def test_environment_gets_the_task_and_seeds_follow_the_place():
    tasks = []

    async def look(task, policy):
        tasks.append(task)
        return await two_turns(task, policy)

    async with playing(look) as rig:
        await rig.group(num_samples=2, options_json='{"a": 2}')
    task = tasks[0]
    assert (task.messages, task.question, task.answer) == ([{"role": "user", "content": "2+2="}], "2+2=", "4")
    assert (task.metadata, task.seed) == ({"level": 1}, 11)
    (request,) = rig.environments.requests
    assert (request.program, request.timeout_s) == (Program("test", '{"a": 2}', 512), 60.0)
    seeds = {sampling.seed for _, _, sampling in rig.engine.seen}
    assert seeds == {seed_of(11, episode, turn) for episode in range(2) for turn in range(2)}


async def test_waiting_and_ended_episodes_hold_no_place_in_the_engine(monkeypatch):
    monkeypatch.setattr(episode_module, "SHORT_WAIT_S", 0.05)
    may_go_on, flight = asyncio.Event(), flight_of(num_samples=3)
    places: list[int] = []

    async def wait(task, policy):
        first = await policy.chat(task.messages)
        await may_go_on.wait()
        if len(first["content"]) != 2:
            await policy.chat([*task.messages, first, USER])
        return Outcome(0.0)

    async with playing(wait) as rig:
        rig.engine.texts = ["1", "22", "3"]
        rig.engine.may_finish.clear()
        producing = asyncio.create_task(rig.producer.produce(flight))
        await until(lambda: rig.engine.num_running == 3)
        places.append(flight.num_places)
        rig.engine.may_finish.set()
        await until(lambda: len(rig.engine.seen) == 3)
        places.append(flight.num_places)  # the environment has only just got its answers
        await until(lambda: flight.num_places == 0)
        rig.engine.may_finish.clear()
        may_go_on.set()
        await until(lambda: rig.engine.num_running == 2)
        places.append(flight.num_places)
        rig.engine.may_finish.set()
        await producing
    assert places == [3, 3, 2]


async def test_environment_that_is_being_loaded_makes_no_room_yet(monkeypatch):
    monkeypatch.setattr(episode_module, "SHORT_WAIT_S", 0.0)
    flight, may_load = flight_of(num_samples=2), asyncio.Event()
    async with playing(two_turns) as rig:
        load = rig.environments.play

        async def play(request):
            await may_load.wait()
            return await load(request)

        rig.environments.play = play
        producing = asyncio.create_task(rig.producer.produce(flight))
        await until(lambda: flight.episodes is not None)
        assert flight.num_places == 2
        may_load.set()
        await producing


async def test_only_a_failed_episode_is_tried_again_with_same_tokens():
    num_tries = 0

    async def fail_once(task, policy):
        nonlocal num_tries
        outcome = await two_turns(task, policy)
        num_tries += 1
        if num_tries == 1:
            raise RuntimeError("the sandbox is gone")
        return outcome

    async with playing(fail_once) as rig:
        group = await rig.group(num_samples=3)
    assert [len(request.access) for request in rig.environments.requests] == [3, 1]
    assert dict(group.failed_episodes) == {"raised": 1}
    assert len(rig.engine.seen) == 8
    assert all(seen in rig.engine.seen[:6] for seen in rig.engine.seen[6:])
    keys = [access.key for request in rig.environments.requests for access in request.access]
    assert len(set(keys)) == 4


async def test_text_that_fails_twice_is_not_repeated_for_ever():
    """A tool may break by what the policy says: then the same answers would use up all tries, here and elsewhere."""

    async def break_by_text(task, policy):
        answer = await policy.chat(task.messages)
        if answer["content"] == first_text:
            raise RuntimeError("the sandbox does not survive this text")
        return Outcome(1.0)

    first_text = str(seed_of(11, 0, 0) % 97)
    async with playing(break_by_text, max_attempts=3) as rig:
        groups = [await rig.group() for _ in range(2)]
        seeds = [sampling.seed for _, _, sampling in rig.engine.seen]
    assert dict(groups[0].failed_episodes) == {"raised": 2}
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[:3] == seeds[3:]  # another rollout would get the same group
    assert [group.responses[0].text for group in groups] == [groups[0].responses[0].text] * 2


@pytest.mark.parametrize(("patience_s", "played_s", "num_tries"), [(60.0, 0.0, 6), (1.5, 1.6, 6), (0.0, 0.0, 2)])
async def test_tries_do_not_count_while_a_server_is_away(monkeypatch, patience_s, played_s, num_tries):
    async def reach(task, policy):
        if not tries:
            await asyncio.sleep(played_s)
        tries.append((await policy.chat(task.messages))["content"])
        if len(tries) <= 5:
            raise ConnectionRefusedError("nobody listens")
        return Outcome(1.0)

    tries = []
    monkeypatch.setattr(runner_module, "delay_after", lambda num_failures: 0.001)
    monkeypatch.setattr(runner_module, "UNREACHABLE_S", patience_s)
    async with playing(reach, max_attempts=2) as rig:
        if patience_s:
            group = await rig.group()
            assert dict(group.failed_episodes) == {"unreachable": 5}
        else:
            with pytest.raises(EnvironmentFailed, match=r"unreachable: .*ConnectionRefusedError: nobody listens"):
                await rig.group()
    assert len(tries) == num_tries
    assert len(set(tries)) == 1  # all tries repeat the policy's answers


async def test_groups_that_others_finish_are_not_remembered_for_ever(monkeypatch):
    async def fail(task, policy):
        await policy.chat(task.messages)
        raise ValueError("bad")

    monkeypatch.setattr(producer_module, "MAX_REMEMBERED", 2)
    async with playing(fail, max_attempts=1) as rig:
        for number in range(4):
            flight = flight_of(group_id=f"3-{number}")
            with pytest.raises(EnvironmentFailed):
                await rig.producer.produce(flight)
            rig.producer.remember_error(flight.claim.task, "bad")
    remembered = (rig.producer._last_errors, rig.producer._failed_episodes)
    assert [list(notes) for notes in remembered] == [["3-2", "3-3"]] * 2


async def test_episode_without_a_call_is_a_failure_and_no_reward():
    async def idle(task, policy):
        return Outcome(1.0)

    async def play(task, policy):  # adapters end an episode that is over: this one is so before it has begun
        with pytest.raises(EpisodeOver, match="the context has 100 tokens"):
            await policy.chat([{"role": "user", "content": "x" * 200}])
        return Outcome(0.0)

    for run, reason in ((idle, "without a call"), (play, r"refused: the messages .* the context has 100 tokens")):
        async with playing(run, context=100) as rig:
            with pytest.raises(EnvironmentFailed, match=f"no_call: .*{reason}"):
                await rig.group()


async def test_reward_of_a_turn_that_was_not_recorded_is_invalid():
    async def play(task, policy):
        await policy.chat(task.messages)
        return Outcome(0.0, turn_rewards={"chatcmpl-else": 1.0})

    async with playing(play) as rig:
        with pytest.raises(EnvironmentFailed, match=r"invalid: .*'chatcmpl-else', which is not a call of this episode"):
            await rig.group()


async def test_error_of_the_engine_ends_the_attempt_at_once():
    async def stubborn(task, policy):
        try:
            await policy.chat(task.messages)
        except SessionError:
            await asyncio.Event().wait()

    async with playing(stubborn) as rig:
        rig.engine.errors = [RuntimeError("the engine is on fire")]
        with pytest.raises(RuntimeError, match="on fire"):
            await rig.group(num_samples=2)
    assert rig.gate.num_inside == 0


async def test_request_that_the_engine_refuses_is_refused_alone():
    async def play(task, policy):
        with pytest.raises(SessionError, match="the engine refuses the request: too hot"):
            await policy.chat(task.messages)
        return await two_turns(task, policy)

    async with playing(play) as rig:
        rig.engine.errors = [ValueError("too hot")]
        group = await rig.group()
    assert len(group.responses[0].turns) == 2


async def test_deadline_of_the_group_ends_its_sessions(monkeypatch):
    monkeypatch.setattr(runner_module, "SHOWN_WAIT_S", 0.01)
    sessions = []

    async def hang(task, policy):
        sessions.append(policy)
        await policy.chat(task.messages)
        await asyncio.Event().wait()

    async with playing(hang) as rig:
        with pytest.raises(DeadlineExceeded, match=r"group_deadline_s.*GENERATING: group 3-0: episode . waits"):
            await rig.group(num_samples=2, deadline_s=0.5)
        assert rig.gate.num_inside == 0
        late = type(sessions[0])(sessions[0].url, sessions[0].key)
        with pytest.raises(SessionError, match="its episode has ended"):
            await late.chat([USER])
        await late.close()


async def test_cancelled_group_leaves_nothing_in_the_engine():
    async def call(task, policy):
        await policy.chat(task.messages)
        return Outcome(0.0)

    async with playing(call) as rig:
        rig.engine.may_finish.clear()
        producing = asyncio.create_task(rig.group(num_samples=2))
        await until(lambda: rig.engine.num_running == 2)
        producing.cancel()
        await asyncio.wait({producing})
        assert (rig.engine.num_running, rig.engine.num_cancelled, rig.gate.num_inside) == (0, 2, 0)


async def test_wait_for_a_tool_is_named_with_the_time_that_is_left(monkeypatch):
    monkeypatch.setattr(runner_module, "SHOWN_WAIT_S", 0.01)
    may_end, has_called = asyncio.Event(), asyncio.Event()
    tools = [{"type": "function", "function": {"name": name}} for name in ("search", "read")]

    async def wait(task, policy):
        await policy.chat(task.messages, tools)
        has_called.set()
        await may_end.wait()
        return Outcome(0.0)

    calls = [f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in ("search", "read", "no such tool")]
    async with playing(wait, "".join(calls)) as rig:
        flight = flight_of(timeout_s=60.0)
        producing = asyncio.create_task(rig.producer.produce(flight))
        await has_called.wait()
        await until(lambda: flight.wait is not None)
        shown_wait = flight.wait
        assert flight.doing.startswith("group 3-0: episode 0 waits for tools `search`, `read` for over ")
        may_end.set()
        await producing
    assert (flight.doing, flight.wait) == ("", None)
    assert shown_wait is not None
    assert (shown_wait.group_id, shown_wait.episode, shown_wait.waits_for) == ("3-0", 0, "tools `search`, `read`")
    assert 0 < shown_wait.waited_s < 60 - shown_wait.left_s < 30


async def test_group_without_a_common_first_token_has_no_prompt():
    num_episodes = 0

    async def different(task, policy):
        nonlocal num_episodes
        num_episodes += 1
        body = {"token_ids": [num_episodes], "sampling_params": {}}
        answer = await policy._http.post(policy.url.removesuffix("/v1") + "/inference/v1/generate", json=body)
        assert answer.is_success
        return Outcome(0.0)

    async with playing(different) as rig:
        group = await rig.group(num_samples=2)
    assert group.failure.kind == "environment_failed"
    assert "no first token in common" in group.failure.message
