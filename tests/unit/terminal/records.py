"""Records of a job with numbers that are easily computed by hand."""

from typing import Any

from onbeat.contracts.records import EvaluationRecord, IterationRecord


def evaluation_record(evaluation: int, is_done: bool = True) -> EvaluationRecord:
    fields: dict[str, Any] = {"evaluation": evaluation, "policy_version": evaluation, "num_groups": 4}
    scores = {"reward_mean": evaluation / 10, "pass_at_k": 0.5, "response_tokens_mean": 7.0, "truncated_frac": 0.25}
    return EvaluationRecord(**fields, state="DONE", **scores) if is_done else EvaluationRecord(**fields, state="OPEN")


def iteration_record(iteration: int, is_committed: bool = True, **changes: Any) -> IterationRecord:
    fields = {"iteration": iteration, "policy_version": iteration, "num_groups": 2, "opened_at": 100.0 + 2 * iteration}
    if is_committed:
        fields |= {"state": "COMMITTED", "num_accepted": 2, "num_responses": 8, "prompt_tokens": 40, "num_stale": 1}
        fields |= {"response_tokens": 60, "reward_mean": iteration / 10, "wall_s": 2.0, "tpspd": 25.0}
        fields |= {"committed_at": 102.0 + 2 * iteration}
    else:
        fields |= {"state": "OPEN", "num_accepted": 1}
    return IterationRecord.model_validate(fields | changes)
