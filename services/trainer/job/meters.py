"""The trainer's Prometheus metrics, updated as each iteration is committed.

Counts cover all ranks together, seconds only rank 0. Work that is repeated after a crash counts again.
"""

from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from services.trainer.spans import Span

ITERATIONS = Counter("onbeat_trainer_iterations", "Iterations trained")
UPDATES = Counter("onbeat_trainer_updates", "Optimizer steps, and those that GAC skipped")
MICRO_BATCHES = Counter("onbeat_trainer_micro_batches", "Micro-batches trained")
PASSES = Counter("onbeat_trainer_passes", "Packed rows that went forward and backward through the model")
TRAINED_TOKENS = Counter("onbeat_trainer_trained_tokens", "Response tokens that entered a loss")
SKIPPED_GROUPS = Counter("onbeat_trainer_skipped_groups", "Groups without signal, for which nothing was computed")
SECONDS = Counter("onbeat_trainer_seconds", "What the thread that trains did with its time", ["activity"])
POLICY_VERSION = Gauge("onbeat_trainer_policy_version", "The version that the newest iteration made")
GRAD_NORM = Gauge("onbeat_trainer_grad_norm", "Norm of its gradient before clipping, of the last update")
REWARD = Gauge("onbeat_trainer_reward_mean", "Its mean reward")
MISMATCH = Gauge("onbeat_trainer_mismatch_mean", "Its mean gap of trainer and rollout logprobs, per token")

COUNTS = {
    "train/micro_batches": MICRO_BATCHES,
    "train/passes": PASSES,
    "train/trained_tokens": TRAINED_TOKENS,
    "train/skipped_groups": SKIPPED_GROUPS,
}
NEWEST = {"train/grad_norm": GRAD_NORM, "reward_mean": REWARD, "mismatch_mean": MISMATCH}


class CommitMeter:
    """The metrics of one job on this trainer."""

    def __init__(self) -> None:
        self._busy_until: float | None = None  # time.monotonic() at the end of the previous commit's last span

    def record(self, version: int, num_updates: int, report: dict[str, float], spans: Sequence[Span]) -> None:
        """Count a committed iteration. `report`: `IterationStats.report`; `spans`: the main thread's work for it."""
        ITERATIONS.inc()
        UPDATES.inc(num_updates)
        POLICY_VERSION.set(version)
        for name, counter in COUNTS.items():
            counter.inc(report.get(name, 0.0))
        for name, gauge in NEWEST.items():
            if name in report:
                gauge.set(report[name])
        self._add_seconds(sorted(spans, key=lambda span: span.start))

    def _add_seconds(self, spans: Sequence[Span]) -> None:
        """Add seconds by the kind of each span; the time between spans is `wait`, nearly always for groups.

        Busy until 2, then micro-batches 5-6 and 8-9, optimizer 9-10: 5 s of wait, 2 of micro_batch, 1 of optimizer.
        """
        for span in spans:
            if self._busy_until is not None:
                SECONDS.labels("wait").inc(max(0.0, span.start - self._busy_until))
            SECONDS.labels(span.kind).inc(span.end - span.start)
            self._busy_until = span.end
