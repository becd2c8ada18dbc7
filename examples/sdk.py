"""Train from Python: submit two jobs, follow them, look at responses, compare the rewards.

Needs a stack in this folder (`onbeat up`), or a broker in ONBEAT_URL:

    python examples/sdk.py [num_iterations]
"""

import sys
from pathlib import Path

from onbeat import Client, JobConfig
from onbeat.contracts.records import IterationUpdate
from onbeat.contracts.states import JobState

QUICKSTART = Path(__file__).parent / "quickstart.toml"
LEARNING_RATES = (2e-5, 1e-5)


def train(client: Client, learning_rate: float, num_iterations: int) -> str:
    """Train a policy and return the id of the job, which has SUCCEEDED."""
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
    with Client() as client:  # ONBEAT_URL, else the stack of this folder
        jobs = [train(client, learning_rate, num_iterations) for learning_rate in LEARNING_RATES]
        for sample in client.jobs.samples(jobs[0], limit=3):
            print(f"reward {sample.reward:g}: {sample.prompt!r} -> {sample.response!r}")
        rewards = {job: client.jobs.metrics(job)["iteration/reward_mean"][-1][1] for job in jobs}
        print(f"best at the end: {max(rewards, key=lambda job: rewards[job])}")


if __name__ == "__main__":
    main()
