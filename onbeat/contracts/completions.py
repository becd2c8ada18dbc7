"""OpenAI's chat completions, as far as they are offered: the requests, answers and errors of broker and rollouts."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

SEEDS = 2**31
VERSION_HEADER = "Onbeat-Policy-Version"
MAX_REASONS = 5  # reasons that a refusal lists

Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]


def check_text(text: str) -> str:
    """Raise ValueError for halves of surrogate pairs, which JSON can name and UTF-8 cannot hold."""
    if text != without_halves(text):
        raise ValueError("has half a surrogate pair, which is no text; send whole characters")
    return text


AnyText = Annotated[str, AfterValidator(check_text)]


def as_whole(value: object) -> object:
    """Convert a float such as 5.0 to an int: to JSON it is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=1), BeforeValidator(as_whole)]
FewChoices = Annotated[int, Field(ge=1, le=8), BeforeValidator(as_whole)]
Seed = Annotated[int, Field(ge=0, lt=SEEDS), BeforeValidator(as_whole)]


# ---- what is asked -----------------------------------------------------------------------------------------------


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: AnyText


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: AnyText | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="at last a chunk without choices that has the usage")


class CompletionRequest(Strict):
    """All fields that there are; others are refused."""

    model: str = Field(max_length=200, description="id of a running job, or its name if no other one has it")
    messages: list[Message] = Field(min_length=1, max_length=1000)
    temperature: float | None = Field(None, ge=0, le=2, description="0: the likeliest token; default 1")
    top_p: float | None = Field(None, gt=0, le=1, description="default 1")
    max_tokens: Count | None = Field(None, description="default: rollout.max_response_tokens of the job")
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens")
    stream: bool | None = Field(None, description="server-sent events, text as it is generated")
    stream_options: StreamOptions | None = None
    n: FewChoices | None = Field(None, description="how many answers; default 1")
    seed: Seed | None = Field(None, description="of the first answer; default: another one each time")
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = Field(None, description="the text ends before it")
    user: AnyText | None = Field(None, description="ignored")

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


# ---- what is answered --------------------------------------------------------------------------------------------


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = Field(description="JOB@VERSION: the policy version that generated all of it")
    choices: list[Choice]
    usage: Usage


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetails


class ChatFailed(Exception):
    """An error as the answer: its HTTP status, a code for programs and a message that says what to do."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def to_body(self) -> ErrorBody:
        refusal = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else refusal
        param = without_halves(self.param) if self.param else None
        details = ErrorDetails(message=without_halves(str(self)), type=kind, param=param, code=self.code)
        return ErrorBody(error=details)


def wrong_fields(errors: Sequence[Mapping[str, Any]]) -> ChatFailed:
    """Return an error that names the first wrong fields and the remedy, from pydantic's errors of a request."""
    if any(details["type"] == "json_invalid" for details in errors):
        reason = str(errors[0].get("ctx", {}).get("error", "syntax error"))
        return ChatFailed(400, "invalid_json", f"the body is not valid JSON: {reason}")
    paths = [".".join(map(str, details["loc"]))[:100] for details in errors[:MAX_REASONS]]
    reasons = [
        f"{path} is not supported here, leave it out"
        if details["type"] == "extra_forbidden"
        else f"{path or 'the body'}: {details['msg']}"
        for path, details in zip(paths, errors, strict=False)
    ]
    code = "unsupported_parameter" if errors[0]["type"] == "extra_forbidden" else "invalid_value"
    return ChatFailed(400, code, "; ".join(reasons), paths[0] or None)


def without_halves(text: str) -> str:
    """Replace halves of characters, which JSON can name and UTF-8 cannot hold."""
    return text.encode(errors="replace").decode()
