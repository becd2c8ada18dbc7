"""The throughput that an environment costs which takes 2 seconds before each of its turns; the goal: at most 15%.

The same job runs with an environment that answers at once, with the idle one, and with the idle one while the rollout
plays no more groups than fit into the engine: that is what waiting would cost if it held the engine's places. Answers
have the same length everywhere (see vs_trl.py), and the rewards are all equal, so that no time goes into training.
"""

import os
import statistics
from pathlib import Path

from bench_environments import install
from harness import command_line, own_dtype, quickstart_model, run_job, save, start, temporary_folder
from vs_trl import copy_without_end

IDLE_S, NUM_TURNS, NUM_TOKENS, GROUP_SIZE, MAX_NUM_SEQS, WARMUP = 2.0, 4, 16, 8, 32, 1
NUM_ENGINE_GROUPS = MAX_NUM_SEQS // GROUP_SIZE + 1  # as many as the engine takes, and one that waits inside it
NUM_PROCESSES = 32
GOAL = 0.15

Measured = dict[str, float]  # tokens per second, and the share of the prompts' tokens that the engine had in its cache


def measure(model: Path, idle_s: float, num_processes: int, num_prompts: int, num_iterations: int) -> list[Measured]:
    """Measure each iteration after warm-up, from its first group's start to its last one's acceptance."""
    os.environ |= {"ONBEAT_MAX_NUM_SEQS": str(MAX_NUM_SEQS), "ONBEAT_ENVIRONMENT_PROCESSES": str(num_processes)}
    options = f"{{num_turns={NUM_TURNS}, idle_s={idle_s}}}"
    report = run_job(
        "examples/game.toml",
        f"model.path={model}",
        f'environment={{name="bench_idle", options={options}, max_turns={NUM_TURNS}, timeout_s=600.0}}',
        f"rollout.num_prompts_per_iteration={num_prompts}",
        f"rollout.num_samples_per_prompt={GROUP_SIZE}",
        f"rollout.max_response_tokens={NUM_TOKENS}",
        "rollout.group_deadline_s=1200",
        "schedule.mode=sync",
        f"schedule.num_iterations={num_iterations}",
    )
    for iteration in report["iterations"]:
        expected = num_prompts * GROUP_SIZE * NUM_TURNS * NUM_TOKENS
        assert iteration["response_tokens"] == expected, f"{iteration['response_tokens']} tokens, not {expected}"
    return [
        {
            "tokens_per_s": iteration["response_tokens"] / iteration["generate_s"],
            "cached_frac": iteration["metrics"]["episode/cached_frac"],
        }
        for iteration in report["iterations"][WARMUP:]
    ]


def main(num_prompts: int, num_iterations: int) -> None:
    settings = {"at_once": (0.0, NUM_PROCESSES), "idle": (IDLE_S, NUM_PROCESSES)}
    settings["idle_in_engine_places_only"] = (IDLE_S, NUM_ENGINE_GROUPS)
    with temporary_folder() as folder:
        install(folder / "site")
        model = copy_without_end(quickstart_model(), folder / "model")
        iterations = {name: measure(model, *limits, num_prompts, num_iterations) for name, limits in settings.items()}
    medians = {
        name: statistics.median(iteration["tokens_per_s"] for iteration in records)
        for name, records in iterations.items()
    }
    save(
        "idle_environment",
        {
            "tokens_per_s": medians,
            "throughput_lost": {name: 1 - rate / medians["at_once"] for name, rate in medians.items()},
            "goal_of_idle": GOAL,
            "iterations": iterations,
            "idle_s_per_turn": IDLE_S,
            "num_turns": NUM_TURNS,
            "tokens_per_turn": NUM_TOKENS,
            "num_prompts": num_prompts,
            "num_samples_per_prompt": GROUP_SIZE,
            "responses_in_the_engine_at_a_time": MAX_NUM_SEQS,
            "groups_played_at_a_time": {name: limits[1] for name, limits in settings.items()},
        },
        own_dtype(),
    )


if __name__ == "__main__":
    start(command_line(__doc__))
    main(num_prompts=64, num_iterations=4)  # the first iteration is not counted
