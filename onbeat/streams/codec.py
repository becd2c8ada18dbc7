"""The messages of the streams: protobuf, checked on arrival. No other module uses the generated ones.

A RolloutGroup that passes `decode_group` keeps the promises of rollout.proto: one logprob per token, rewards in bounds,
version spans that cover every response exactly, the length of each token's text or none, turns that are a tree and
sampled all of the tokens, and kinds of failed episodes that there are. Logprobs are checked to be finite where they are
made and used, durations and the sum of the lengths where a group is submitted.
"""

import math
from array import array
from collections.abc import Mapping

from blake3 import blake3
from google.protobuf.message import DecodeError

from onbeat.contracts.records import MAX_TURNS
from onbeat.contracts.states import EpisodeFailureKind
from onbeat.rollout.v1.rollout_pb2 import (
    Environment,
    GroupFailure,
    Message,
    PromptPart,
    PromptTask,
    Response,
    Reward,
    RolloutGroup,
    Timings,
    Turn,
    VersionSpan,
)

__all__ = [  # the generated messages that other modules import from here
    "Environment",
    "GroupFailure",
    "Message",
    "PromptPart",
    "PromptTask",
    "Response",
    "Reward",
    "RolloutGroup",
    "Timings",
    "Turn",
    "VersionSpan",
]

MAX_REWARD = 1_000_000  # largest absolute value: squares, sums and float32 values stay finite
MAX_DURATION_S = 1e9  # 30 years: sums of durations stay finite
MAX_GROUP_BYTES = 500 << 20  # Redis takes 512 MB in one value


def decode_task(payload: bytes) -> PromptTask:
    """Decode a PromptTask. Raise ValueError when the bytes are none."""
    try:
        return PromptTask.FromString(payload)
    except DecodeError as error:
        raise ValueError(f"not a PromptTask: {error}") from error


def decode_group(payload: bytes) -> RolloutGroup:
    """Decode a RolloutGroup. Raise ValueError when the bytes are none, or it breaks its promises."""
    try:
        group = RolloutGroup.FromString(payload)
    except DecodeError as error:
        raise ValueError(f"not a RolloutGroup: {error}") from error
    check_content(group)  # not the durations: an entry may have been accepted before they were checked
    return group


def encode_group(group: RolloutGroup) -> bytes:
    """Encode a group; the same group gives the same bytes."""
    return group.SerializeToString(deterministic=True)


def payload_digest(payload: bytes) -> str:
    return blake3(payload).hexdigest()


def group_digest(group: RolloutGroup) -> str:
    """Return the BLAKE3, hex, of the whole group (tokens, logprobs, spans, rewards, worker): the audit log has it."""
    return payload_digest(encode_group(group))


def used_digest(digests: Mapping[str, str]) -> str:
    """Return the BLAKE3, hex, over `group id -> group_digest` of an iteration, in any order."""
    lines = "".join(f"{group_id}\t{digest}\n" for group_id, digest in sorted(digests.items()))
    return blake3(lines.encode()).hexdigest()


def check_group(group: RolloutGroup) -> None:
    """Check a group before it is submitted. Raise ValueError naming the group, the response and the problem."""
    turns = [turn for response in group.responses for turn in response.turns]
    durations = [(name, getattr(group.timings, name)) for name in ("generate_s", "score_s", "worker_busy_s")]
    durations += [
        (name, getattr(interval, name)) for interval in group.timings.in_engine for name in ("start_s", "end_s")
    ]
    durations += [(name, getattr(turn, name)) for turn in turns for name in ("waited_s", "generate_s")]
    for name, duration_s in durations:
        if not 0 <= duration_s <= MAX_DURATION_S:
            reason = f"its {name} is {duration_s}, not seconds from 0 to {MAX_DURATION_S:.0f}"
            raise ValueError(f"group {group.group_id}: {reason}")
    if (num_bytes := group.ByteSize()) > MAX_GROUP_BYTES:
        remedy = "lower rollout.num_samples_per_prompt, rollout.max_response_tokens or environment.max_turns"
        raise ValueError(f"group {group.group_id}: {num_bytes} bytes, of at most {MAX_GROUP_BYTES}; {remedy}")
    check_content(group)


def check_content(group: RolloutGroup) -> None:
    """Check all of a group but its durations. Raise ValueError like `check_group`."""
    name = f"group {group.group_id}"
    if unknown := sorted(set(group.failed_episodes) - set(EpisodeFailureKind)):
        kinds = ", ".join(EpisodeFailureKind)
        raise ValueError(f"{name}: {unknown[0]!r:.80} is no kind of a failed episode; there are: {kinds}")
    if group.HasField("failure"):
        if group.responses:
            raise ValueError(f"{name}: a failed group holds no responses")
        if not group.failure.kind:
            raise ValueError(f"{name}: its failure has no kind; set failure.kind, say generation_failed")
        return
    if not group.responses or not group.prompt_token_ids:
        raise ValueError(f"{name}: has no prompt or no responses")
    for index, response in enumerate(group.responses):
        problem = problem_of_row(response) if group.is_supervised else problem_of(response)
        if problem := problem or problem_of_turns(response, len(group.prompt_token_ids)):
            raise ValueError(f"{name}, response {index}: {problem}")


def problem_of(response: Response) -> str:
    """Return the problem with a response, or ''."""
    num_tokens, num_logprobs = len(response.token_ids), len(response.rollout_logprobs)
    if num_tokens == 0 or num_tokens != num_logprobs:
        return f"{num_tokens} tokens with {num_logprobs} logprobs"
    if not -MAX_REWARD <= response.reward <= MAX_REWARD:
        return f"its reward is {response.reward}, not a number from -{MAX_REWARD} to {MAX_REWARD}"
    if response.has_no_reward and response.reward != 0:
        return f"it has no reward, and its reward is {response.reward}"
    if len(response.token_lengths) not in (0, num_tokens):
        return f"{num_tokens} tokens with the lengths of {len(response.token_lengths)}"
    end = 0
    for span in response.version_spans:
        if span.start != end or span.end <= span.start:
            return f"version spans leave a gap or overlap at token {end}"
        end = span.end
    return "" if end == num_tokens else f"version spans cover {end} of {num_tokens} tokens"


def problem_of_row(response: Response) -> str:
    """Return the problem with the response of a row of examples, or ''."""
    if not response.token_ids:
        return "no token of the row is learned"
    has_more = response.rollout_logprobs or response.version_spans or not response.has_no_reward
    return "a row has no logprobs, no versions and no reward" if has_more else ""


def problem_of_turns(response: Response, num_prompt: int) -> str:
    """Return the problem with the turns of an episode, or ''. `num_prompt`: tokens of the group's prompt."""
    if not response.turns:
        return ""
    if len(response.turns) > MAX_TURNS:  # readers walk from turn to turn
        return f"it has {len(response.turns)} turns, of at most {MAX_TURNS}"
    path_lengths: list[int] = []  # tokens up to the end of each turn
    for index, turn in enumerate(response.turns):
        if turn.HasField("parent") and turn.parent >= index:
            return f"turn {index} follows turn {turn.parent}, which is not before it"
        longest = path_lengths[turn.parent] if turn.HasField("parent") else num_prompt
        if not num_prompt <= turn.num_shared <= longest:
            return f"turn {index} shares {turn.num_shared} tokens, not {num_prompt} to {longest}"
        if turn.num_sampled < 1:
            return f"turn {index} sampled no token"
        num_tokens = turn.num_shared + len(turn.observed_token_ids)
        if turn.num_cached_tokens > num_tokens:
            return f"turn {index} has {turn.num_cached_tokens} cached tokens of a prompt of {num_tokens}"
        path_lengths.append(num_tokens + turn.num_sampled)
    num_sampled, num_tokens = sum(turn.num_sampled for turn in response.turns), len(response.token_ids)
    if num_sampled != num_tokens:
        return f"its turns sampled {num_sampled} tokens, and it has {num_tokens}"
    num_characters = sum(turn.num_characters for turn in response.turns)
    return "" if num_characters == len(response.text) else f"its turns gave {num_characters} characters of its text"


def check_logprobs(group: RolloutGroup) -> None:
    """Raise ValueError when a logprob is not finite. This is not in `check_group` because it looks at every token."""
    for index, response in enumerate(group.responses):
        if not math.isfinite(sum(response.rollout_logprobs)):
            raise ValueError(f"group {group.group_id}, response {index}: a logprob is not finite")


def check_token_lengths(group: RolloutGroup) -> None:
    """Raise ValueError when the lengths of tokens do not add up to the text. This looks at every token, too."""
    for index, response in enumerate(group.responses):
        num_counted, num_characters = sum(response.token_lengths), len(response.text)
        if response.token_lengths and num_counted != num_characters:
            text = f"its tokens gave {num_counted} characters of a text of {num_characters}; leave token_lengths empty"
            raise ValueError(f"group {group.group_id}, response {index}: {text}")


def given_rewards(group: RolloutGroup) -> list[float]:
    """Return the rewards of the responses that have one; none if it failed."""
    return [response.reward for response in group.responses if not response.has_no_reward]


def do_rewards_differ(group: RolloutGroup) -> bool:
    """Return whether responses of the group got rewards that differ in float32, in which advantages are computed; False
    if it failed."""
    return len(set(array("f", given_rewards(group)))) > 1


def is_truncated(response: Response) -> bool:
    """Return whether the response was cut at its limit of tokens; an episode is as soon as one of its turns was."""
    return "length" in (response.finish_reason, *(turn.finish_reason for turn in response.turns))


def span_versions(group: RolloutGroup) -> list[int]:
    """Return the distinct policy versions of all tokens, ascending."""
    return sorted({span.policy_version for response in group.responses for span in response.version_spans})


def pin_task(task: PromptTask, version: int) -> PromptTask:
    """Return a copy of the task that asks for tokens of this policy version."""
    pinned = PromptTask()
    pinned.CopyFrom(task)
    pinned.policy_version = version
    return pinned
