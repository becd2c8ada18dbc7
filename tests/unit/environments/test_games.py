"""Games: a message for each message of the policy, rewards by turn. And the two examples."""

from typing import Any

import pytest

from onbeat.environments import Outcome, Task
from onbeat.environments.examples.guess import GuessNumber
from onbeat.environments.examples.shop import Shop
from onbeat.environments.load import build_environment
from onbeat.environments.messages import MessageEnvironment
from tests.scripted_session import ScriptedSession, says

TASK = Task([{"role": "user", "content": "begin"}], "begin", ["lamp", "cup"], seed=3)


class Countdown:
    """A game over after three turns."""

    def __init__(self, begin: Any = None) -> None:
        self.begin, self.left, self.closed = begin, 3, False
        GAMES.append(self)

    def init(self, **row: Any) -> Any:
        return self.begin

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        if message["content"] == "break":
            raise RuntimeError("broken")
        self.left -= 1
        return [{"role": "user", "content": f"{self.left} left"}], 0.5, self.left == 0

    def get_parts(self) -> dict[str, float]:
        return {"left": self.left}

    def close(self) -> None:
        self.closed = True


GAMES: list[Countdown] = []


async def play(session: ScriptedSession, target: Any, **options: Any) -> Outcome:
    return await build_environment(target, options).run(TASK, session)


async def test_rewards_of_turns_are_summed_until_the_game_is_over():
    session = ScriptedSession(says("a"), says("b"), says("c"), says("never asked"))
    outcome = await play(session, Countdown)
    assert outcome == Outcome(1.5, {"left": 0}, {"id-1": 0.5, "id-2": 0.5, "id-3": 0.5})
    assert session.asked[2] == [
        {"role": "user", "content": "begin"},
        says("a"),
        {"role": "user", "content": "2 left"},
        says("b"),
        {"role": "user", "content": "1 left"},
    ]


@pytest.mark.parametrize("begin", ["hello", [{"role": "system", "content": "be"}, {"role": "user", "content": "me"}]])
async def test_game_may_begin_in_its_own_words(begin):
    session = ScriptedSession(says("a"))
    assert (await play(session, Countdown, begin=begin)).reward == 0.5
    assert session.asked[0] == (begin if isinstance(begin, list) else [{"role": "user", "content": begin}])


async def test_game_is_closed_whatever_happens():
    with pytest.raises(RuntimeError, match="broken"):
        await play(ScriptedSession(says("break")), Countdown)
    await play(ScriptedSession(), Countdown)
    assert [game.closed for game in GAMES[-2:]] == [True, True]


@pytest.mark.parametrize(
    "result", ["well", ("well", None, True), (5, 1.0, False), ({"role": "user", "content": ""}, 1.0, True), None]
)
async def test_step_that_returns_something_else_is_told_what(result):
    class Odd:
        def init(self) -> None: ...

        def step(self, message: dict[str, Any]) -> Any:
            return result

    with pytest.raises(ValueError, match=r"step returned .* it has to return what the game says"):
        await play(ScriptedSession(says("a")), Odd)


async def test_game_that_changes_its_options_changes_no_other_game():
    class Deck:
        """A game that draws its cards from a list among its options."""

        def __init__(self, cards: list[int]) -> None:
            self.cards = cards

        def init(self) -> None: ...

        def step(self, message: dict[str, Any]) -> tuple[str, float, bool]:
            return "drawn", self.cards.pop(), True

    environment = build_environment(Deck, {"cards": [1, 2, 3]})
    outcomes = [await environment.run(TASK, ScriptedSession(says("draw"))) for _ in range(3)]
    assert [outcome.reward for outcome in outcomes] == [3.0, 3.0, 3.0]


async def test_guesses_narrow_the_number_down():
    session = ScriptedSession(*(says(text) for text in ("50", "no idea", "10", "1", "8")))
    outcome = await play(session, GuessNumber, highest=20, max_guesses=5)
    assert outcome.parts == {"found": 1.0, "sensible": 2.0}  # the number of this seed is 8
    assert outcome.reward == pytest.approx(1.2)
    hints = [asked[-1]["content"] for asked in session.asked]
    assert hints[2] == "It is from 1 to 20."  # neither 50 nor no number tell anything


async def test_shop_rewards_looks_and_the_right_sum():
    looks = says('price("lamp")'), says('price("cup")')
    seen = ScriptedSession(*looks, says("I do not know"))
    assert (await play(seen, Shop, tool_calls="text")).reward == pytest.approx(0.5)
    total = sum(int(asked[-1]["content"].rpartition(" ")[2]) for asked in seen.asked[1:])
    for answers, reward in (
        ((*looks, says(f"{total} euros.")), 1.0),
        ((*looks, says(f"1 + {total - 1} = {total} euros.")), 1.0),
        ((*looks, says(f"{total} or {total + 1}")), 0.5),
        ((looks[0], says(f"{total} euros.")), 0.25),
        ((says(f"{total} euros."),), 0.0),
    ):
        assert (await play(ScriptedSession(*answers), Shop, tool_calls="text")).reward == pytest.approx(reward)
    other = ScriptedSession(says('price("hat")'), says("well"))
    assert (await play(other, Shop, tool_calls="text")).reward == 0.0
    assert other.asked[1][-1]["content"] == 'price("hat") = Error: the shop has no hat'


def test_objects_functions_and_classes_are_environments():
    class Own:
        async def run(self, task, policy):
            return Outcome(1.0)

    for target in (Own, Own(), lambda: Own()):
        assert isinstance(build_environment(target, {}), Own)
    assert isinstance(build_environment(Countdown, {}), MessageEnvironment)
    with pytest.raises(ValueError, match="gave a int, which has no method `run`"):
        build_environment(lambda: 5, {})
    with pytest.raises(ValueError, match="is an object, which takes none, not even level; install its class"):
        build_environment(Own(), {"level": 3})
