"""Messages of the streams: protobuf, checked on the way in. The rest of the house never sees generated modules.

A RolloutGroup that passes `decode_group` keeps the promises of rollout.proto: one logprob per token, finite rewards,
version spans that cover every response exactly. That logprobs are finite is checked where they are made and used.
"""

import hashlib
import math
from collections.abc import Mapping

from google.protobuf.message import DecodeError

from onbeat.rollout.v1.rollout_pb2 import (
    GroupFailure,
    Message,
    PromptTask,
    Response,
    Reward,
    RolloutGroup,
    Timings,
    VersionSpan,
)

__all__ = [
    "GroupFailure",
    "Message",
    "PromptTask",
    "Response",
    "Reward",
    "RolloutGroup",
    "Timings",
    "VersionSpan",
    "check_group",
    "check_logprobs",
    "decode_group",
    "decode_task",
    "encode_group",
    "group_digest",
    "payload_digest",
    "pin_task",
    "span_versions",
    "used_digest",
]


def decode_task(payload: bytes) -> PromptTask:
    """Raises ValueError when the bytes are no PromptTask."""
    try:
        return PromptTask.FromString(payload)
    except DecodeError as error:
        raise ValueError(f"not a PromptTask: {error}") from error


def decode_group(payload: bytes) -> RolloutGroup:
    """Raises ValueError when the bytes are no RolloutGroup or break its promises."""
    try:
        group = RolloutGroup.FromString(payload)
    except DecodeError as error:
        raise ValueError(f"not a RolloutGroup: {error}") from error
    check_group(group)
    return group


def encode_group(group: RolloutGroup) -> bytes:
    """The same bytes for the same group."""
    return group.SerializeToString(deterministic=True)


def payload_digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def group_digest(group: RolloutGroup) -> str:
    """SHA-256 of tokens, logprobs, spans, rewards, worker and all else, hex: what the audit log says of the group."""
    return payload_digest(encode_group(group))


def used_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 over `group id -> group_digest` of an iteration, hex, whatever their order."""
    lines = "".join(f"{group_id}\t{digest}\n" for group_id, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def check_group(group: RolloutGroup) -> None:
    """Raises ValueError naming the group, the response and what is wrong with it."""
    if group.HasField("failure"):
        if group.responses:
            raise ValueError(f"group {group.group_id}: a failed group holds no responses")
        return
    if not group.responses or not group.prompt_token_ids:
        raise ValueError(f"group {group.group_id}: has no prompt or no responses")
    for index, response in enumerate(group.responses):
        where = f"group {group.group_id}, response {index}"
        num_tokens = len(response.token_ids)
        if num_tokens == 0 or num_tokens != len(response.rollout_logprobs):
            raise ValueError(f"{where}: {num_tokens} tokens with {len(response.rollout_logprobs)} logprobs")
        if not math.isfinite(response.reward):
            raise ValueError(f"{where}: its reward is {response.reward}, not a finite number")
        check_spans(where, response, num_tokens)


def check_logprobs(group: RolloutGroup) -> None:
    """Apart from `check_group` because it looks at every token. Raises ValueError when one is not finite."""
    for index, response in enumerate(group.responses):
        if not math.isfinite(sum(response.rollout_logprobs)):
            raise ValueError(f"group {group.group_id}, response {index}: a logprob is not finite")


def check_spans(where: str, response: Response, num_tokens: int) -> None:
    end = 0
    for span in response.version_spans:
        if span.start != end or span.end <= span.start:
            raise ValueError(f"{where}: version spans leave a gap or overlap at token {end}")
        end = span.end
    if end != num_tokens:
        raise ValueError(f"{where}: version spans cover {end} of {num_tokens} tokens")


def span_versions(group: RolloutGroup) -> list[int]:
    """The distinct policy versions of all tokens, ascending."""
    return sorted({span.policy_version for response in group.responses for span in response.version_spans})


def pin_task(task: PromptTask, version: int) -> PromptTask:
    """A copy that asks for tokens of this policy version."""
    pinned = PromptTask()
    pinned.CopyFrom(task)
    pinned.policy_version = version
    return pinned
