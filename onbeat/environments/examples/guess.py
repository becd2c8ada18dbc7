"""A game: guess a number that a hint after each guess brings nearer."""

import random
import re

from onbeat.environments.session import Message


class GuessNumber:
    """A number from 1 to `highest`, drawn from the seed of the task. A guess has to agree with all hints so far.

    The reward: 0.1 for each guess that agrees with the hints, at most `max_guesses` of them, and 1 for the number.
    """

    def __init__(self, highest: int = 10, max_guesses: int = 3) -> None:
        self._low, self._high = 1, highest
        self._guesses_left = max_guesses
        self._parts = {"found": 0.0, "sensible": 0.0}

    def init(self, seed: int) -> list[Message]:
        """Begin with a game that was lost, so that a small model sees what an answer looks like."""
        self._number = random.Random(seed).randint(self._low, self._high)
        begin = f"My number is from {self._low} to {self._high}. Guess it, with a number only."
        texts = [begin, str(self._high - 1), f"It is from {self._low} to {self._high - 2}.", str(self._low)]
        shown = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=True)]
        return [*shown, {"role": "user", "content": f"No. A new game. {begin}"}]

    def step(self, message: Message) -> tuple[str, float, bool]:
        self._guesses_left -= 1
        match = re.search(r"\d{1,9}", message["content"])
        guess = int(match[0]) if match else 0
        if guess == self._number:
            self._parts["found"] = 1.0
            return f"{guess} is right.", 1.0, True
        is_sensible = self._low <= guess <= self._high
        self._parts["sensible"] += is_sensible
        if is_sensible and guess < self._number:
            self._low = guess + 1
        elif is_sensible:
            self._high = guess - 1
        hint = f"It is from {self._low} to {self._high}."
        return hint, 0.1 * is_sensible, self._guesses_left == 0

    def get_parts(self) -> dict[str, float]:
        return self._parts
