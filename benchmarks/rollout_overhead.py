"""The tokens per second of the whole rollout service against plain offline vLLM on the same prompts.

The service (claim, generate, score, submit; Redis, leases, pinned versions) runs a `sync` job: the trainer sleeps while
it generates. Then vLLM's own `LLM.generate` gets the very same prompts, seeds and settings, on the same core. The
learning rate is so small that the weights stay the same in bfloat16: both generate from the same policy.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import ROOT, command_line, quickstart_model, run_job, save, start, temporary_folder

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS, NUM_ITERATIONS, WARMUP, MAX_NUM_SEQS, CORE = 32, 8, 32, 5, 1, 64, 0


def through_the_service() -> list[float]:
    """Return the tokens per second of each iteration after warm-up."""
    os.environ["ONBEAT_MAX_NUM_SEQS"] = str(MAX_NUM_SEQS)
    report = run_job(
        "benchmarks/jobs/quickstart-0.1.toml",
        f"rollout.num_prompts_per_iteration={NUM_PROMPTS}",
        f"schedule.num_iterations={NUM_ITERATIONS}",
        "schedule.mode=sync",
        "optimizer.learning_rate=1e-12",
        options=("--rollout-cores", str(CORE), "--trainer-cores", "1"),
    )
    return [iteration["response_tokens"] / iteration["generate_s"] for iteration in report["iterations"][WARMUP:]]


def plain_vllm(model: str, output: Path) -> None:
    """Generate from the same prompts of the same iterations offline, in a process of its own on the rollout's core."""
    os.sched_setaffinity(0, {CORE})
    os.environ |= {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(CORE),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    import reasoning_gym
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    size = NUM_PROMPTS * NUM_ITERATIONS
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = reasoning_gym.create_dataset("chain_sum", seed=0, size=size, **options)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": task["question"]}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for task in tasks
    ]
    llm = LLM(
        model,
        dtype="bfloat16",
        block_size=32,  # as in the service's engine: vLLM's default of 128 on the CPU shares nothing of these prompts
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory_bytes=1 << 30,
        logprobs_mode="processed_logprobs",
        enable_chunked_prefill=False,
    )
    rates = []
    for iteration in range(NUM_ITERATIONS):
        batch = prompts[iteration * NUM_PROMPTS : (iteration + 1) * NUM_PROMPTS]
        params = [
            SamplingParams(n=GROUP_SIZE, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0, seed=1000 * index)
            for index in range(NUM_PROMPTS)
        ]
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started
        rates.append(sum(len(c.token_ids) for output in outputs for c in output.outputs) / elapsed_s)
    output.write_text(json.dumps(rates[WARMUP:]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--plain-vllm", nargs=2, help=argparse.SUPPRESS)
    if arguments := start(parser).plain_vllm:
        plain_vllm(arguments[0], Path(arguments[1]))
        return
    model = str(quickstart_model())
    service: list[float] = []
    plain: list[float] = []
    for _ in range(2):
        service += through_the_service()
        with temporary_folder() as folder:
            output = folder / "rates.json"
            command = [
                sys.executable,
                str(ROOT / "benchmarks" / "rollout_overhead.py"),
                "--plain-vllm",
                model,
                str(output),
            ]
            subprocess.run(command, check=True, timeout=900)
            plain += json.loads(output.read_text())
    save(
        "rollout_overhead",
        {
            "tokens_per_s": {"service": statistics.median(service), "plain_vllm": statistics.median(plain)},
            "ratio": statistics.median(service) / statistics.median(plain),
            "all": {"service": service, "plain_vllm": plain},
            "num_prompts": NUM_PROMPTS,
            "num_samples_per_prompt": GROUP_SIZE,
            "max_response_tokens": MAX_TOKENS,
            "max_num_seqs": MAX_NUM_SEQS,
            "core": CORE,
        },
    )


if __name__ == "__main__":
    main()
