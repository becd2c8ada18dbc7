"""Three ways to the reward of a teacher, from the same start: the reward, the teacher, and the teacher's answers.

The quick start's job trains a teacher from the reward. Then two fresh copies of the same model learn: one from the
teacher alone, on its own responses (`examples/distill.toml`), the other from as many answers of the teacher as examples
(`jobs/examples_of_teacher.toml`). All have 64 responses or examples an iteration. After every iteration 64 held-out
prompts are scored. The reward is there when three of these scores in a row have a mean of 0.8.

Iterations compare the three on a busy machine, too. Seconds are those of the iterations up to then, without start and
evaluations' waits; they need an idle one.
"""

import json
import statistics
import tomllib
from pathlib import Path
from typing import Any

from harness import ROOT, command_line, own_dtype, run_job, save, start, temporary_folder

QUICKSTART, DISTILL = "examples/quickstart.toml", "examples/distill.toml"
EXAMPLES = ROOT / "benchmarks" / "jobs" / "examples_of_teacher.toml"
PROMPTS = ROOT / "services" / "broker" / "datasets" / "bundled" / "sums.jsonl"
WAYS = ("from_reward", "from_teacher", "from_answers")
NUM_ANSWERS, NUM_TOKENS, AT_ONCE = 15 * 64, 16, 64
WINDOW, WANTED = 3, 0.8


def first_there(scores: list[float]) -> int | None:
    """Return how many iterations the end of the first good window comes after. The first score is that of the start."""
    ends = range(WINDOW, len(scores) + 1)
    return next((end - 1 for end in ends if statistics.fmean(scores[end - WINDOW : end]) >= WANTED), None)


def course(report: dict[str, Any]) -> dict[str, Any]:
    """Return the curve of a run: held-out rewards, and when the reward was there."""
    scores = [
        record["reward_mean"] for record in sorted(report["evaluations"], key=lambda record: record["evaluation"])
    ]
    there, walls = first_there(scores), [iteration["wall_s"] for iteration in report["iterations"]]
    return {
        "iterations_to_reward": there,
        "seconds_to_reward": None if there is None else round(sum(walls[:there]), 1),
        "held_out": [round(score, 3) for score in scores],
    }


def write_answers(teacher: Path, folder: Path, seed: int) -> Path:
    """Let the teacher answer the first prompts of the data, once each, as rollouts would; return the job's file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    job = EXAMPLES.read_text(encoding="utf-8")
    system = tomllib.loads(job)["warm_start"]["data"]["system_prompt"]
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:NUM_ANSWERS]]
    tokenizer = AutoTokenizer.from_pretrained(teacher, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    rows = []
    for begin in range(0, NUM_ANSWERS, AT_ONCE):
        batch = prompts[begin : begin + AT_ONCE]
        chats = [[{"role": "system", "content": system}, {"role": "user", "content": prompt}] for prompt in batch]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": NUM_TOKENS}
        tokens = model.generate(**inputs, **sampling)[:, inputs["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        rows += [
            {"prompt": prompt, "response": answer}
            for prompt, answer in zip(batch, answers, strict=True)
            if answer.strip()
        ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / EXAMPLES.name).write_text(job, encoding="utf-8")
    return folder / EXAMPLES.name


def run_seed(seed: int) -> dict[str, dict[str, Any]]:
    """Train a teacher from the reward, a student from the teacher, and one from the teacher's answers."""
    settings = (f"seed={seed}", "evaluation.every_iterations=1")
    with temporary_folder() as folder:
        from_reward = course(run_job(QUICKSTART, *settings, options=("--data-dir", str(folder))))
        (teacher,) = last_checkpoints(folder)
        from_teacher = course(run_job(DISTILL, *settings, f"teacher.path={teacher}"))
        from_answers = course(run_job(str(write_answers(teacher, folder, seed)), *settings))
    return dict(zip(WAYS, (from_reward, from_teacher, from_answers), strict=True))


def last_checkpoints(folder: Path) -> list[Path]:
    """Return the newest checkpoint of each job in a data folder."""
    return [max(job.glob("checkpoints/iteration-*")) for job in (folder / "jobs").iterdir() if job.is_dir()]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = start(parser)
    runs: dict[str, dict[str, Any]] = {}
    for seed in arguments.seeds:
        runs[str(seed)] = run_seed(seed)
        print(seed, json.dumps(runs[str(seed)]), flush=True)
        medians = {
            way: statistics.median(run[way]["iterations_to_reward"] or float("inf") for run in runs.values())
            for way in WAYS
        }
        known = {way: None if median == float("inf") else median for way, median in medians.items()}
        goal = f"mean held-out reward of {WINDOW} evaluations >= {WANTED}"
        save("distill", {"goal": goal, "median_iterations": known, "by_seed": runs}, own_dtype())


if __name__ == "__main__":
    main()
