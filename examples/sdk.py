"""Train from Python: submit two jobs, follow them, look at curves and responses, compare.

Needs a broker (`onbeat up`) and matplotlib (`.venv/bin/pip install matplotlib`):

    python examples/sdk.py [num_iterations]
"""

import sys
from pathlib import Path

from onbeat import Client, JobConfig
from onbeat.plots import plot_metrics, plot_timeline
from onbeat.types import IterationUpdate, JobState

QUICKSTART = Path(__file__).parent / "quickstart.toml"
LEARNING_RATES = (2e-5, 1e-5)


def train(client: Client, learning_rate: float, num_iterations: int) -> str:
    """The id of a job that has SUCCEEDED."""
    config = JobConfig.from_file(
        QUICKSTART,
        [f"schedule.num_iterations={num_iterations}", f"optimizer.learning_rate={learning_rate}"],
    )
    job = client.jobs.create(config)
    print(f"{job.id} with learning rate {learning_rate:g}")
    for update in client.jobs.stream(job.id):  # ends with the job
        if isinstance(update, IterationUpdate) and update.point:  # it is committed
            print(f"  iteration {update.record.iteration}: reward {update.point['iteration/reward_mean']:.3f}")
    job = client.jobs.get(job.id)
    if job.state != JobState.SUCCEEDED:
        raise SystemExit(f"{job.id} is {job.state}: {job.error}")
    return job.id


def main() -> None:
    num_iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with Client() as client:  # ONBEAT_URL, or the broker on this machine
        jobs = [train(client, learning_rate, num_iterations) for learning_rate in LEARNING_RATES]
        curves = [client.jobs.metrics(job) for job in jobs]
        plot_metrics(*curves, labels=[f"{rate:g}" for rate in LEARNING_RATES]).savefig("curves.png")
        plot_timeline(client.jobs.timeline(jobs[0], iterations=3)).savefig("timeline.png")
        for sample in client.jobs.samples(jobs[0], limit=3):
            print(f"reward {sample.reward:g}: {sample.prompt!r} -> {sample.response!r}")
        best = max(zip(jobs, curves, strict=True), key=lambda one: one[1]["iteration/reward_mean"][-1][1])
        print(f"best at the end: {best[0]}; see curves.png and timeline.png")


if __name__ == "__main__":
    main()
