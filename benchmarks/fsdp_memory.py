"""The peak resident memory of each of two FSDP2 ranks against one process, for a random Llama.

    python benchmarks/fsdp_memory.py full       0.4B parameters in float32: one process fits into 24 GB
    python benchmarks/fsdp_memory.py lora       0.7B parameters in float32
    python benchmarks/fsdp_memory.py lora_1b    1.0B parameters in float32
    python benchmarks/fsdp_memory.py full_1b    1.0B parameters in bfloat16: 22 GB in all, 14 minutes with AVX2 alone
    python benchmarks/fsdp_memory.py small      a model of 0.1B, only shown: overheads count for more

The files are bfloat16. A CPU without instructions for it multiplies it slowly, so most jobs are float32. Two ranks of
`full_1b` would not fit into 24 GB in float32; its groups are tiny, so that any CPU does it.

The trainer runs as a service, alone or started by torchrun, with a real Redis and its ledger. This script stands in for
broker and rollouts: it opens three iterations and submits groups of random tokens; the weights are not pulled
(`fsdp_stack.py` does it with real ones). The goal: a rank takes at most 0.6 of what one process takes.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, command_line, save, start, temporary_folder
from ledger_throughput import URL, redis_server
from memory import children_of, command_of

from onbeat.config import JobConfig
from onbeat.contracts.states import JobState
from onbeat.streams.codec import PromptTask
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from tests.tiny_models import build_tokenizer
from tests.trainer_fixtures import job_config, make_group
from tests.waiting import eventually

NUM_ITERATIONS, NUM_GROUPS = 3, 2
GOAL = 0.6
DEADLINE_S = 900.0  # limit for a version, and for the last checkpoint: 14 GB for 1.0B parameters in full
LORA = {"lora": {"rank": 16}}
NO_HISTORY = {"gac": {"mode": "off"}}  # the default keeps the last gradient, to compare the next one with
WIDTH = {"hidden_size": 1536, "intermediate_size": 4096}
BILLION = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}  # Llama 3.2 1B's shapes


@dataclass(frozen=True)
class Case:
    """A model, and the parts of the job that differ."""

    sizes: dict[str, int]
    sections: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    prompt_tokens: int = 16
    num_responses: int = 4  # responses of a group
    response_tokens: int = 12


CASES = {
    "full": Case({**WIDTH, "num_hidden_layers": 16}),
    "lora": Case({**WIDTH, "num_hidden_layers": 26}, LORA),
    "lora_1b": Case(BILLION, LORA),
    "full_1b": Case(BILLION, NO_HISTORY, "bfloat16", prompt_tokens=4, num_responses=2, response_tokens=1),
    "small": Case({"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}),
}


def write_model(folder: Path, sizes: dict[str, int]) -> int:
    """Write a random model in files of at most 500 MB; return its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=16_000, max_position_embeddings=512, **heads, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")
    build_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def trainer(num_ranks: int, pool: str, folder: Path) -> Iterator[int]:
    """Yield the process id of the trainer, or of the process that started its ranks."""
    command = [sys.executable, "-m", "services.trainer"]
    if num_ranks > 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command = [*launch, *command[1:]]
    settings = {"ONBEAT_REDIS_URL": URL, "ONBEAT_POOL": pool, "ONBEAT_DATA_DIR": str(folder), "ONBEAT_DEVICE": "cpu"}
    process = subprocess.Popen(command, env=os.environ | settings | {"ONBEAT_PARALLELISM": "fsdp"}, cwd=ROOT)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def peaks(root: int) -> list[float]:
    """Return the most that each rank has had in memory until now, in GB."""
    peaks_gb = []
    for pid in children_of(root):
        command = command_of(pid)
        if "services.trainer" in command and "torch.distributed.run" not in command:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            peaks_gb += [int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("VmHWM")]
    return [round(peak, 2) for peak in peaks_gb]


async def train(num_ranks: int, case: Case, config: JobConfig, folder: Path) -> dict[str, Any]:
    """Train the job; return the ranks' peaks until the first version is published, until the end, and the seconds."""
    redis = connect(URL)
    ledger, job_id, started = Ledger(redis), f"job-{uuid.uuid4().hex[:12]}", time.monotonic()
    await ledger.jobs.create(job_id, config.model_dump(mode="json"), NUM_ITERATIONS, 0)

    async def is_published(version: int) -> bool:
        fields = await ledger.jobs.fields(job_id)
        assert fields["state"] != JobState.FAILED, fields.get("error")
        return int(fields.get("policy_version", "-1")) == version

    async def is_over() -> bool:
        return (await ledger.jobs.state(job_id)).is_final

    with trainer(num_ranks, config.pool, folder) as root:
        loaded: list[float] = []
        for iteration in range(NUM_ITERATIONS):
            await eventually("a version", partial(is_published, iteration), DEADLINE_S)
            loaded = loaded or peaks(root)
            await play_rollouts(ledger, job_id, iteration, case)
        await eventually("the end", is_over, DEADLINE_S)
        assert await ledger.jobs.state(job_id) is JobState.SUCCEEDED
        trained = peaks(root)
    await redis.aclose()
    return {"loaded_gb": loaded, "trained_gb": trained, "wall_s": round(time.monotonic() - started, 1)}


async def play_rollouts(ledger: Ledger, job_id: str, iteration: int, case: Case) -> None:
    tasks = [PromptTask(group_id=f"{iteration}-{i}", iteration=iteration, text="x") for i in range(NUM_GROUPS)]
    assert await ledger.iterations.open(job_id, iteration, iteration, tasks) == ""
    for claim in await ledger.rollout.claim(job_id, "bench", NUM_GROUPS, DEADLINE_S):
        response_tokens = [case.response_tokens] * case.num_responses
        group = make_group(claim.task.group_id, case.prompt_tokens, response_tokens, iteration)
        group.worker_id = "bench"
        await ledger.rollout.submit(job_id, claim.entry_id, group)


def measure(case: Case, folder: Path) -> dict[str, Any]:
    num_parameters = write_model(folder / "model", case.sizes)
    results: dict[str, Any] = {"parameters": num_parameters, "dtype": case.dtype}
    config = job_config(
        model={"path": str(folder / "model"), "dtype": case.dtype},
        rollout={
            "num_prompts_per_iteration": NUM_GROUPS,
            "num_samples_per_prompt": case.num_responses,
            "max_response_tokens": case.response_tokens,
        },
        training={"max_tokens_per_micro_batch": case.prompt_tokens + case.num_responses * case.response_tokens},
        schedule={"num_iterations": NUM_ITERATIONS},
        **case.sections,
    )
    for num_ranks in (1, 2):
        pool = f"bench-{random.randrange(1 << 40):x}"
        with temporary_folder() as data_dir, redis_server("--save", ""):
            result = asyncio.run(train(num_ranks, case, config.model_copy(update={"pool": pool}), data_dir))
        results["one_process" if num_ranks == 1 else "two_ranks"] = result
    largest = max(results["two_ranks"]["trained_gb"])
    results["share"] = round(largest / results["one_process"]["trained_gb"][0], 3)
    return results


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("case", choices=CASES)
    name = start(parser).case
    with temporary_folder() as folder:
        result = measure(CASES[name], folder)
    if name == "small":
        print(result)
        return
    file = RESULTS / "fsdp_memory.json"
    known = json.loads(file.read_text())["cases"] if file.is_file() else {}
    cases = known | {name: result}
    cases = {case: cases[case] for case in CASES if case in cases}
    save("fsdp_memory", {"goal": f"share at most {GOAL}", "cases": cases})


if __name__ == "__main__":
    main()
