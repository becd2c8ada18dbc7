"""Environments: programs that talk to the policy, use tools or play a game, and give a reward in the end.

An environment is installed under the entry-point group `onbeat.environments`, as a callable that takes the job's
`environment.options` and returns an object with a method `run`. It runs in a limited process of its own beside the
engine. All that it can reach of a job is its task and the session of its episode.
"""

from onbeat.environments.session import EpisodeOver, Message, Session, SessionError
from onbeat.environments.types import Environment, Outcome, Task

__all__ = ["Environment", "EpisodeOver", "Message", "Outcome", "Session", "SessionError", "Task"]
