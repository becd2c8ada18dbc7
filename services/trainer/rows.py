"""The rows of supervised iterations on their way to training: the broker opens an iteration with conversations, and the
trainer that owns the job tokenises them and records the tokens, once, as groups that are accepted.

From there on a row is a group: packed, recorded in micro-batches, replayed and audited as the others are.
"""

import json
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from onbeat.config import JobConfig
from onbeat.contracts.errors import JobFailed
from onbeat.contracts.model_config import context_tokens
from onbeat.contracts.states import IterationState, JobState
from onbeat.streams.codec import GroupFailure, RolloutGroup
from services.prompts.tokenizer import load_tokenizer
from services.trainer.feed import BROKER_FIRST_S
from services.trainer.job.lease import Lease
from services.trainer.supervised import RowTokenizer, SupervisedRow, SupervisedRowError

POLL_S = 0.02
TOO_LONG = "row_too_long"


@dataclass(frozen=True)
class RowRecorder:
    """The recorder of a job's rows, on the rank that writes to the ledger."""

    lease: Lease
    config: JobConfig
    tokenizer: RowTokenizer
    max_tokens: int | None  # longest row; None: the model has no limit
    trainer_id: str

    @classmethod
    def create(cls, lease: Lease, config: JobConfig, source: str, model: Any, trainer_id: str) -> "RowRecorder":
        assert config.warm_start is not None
        tokenizer = load_tokenizer(source, config.model.chat_template)
        limits = (config.model.max_context_tokens, context_tokens(model.config.to_dict()))
        max_tokens = min((limit for limit in limits if limit is not None), default=None)
        rows = RowTokenizer(tokenizer, config.rendering, config.warm_start.learn)
        return cls(lease, config, rows, max_tokens, trainer_id)

    def record(self, iteration: int) -> None:
        """Wait until the iteration is open, and record the tokens of its rows, unless they are recorded.

        Raises JobFailed for a row that cannot be learned, and after the iteration's deadline.
        """
        deadline_s = self.config.schedule.iteration_deadline_s + BROKER_FIRST_S
        deadline = time.monotonic() + deadline_s
        self.lease.status.wait_for_rows(iteration)
        iterations, job_id = self.lease.ledger.iterations, self.lease.job.id
        while (state := self.lease.run(iterations.state(job_id, iteration))) is None:
            if self.lease.check() is JobState.PAUSED:
                deadline = time.monotonic() + deadline_s
            if time.monotonic() > deadline:
                raise JobFailed(f"iteration {iteration}: no rows came for {deadline_s:.0f} s; is a broker running?")
            time.sleep(POLL_S)
        if state is not IterationState.OPEN:
            return
        rows = self.lease.run(iterations.rows(job_id, iteration))
        groups = [
            self.tokenize(iteration, group_id, json.loads(row)) for group_id, row in sorted(rows.items(), key=place)
        ]
        recording = self.lease.ledger.trainer.record_rows(
            job_id, self.lease.job.epoch, iteration, self.trainer_id, groups
        )
        self.lease.run(recording)

    def held_out(self) -> list[SupervisedRow]:
        """Return the tokens of the rows on which the loss is measured, without those that are dropped. Raises
        JobFailed."""
        iterations, job_id = self.lease.ledger.iterations, self.lease.job.id
        rows = [json.loads(row) for row in self.lease.run(iterations.held_out_rows(job_id))]
        tokens = [self._tokens(row, "warm_start.held_out.data") for row in rows]
        kept = [row for row in tokens if isinstance(row, SupervisedRow)]
        if not kept:
            raise JobFailed(
                f"warm_start.held_out.data: each of the {len(rows)} rows is longer than the context of "
                f"{self.max_tokens} tokens; shorten them, or leave out warm_start.held_out"
            )
        return kept

    def _tokens(self, row: dict[str, Any], field: str) -> SupervisedRow | str:
        """Return the tokens of a row, or why it is dropped. Raises JobFailed for one that is refused."""
        start = self.config.warm_start
        assert start is not None
        try:
            tokens = self.tokenizer.tokenize(row["messages"])
        except SupervisedRowError as error:
            raise JobFailed(f"{field}: row {row['row']} {error}") from error
        if self.max_tokens is None or len(tokens.token_ids) <= self.max_tokens:
            return tokens
        problem = f"row {row['row']} has {len(tokens.token_ids)} tokens, and the context has {self.max_tokens}"
        if start.on_too_long == "refuse":
            raise JobFailed(f"{field}: {problem}; shorten it, or set warm_start.on_too_long = 'drop'")
        return problem

    def tokenize(self, iteration: int, group_id: str, row: dict[str, Any]) -> RolloutGroup:
        """Return the row as a group: without a response if it is to be dropped. Raises JobFailed."""
        messages, tokens, group = row["messages"], self._tokens(row, "warm_start.data"), RolloutGroup(group_id=group_id)
        if isinstance(tokens, str):
            group.failure.CopyFrom(GroupFailure(kind=TOO_LONG, message=tokens))
        else:
            group = tokens.as_group(group_id)
            add_texts(group, messages)
        group.iteration = group.policy_version = iteration
        group.is_supervised, group.worker_id, group.data_row = True, self.trainer_id, row["row"]
        return group


def place(row: tuple[str, str]) -> int:
    """Return the place of a group in its iteration, from its id."""
    return int(row[0].rpartition("-")[2])


def add_texts(group: RolloutGroup, messages: list[dict[str, str]]) -> None:
    """Add the texts of a row for people to read: the learned answers, and what comes before each."""
    (response,) = group.responses
    num_learned = max(1, len(response.turns))
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"][-num_learned:]
    group.prompt_text = shown(messages[: places[0]])
    response.text = "".join(messages[place]["content"] for place in places)
    for turn, (before, place) in zip(response.turns, pairwise([places[0], *places]), strict=False):
        turn.num_characters = len(messages[place]["content"])
        turn.messages_json = json.dumps(messages[before + 1 : place])


def shown(messages: list[dict[str, str]]) -> str:
    """Return the messages before the last answer, as people read them."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
