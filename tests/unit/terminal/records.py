"""Records of a job as the REST API gives them, with numbers that are easily computed by hand."""

from typing import Any


def evaluation_json(evaluation: int, state: str = "DONE") -> dict[str, Any]:
    record: dict[str, Any] = {"evaluation": evaluation, "state": state, "policy_version": evaluation, "num_groups": 4}
    if state == "DONE":
        record |= {
            "reward_mean": evaluation / 10,
            "pass_at_k": 0.5,
            "response_tokens_mean": 7.0,
            "truncated_frac": 0.25,
        }
    return record


def weights_json(version: int, open_s: float | None = None) -> dict[str, Any]:
    """1000 bytes, of which two rollouts get 10 as a delta. The first version they get in full."""
    update = {"received_bytes": 10 if version else 1000, "sources": ["h:1"], "pull_s": 0.2, "apply_s": 0.1}
    update |= {"load_s": 0.3, "open_s": open_s, "held_s": None, "num_faults": 0}
    published = {"full_bytes": 1000, "delta_bytes": 10 if version else None, "encode_s": 0.05, "publish_s": 0.4}
    return {"policy_version": version, **published, "rollouts": {"rollout-0": update, "rollout-1": update}}


def iteration_json(iteration: int, is_committed: bool = True) -> dict[str, Any]:
    record: dict[str, Any] = {
        "iteration": iteration,
        "state": "COMMITTED" if is_committed else "OPEN",
        "policy_version": iteration,
        "num_groups": 2,
        "num_accepted": 2 if is_committed else 1,
        "opened_at": 100.0 + 2 * iteration,
    }
    if is_committed:
        record |= {"num_responses": 8, "prompt_tokens": 40, "response_tokens": 60, "reward_mean": iteration / 10}
        record |= {"wall_s": 2.0, "tpspd": 25.0, "num_stale": 1, "committed_at": 102.0 + 2 * iteration}
    return record
