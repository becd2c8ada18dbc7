"""A trainer of scale.py, in a process of its own: its real loop over recorded iterations of a random model.

    scale.py -- starts -->  scale_trainer.py MODEL_FOLDER full|LoRA RESULT.json

Each iteration has two micro-batches: one row of several groups, and one row of one group. What a rollout does with the
delta of a version, apply and verify, is timed at the end.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from harness import own_dtype, seconds
from iteration_cost import LORA, RANK, Row

from onbeat.config import JobConfig
from onbeat.machine.malloc import give_back_freed
from onbeat.weights import delta
from onbeat.weights.wire import DTYPE_BYTES
from services.trainer.checkpoints.store import TrainState
from services.trainer.job.interface import Commit
from services.trainer.loop import TrainLoop
from services.trainer.policy import load_policy
from services.trainer.replay import NoCheckpoints, RecordedJob
from services.trainer.weights.store import Snapshot, WeightStore, num_served
from services.trainer.world import ALONE
from tests.trainer_fixtures import make_group

NUM_THREADS = 2
GROUPS_IN_ROW, PROMPT_TOKENS, NUM_RESPONSES, RESPONSE_TOKENS = 4, 56, 4, 19
# The last token of a response is predicted, and not read.
SHORT = Row(PROMPT_TOKENS + NUM_RESPONSES * (RESPONSE_TOKENS - 1), NUM_RESPONSES * RESPONSE_TOKENS)
LONG = Row(GROUPS_IN_ROW * SHORT.tokens, GROUPS_IN_ROW * SHORT.sampled)
NUM_ITERATIONS = 4  # the first one warms up
LEARNING_RATE = 1e-5


class ServedJob(RecordedJob):
    """A recorded job that keeps its versions as the trainer's service does, and that nobody pulls from."""

    def __init__(self, config: JobConfig) -> None:
        lengths, micro_batches = (RESPONSE_TOKENS,) * NUM_RESPONSES, {}
        for iteration in range(NUM_ITERATIONS):
            *in_long_row, alone = [f"{iteration}-{index}" for index in range(GROUPS_IN_ROW + 1)]
            micro_batches[iteration] = [in_long_row, [alone]]
        ids = [group_id for batches in micro_batches.values() for batch in batches for group_id in batch]
        groups = [make_group(name, PROMPT_TOKENS, lengths, version=int(name.partition("-")[0])) for name in ids]
        super().__init__(groups, micro_batches)
        self.passes_s: list[list[float]] = []  # seconds of an iteration's long row, and of its short one
        self._store = WeightStore(num_served(config))

    def hold(self, snapshot: Snapshot, delta_bytes: int | None) -> None:
        self._store.add(snapshot, delta_bytes)

    def withdraw(self) -> None:
        asyncio.run(self._store.withdraw())

    def commit(self, commit: Commit) -> bool:
        self.passes_s.append([span.end - span.start for span in commit.spans if span.kind == "micro_batch"])
        return super().commit(commit)

    @property
    def newest(self) -> Snapshot:
        snapshot = self._store.newest()
        assert snapshot is not None, "nothing was published"
        return snapshot


def job_config(folder: Path, kind: str, dtype: str) -> JobConfig:
    sections = {
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"type": "jsonl", "path": "none.jsonl"},
        "reward": {"name": "exact"},
        "rollout": {
            "num_prompts_per_iteration": GROUPS_IN_ROW + 1,
            "num_samples_per_prompt": NUM_RESPONSES,
            "max_response_tokens": RESPONSE_TOKENS,
        },
        "optimizer": {"learning_rate": LEARNING_RATE},
        "training": {"max_tokens_per_micro_batch": LONG.tokens},
        "gac": {"mode": "off"},
        "schedule": {"num_iterations": NUM_ITERATIONS},
    }
    return JobConfig.model_validate(sections | ({"lora": {"rank": RANK}} if kind == LORA else {}))


def measure(folder: Path, kind: str) -> dict[str, Any]:
    config = job_config(folder, kind, own_dtype())
    policy, reason = load_policy(str(folder), config, ALONE, is_sharded=False)
    assert not reason, reason
    give_back_freed()  # as a job's session does: loading took the model's size twice
    job = ServedJob(config)
    with tempfile.TemporaryDirectory() as scratch:
        TrainLoop(job, config, policy, TrainState("scale", str(folder)), NoCheckpoints(Path(scratch), keep=1)).run()
    peak = peak_bytes()  # before this process does a rollout's work
    iterations = [job.metrics[index] for index in range(1, NUM_ITERATIONS)]
    assert job.newest.delta is not None, "versions follow each other"
    long_s, short_s = (statistics.median(passes_s) for passes_s in zip(*job.passes_s[1:], strict=True))
    return {
        "rows": [{**vars(SHORT), "pass_s": short_s}, {**vars(LONG), "pass_s": long_s}],
        "step_s": statistics.median(iteration["train/step_s"] for iteration in iterations),
        "version_s": statistics.median(iteration["train/snapshot_s"] for iteration in iterations),
        **seconds_to_receive(job.newest),
        "published_bytes": job.newest.manifest.size_bytes,
        "delta_bytes": job.newest.delta.plan.size_bytes,
        "peak_bytes": peak,
    }


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    status = Path("/proc/self/status").read_text("ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def seconds_to_receive(version: Snapshot) -> dict[str, float]:
    """Return the seconds that a rollout takes to apply the version's delta, and to verify the tensors. It is applied to
    the version itself, tensor by tensor, which takes as long as to the one before."""
    assert version.delta is not None
    taken, plan = {"apply_s": 0.0, "verify_s": 0.0}, version.delta.plan
    for entry, start, end in zip(plan.entries, plan.starts, plan.starts[1:], strict=False):
        copy = bytearray(version.buffers[entry.tensor_index])
        item_bytes = DTYPE_BYTES[version.manifest.tensors[entry.tensor_index].dtype]
        encoded = b"".join(version.delta.slices(start, end))
        taken["apply_s"] += seconds(delta.apply, entry.encoding, encoded, copy, item_bytes)
        taken["verify_s"] += seconds(lambda copy=copy: blake3(copy, max_threads=blake3.AUTO).digest())
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    options.result.write_text(json.dumps(measure(options.folder, options.kind)), "utf-8")


if __name__ == "__main__":
    main()
