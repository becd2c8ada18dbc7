"""Games and other environments that answer every message of the policy with a message."""

from collections.abc import Callable
from typing import Any

from onbeat.environments.calls import call, call_with_row, row_of
from onbeat.environments.session import EpisodeOver, Message, Session
from onbeat.environments.types import Outcome, Task


class MessageEnvironment:
    """An environment of games, objects for one episode each. Methods of a game may be asynchronous:

    init(**row)      begins with a row of the data. It returns the conversation's beginning, a text for the user's
                     message, or None to begin with the prompt
    step(message)    returns what the game says to the policy's message (a text, or messages), the reward of this turn,
                     and whether the game is over
    get_parts()      if there is one, returns numbers that are shown beside the reward
    close()          if there is one, is always called at the end

    The reward of the episode is the sum of its turns'.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    async def run(self, task: Task, policy: Session) -> Outcome:
        """Play until the game is over, or until the episode has no turn left: then the rewards so far count."""
        game = self._make()
        try:
            turn_rewards = await play(game, task, policy)
            parts = await call(game.get_parts) if hasattr(game, "get_parts") else {}
        finally:
            if hasattr(game, "close"):
                await call(game.close)
        return Outcome(sum(turn_rewards.values()), parts, turn_rewards)


async def play(game: Any, task: Task, policy: Session) -> dict[str, float]:
    """Play one game. Return the rewards by the ids of the policy's answers."""
    begin = await call_with_row(game.init, row_of(task))
    messages = list(task.messages) if begin is None else as_messages(begin)
    turn_rewards: dict[str, float] = {}
    is_over = False
    try:
        while not is_over:
            answer = await policy.chat(messages)
            said, turn_rewards[answer["id"]], is_over = check_step(await call(game.step, answer))
            messages = [*messages, without_id(answer), *said]
    except EpisodeOver:
        pass
    return turn_rewards


def check_step(result: Any) -> tuple[list[Message], float, bool]:
    """Return what `step` returned, as messages, a reward, and whether the game is over. Raises ValueError."""
    try:
        said, reward, is_over = result
        return as_messages(said), float(reward), bool(is_over)
    except (TypeError, ValueError) as error:
        wanted = "what the game says (a text, or a list of messages), the reward, and whether the game is over"
        raise ValueError(f"step returned {result!r:.200}; it has to return {wanted}") from error


def as_messages(said: list[Message] | str) -> list[Message]:
    """Return what a game says as messages. Raises ValueError when it is neither a text nor a list of messages."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if not isinstance(said, list | tuple) or not all(isinstance(message, dict) for message in said):
        raise ValueError(f"{said!r:.200} is neither a text nor a list of messages")
    return list(said)


def without_id(answer: Message) -> Message:
    """Return an answer as a message of the conversation."""
    return {name: value for name, value in answer.items() if name != "id"}
