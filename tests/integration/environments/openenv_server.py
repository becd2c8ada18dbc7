"""A game on OpenEnv's own server: `python openenv_server.py PORT`, with the packages of requirements/openenv.lock."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Parrot(Environment):
    """Repeats what it hears, three times; each message is rewarded by its length."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Heard:
        self.num_steps = 0
        return Heard(text=f"seed {seed}")

    def step(self, action: Action, timeout_s: float | None = None, **others: Any) -> Heard:
        assert isinstance(action, Say)
        if action.message == "die":
            raise ConnectionError("the parrot is gone")
        self.num_steps += 1
        return Heard(text=action.message, reward=len(action.message) / 10, done=self.num_steps == 3)

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)


if __name__ == "__main__":
    app = create_fastapi_app(Parrot, Say, Heard, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
