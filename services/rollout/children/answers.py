"""The answers of a child process, checked like untrusted input: foreign code may have written them."""

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from onbeat.process.children import ChildDied, ChildProcess


class Answer(BaseModel):
    """A line from the process."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    request: int


class Loaded(Answer):
    step: Literal["loaded"]
    warning: str = ""  # a sentence for the log of the rollout


AnswerT = TypeVar("AnswerT", bound=Answer)


class OutOfStep(ChildDied):
    """The answer to no request: foreign code found the protocol's stream, or forked and returned twice."""

    def __init__(self, code: str) -> None:
        super().__init__(f"{code} wrote into the protocol, or forked and returned twice")


async def receive_answer(
    child: ChildProcess, answers: TypeAdapter[AnswerT], request: int, timeout_s: float, code: str
) -> AnswerT:
    """Return the next answer, which is to this request. Raises TimeoutError when none comes in time, ChildDied."""
    line = await child.receive(timeout_s)
    try:
        answer = answers.validate_json(line)
    except ValueError as error:
        raise OutOfStep(code) from error
    if answer.request != request:
        raise OutOfStep(code)
    return answer
