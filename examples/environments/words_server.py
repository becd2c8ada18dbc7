"""A game on OpenEnv's own server: say a word that begins with a letter, three times.

    python words_server.py [PORT]

It needs the package openenv, in a virtual environment of its own.
"""

import random
import string
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

NUM_WORDS = 3
MAX_GAMES = 256  # games at a time: one for each episode that is played


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Words(Environment):
    """Each word of one line that begins with the letter is rewarded with 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Heard:
        self._letters = random.Random(seed).sample(string.ascii_lowercase, NUM_WORDS)
        self._num_words = 0
        return Heard(text=self._question())

    def step(self, action: Action, timeout_s: float | None = None, **others: Any) -> Heard:
        assert isinstance(action, Say)
        word = action.message.strip().lower()
        is_right = word.startswith(self._letters[self._num_words]) and word.isalpha()
        self._num_words += 1
        is_over = self._num_words == NUM_WORDS
        return Heard(text="The end." if is_over else self._question(), reward=float(is_right), done=is_over)

    def _question(self) -> str:
        return f"Say one word that begins with {self._letters[self._num_words]}."

    @property
    def state(self) -> State:
        return State(step_count=self._num_words)


if __name__ == "__main__":
    app = create_fastapi_app(Words, Say, Heard, max_concurrent_envs=MAX_GAMES)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
