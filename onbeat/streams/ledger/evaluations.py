"""The ledger of evaluations: held-out prompts that travel like training prompts, and end as a score. They leave
nothing in the streams that a trainer reads.

    due --> OPEN (prompts are out) --> DRAINED (all groups accepted) --> DONE (scored; what was generated is dropped)
     |        |
     +--------+--> FAILED (no prompts, or no progress): recorded as an event, never the end of a job
"""

import json
from collections.abc import Sequence

from onbeat.contracts.records import Sample
from onbeat.contracts.states import EvaluationState
from onbeat.streams.codec import PromptTask, RolloutGroup, decode_group, pin_task
from onbeat.streams.keys import ROLLOUT_GROUP, JobKeys
from onbeat.streams.ledger.scripts import GROUPS_AT_ONCE, LedgerPart

Scores = dict[str, float]


class Evaluations(LedgerPart):
    """The evaluations of all jobs of one Redis."""

    async def open(self, job_id: str, evaluation: int, version: int, following: int, tasks: list[PromptTask]) -> str:
        """Open an evaluation: dispatch its prompts, pinned to `version`, which must be the published policy version.

        `following` is the iteration of the evaluation after this one. Return '', or the reason why it was not opened.
        """
        job = JobKeys(job_id)
        pairs = [item for task in tasks for item in (task.group_id, pin_task(task, version).SerializeToString())]
        more_keys = [job.evaluation(evaluation), job.evaluation_groups(evaluation), job.prompts, job.open_evaluations]
        args = (evaluation, version, following, *pairs)
        reason: bytes = await self._run("open_evaluation", job, more_keys, *args)
        return reason.decode()

    async def finish(
        self, job_id: str, evaluation: int, message: str, scores: Scores, samples: Sequence[Sample] = ()
    ) -> bool:
        """Store the scores of a drained evaluation and drop its groups. Return False if another broker has done so."""
        texts = json.dumps([sample.model_dump() for sample in samples])
        return await self._end(job_id, evaluation, EvaluationState.DONE, evaluation, message, json.dumps(scores), texts)

    async def fail(self, job_id: str, evaluation: int, following: int, message: str) -> bool:
        """Give up an evaluation: one that cannot be opened (`following` is due next), or an open one without progress
        (`following` is its own number). Return False if it has ended, or if another broker could open it."""
        return await self._end(job_id, evaluation, EvaluationState.FAILED, following, message, "{}", "[]")

    async def _end(
        self, job_id: str, evaluation: int, state: EvaluationState, following: int, message: str, *details: str
    ) -> bool:
        job = JobKeys(job_id)
        job_keys = [job.evaluation(evaluation), job.evaluation_groups(evaluation), job.prompts, job.open_evaluations]
        more_keys = [*job_keys, job.evaluation_results(evaluation)]
        args = (evaluation, state, following, ROLLOUT_GROUP, message, *details)
        return bool(await self._run("end_evaluation", job, more_keys, *args))

    async def state(self, job_id: str, evaluation: int) -> EvaluationState | None:
        """Return the evaluation's state; None when it was not opened yet."""
        state = await self.redis.hget(JobKeys(job_id).evaluation(evaluation), "state")
        return EvaluationState(state.decode()) if state else None

    async def fields(self, job_id: str, evaluation: int) -> dict[str, str]:
        """Return the evaluation hash as text; empty when it was never opened."""
        return await self._texts(JobKeys(job_id).evaluation(evaluation))

    async def open_ones(self, job_id: str) -> list[int]:
        """Return the evaluations that have not ended, ascending."""
        return sorted(int(number) for number in await self.redis.smembers(JobKeys(job_id).open_evaluations))

    async def groups(self, job_id: str, evaluation: int) -> list[RolloutGroup]:
        """Return the groups generated so far; empty after the end."""
        results, after = JobKeys(job_id).evaluation_results(evaluation), "-"
        groups: list[RolloutGroup] = []
        while page := await self.redis.xrange(results, after, count=GROUPS_AT_ONCE):
            groups += [decode_group(fields[b"group"]) for _, fields in page]
            after = f"({page[-1][0].decode()}"
        return groups
