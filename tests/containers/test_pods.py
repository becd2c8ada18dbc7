"""The pods of the CPU overlay run a job with real vLLM, and are killed in the middle of it."""

import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.client import Client
from onbeat.config import read_job_file
from tests.containers.conftest import ROOT, Images, check_succeeded, wait_until, wait_until_served
from tests.containers.pods import Pods
from tests.manifests.kustomize import KUBERNETES, build

NUM_ITERATIONS, NUM_GROUPS = 7, 6
LEASE_S = "5"  # others take over that soon
ROLLOUTS = ("onbeat-rollout-0", "onbeat-rollout-1")
pytestmark = pytest.mark.timeout(3000)  # the first one builds the images


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a kustomization with new secrets, as the runbook does."""
    folder = tmp_path_factory.mktemp("cluster") / "own"
    runpy.run_path(str(KUBERNETES / "new_cluster.py"))["create"](folder, "cpu")
    return folder


@pytest.fixture(scope="module")
def pods(images: Images, cluster: Path) -> Iterator[Pods]:
    """Redis, broker, trainer and two rollouts, each ready; the second rollout shares the trainer's core."""
    cores = sorted(os.sched_getaffinity(0))
    with Pods(build(cluster), images, cluster.parent / "files") as pods:
        pods.start("redis")
        pods.start("broker")
        pods.start("trainer", ONBEAT_LEASE_S=LEASE_S, ONBEAT_CPU_CORES=str(cores[-1]))
        for name, core in zip(ROLLOUTS, (cores[0], cores[-1]), strict=True):
            pods.start("rollout", name, ONBEAT_LEASE_S=LEASE_S, ONBEAT_CPU_CORES=str(core))
        yield pods


@pytest.fixture
def client(pods: Pods, cluster: Path) -> Iterator[Client]:
    with Client(pods.url, api_key=(cluster / "private" / "admin-key").read_text().strip()) as client:
        yield client


def test_pods_are_killed_and_the_job_succeeds(pods: Pods, client: Client) -> None:
    """Rollout, broker and trainer, one after another, each in the middle of an iteration; then each starts again."""
    small_job = [
        f"schedule.num_iterations={NUM_ITERATIONS}",
        f"rollout.num_prompts_per_iteration={NUM_GROUPS}",
        "rollout.num_samples_per_prompt=4",
        "checkpoint.every_iterations=2",
    ]
    job_id = client.jobs.create(read_job_file(ROOT / "examples" / "quickstart.toml", small_job)).id

    def reached(iteration: int) -> bool:
        return any(i.iteration >= iteration for i in client.jobs.iterations(job_id))

    def is_generating(name: str) -> bool:
        return any(worker.id.startswith(f"rollout-{name}-") and worker.num_in_flight for worker in client.workers())

    wait_until_served(client, job_id, len(ROLLOUTS))
    wait_until(lambda: all(map(is_generating, ROLLOUTS)), "both rollouts generate")
    pods.kill(ROLLOUTS[0])
    interrupted = max(iteration.iteration for iteration in client.jobs.iterations(job_id))
    wait_until(lambda: reached(interrupted + 1), "the other one finishes the iteration")
    pods.restart(ROLLOUTS[0])
    for name in ("onbeat-broker", "onbeat-trainer"):
        wait_until(lambda: is_generating(ROLLOUTS[1]), f"an iteration is under way before {name} is killed")
        pods.kill(name)
        pods.restart(name)

    check_succeeded(client, job_id, NUM_ITERATIONS, NUM_GROUPS)
    containers = {name: pods.container(name) for name in pods.runs}
    ended = {
        name: container.logs(tail=40).decode()
        for name, container in containers.items()
        if container.status != "running"
    }
    assert not ended, "\n".join(f"{name}: {log}" for name, log in ended.items())
