"""The tokens per second of the whole rollout service against plain offline vLLM on the same prompts.

The service (claim, generate, score, submit; Redis, leases, pinned versions) runs a `sync` job: the trainer sleeps while
it generates. Then vLLM's own `LLM.generate` gets the very same prompts, seeds and settings, on the same core. The
learning rate is so small that the weights stay the same in bfloat16: both generate from the same policy.

At last vLLM generates in one process under PyTorch's profiler: the shares of its time by operator, which are printed as
the table of docs/performance.md. What no listed operator takes is Python (the scheduler, the model's layers, the
outputs), the profiler itself, and operators that take next to nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import ROOT, command_line, quickstart_model, run_job, save, start, temporary_folder

NUM_ROUNDS = 3
NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS, NUM_ITERATIONS, WARMUP, MAX_NUM_SEQS, CORE = 32, 8, 32, 5, 1, 64, 0
PRODUCTS, ATTENTION, SAMPLING = "matrix products", "attention and its cache", "sampling"
COPIES, ELEMENTS, REST = "copies and conversions", "norms, SiLU, sums of residuals", "Python and small operators"
LEAST_LISTED = 0.02  # share of the time from which an operator must have a part
PARTS = {  # part of the time -> operators, by their profiled names
    PRODUCTS: ("onednn_mm", "weight_packed_linear", "mm", "addmm", "linear"),
    ATTENTION: (
        *("cpu_attention_with_kv_cache", "cpu_attn_reshape_and_cache", "unified_attention_with_output"),
        *("unified_kv_cache_update", "get_scheduler_metadata", "rotary_embedding"),
    ),
    SAMPLING: ("_softmax", "_log_softmax", "ge", "fused_gumbel_argmax", "exponential_", "argmax", "gather", "random_"),
    COPIES: ("copy_", "_to_copy", "to", "index_select"),
    ELEMENTS: ("mul", "silu", "sum", "add", "pow", "div_", "mean", "rsqrt", "rms_norm", "fused_add_rms_norm"),
}


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


def plain_vllm(model: str, output: Path, is_profiled: bool) -> None:
    """Generate from the same prompts of the same iterations offline, in a process of its own on the rollout's core."""
    os.sched_setaffinity(0, {CORE})
    os.environ |= {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(CORE),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not is_profiled)),  # the profiler sees one process
    }
    import reasoning_gym
    from torch.profiler import ProfilerActivity, profile
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

    def generate(iteration: int) -> tuple[int, float]:
        """Return the tokens of an iteration, and the seconds that they took."""
        batch = prompts[iteration * NUM_PROMPTS : (iteration + 1) * NUM_PROMPTS]
        params = [
            SamplingParams(n=GROUP_SIZE, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0, seed=1000 * index)
            for index in range(NUM_PROMPTS)
        ]
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        return sum(len(c.token_ids) for output in outputs for c in output.outputs), time.perf_counter() - started

    if is_profiled:
        generate(0)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            _, elapsed_s = generate(1)
        output.write_text(json.dumps(shares(profiled, elapsed_s)))
        return
    rates = [num_tokens / elapsed_s for num_tokens, elapsed_s in map(generate, range(NUM_ITERATIONS))]
    output.write_text(json.dumps(rates[WARMUP:]))


def shares(profiled: Any, elapsed_s: float) -> dict[str, float]:
    """Return the share of the time that each part took."""
    part_of = {name: part for part, names in PARTS.items() for name in names}
    taken_s = dict.fromkeys(PARTS, 0.0)
    for operator in profiled.key_averages():
        own_s = operator.self_cpu_time_total / 1e6
        if (part := part_of.get(operator.key.rpartition("::")[2])) is not None:
            taken_s[part] += own_s
        elif own_s > LEAST_LISTED * elapsed_s:
            raise SystemExit(f"{operator.key} takes {own_s / elapsed_s:.1%} of the time: give it a part in PARTS")
    taken_s[REST] = elapsed_s - sum(taken_s.values())
    return {part: part_s / elapsed_s for part, part_s in taken_s.items()}


def run_plain(model: str, *options: str) -> Any:
    """Run this script as the process of plain vLLM, and return its result."""
    with temporary_folder() as folder:
        output = folder / "result.json"
        script = str(ROOT / "benchmarks" / "rollout_overhead.py")
        command = [sys.executable, script, "--plain-vllm", model, str(output), *options]
        subprocess.run(command, check=True, timeout=900)
        return json.loads(output.read_text())


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--plain-vllm", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    arguments = start(parser)
    if arguments.plain_vllm:
        plain_vllm(arguments.plain_vllm[0], Path(arguments.plain_vllm[1]), arguments.profiled)
        return
    model = str(quickstart_model())
    service: list[float] = []
    plain: list[float] = []
    ratios = []
    for _ in range(NUM_ROUNDS):
        by_service, by_plain = through_the_service(), run_plain(model)
        ratios.append(statistics.median(by_service) / statistics.median(by_plain))
        service += by_service
        plain += by_plain
    parts = run_plain(model, "--profiled")
    save(
        "rollout_overhead",
        {
            "tokens_per_s": {"service": statistics.median(service), "plain_vllm": statistics.median(plain)},
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "all": {"service": service, "plain_vllm": plain},
            "shares_of_plain_vllm": parts,
            "num_prompts": NUM_PROMPTS,
            "num_samples_per_prompt": GROUP_SIZE,
            "max_response_tokens": MAX_TOKENS,
            "max_num_seqs": MAX_NUM_SEQS,
            "core": CORE,
        },
    )
    print("\n".join(["| part | share |", "|---|---|", *(f"| {part} | {share:.0%} |" for part, share in parts.items())]))


if __name__ == "__main__":
    main()
