"""`docker compose up`, then a job, as docs/deploy.md tells it, with real vLLM: scaled and upgraded while it runs."""

import subprocess
from collections.abc import Iterator

import pytest

from onbeat.client import Client
from onbeat.contracts.errors import ApiError
from onbeat.contracts.states import JobState
from tests.containers.conftest import (
    ROOT,
    UP_S,
    Compose,
    Images,
    check_succeeded,
    checked,
    run,
    started_compose,
    wait_until,
    wait_until_served,
)
from tests.containers.leftovers import UPGRADED

NUM_ITERATIONS, NUM_GROUPS = 9, 4
SMALL_JOB = {
    "schedule.num_iterations": NUM_ITERATIONS,
    "rollout.num_prompts_per_iteration": NUM_GROUPS,
    "rollout.num_samples_per_prompt": 4,
    "rollout.max_response_tokens": 24,
    "checkpoint.every_iterations": 4,
}


pytestmark = pytest.mark.timeout(3000)  # the first one builds the images


@pytest.fixture(scope="module")
def compose(images: Images) -> Iterator[Compose]:
    with started_compose(images) as compose:
        yield compose


@pytest.fixture
def client(compose: Compose) -> Iterator[Client]:
    with Client(compose.url, api_key=compose.admin_key) as client:
        yield client


def test_a_job_is_scaled_and_upgraded_in_the_middle(compose: Compose, client: Client, images: Images) -> None:
    """1 -> 2 -> 1 rollouts and another broker image: the job succeeds, every group once, the audit clean."""
    job_id = create_job(compose)

    def is_committed(iteration: int) -> bool:
        assert client.jobs.get(job_id).state in (JobState.PENDING, JobState.RUNNING), client.jobs.get(job_id).error
        return any(i.iteration >= iteration and i.committed_at for i in client.jobs.iterations(job_id))

    wait_until(lambda: is_committed(0), "the first iteration is committed")
    client.jobs.pause(job_id)  # it goes on when the second rollout is there
    compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "rollout=2", timeout_s=UP_S)
    wait_until(lambda: len(client.workers()) == 2, "the second rollout has started")
    client.jobs.resume(job_id)
    wait_until_served(client, job_id, 2)
    wait_until(lambda: len(generated(client, job_id)) == 2, "both have generated a group")
    assert client.jobs.get(job_id).state is JobState.RUNNING, "the job ended before it could be scaled"

    scaled_to_one = ["up", "--detach", "--no-build", "--no-recreate", "--scale", "rollout=1"]
    compose(*scaled_to_one, timeout_s=UP_S)
    # They drained and said farewell; nobody has to be declared dead.
    wait_until(lambda: len(client.workers()) == 1, "one rollout is left")

    upgrade_broker(compose, images)
    check_succeeded(client, job_id, NUM_ITERATIONS, NUM_GROUPS)
    joined = [event for event in client.jobs.events(job_id) if event.kind == "worker.joined"]
    assert len({event.data["worker_id"] for event in joined}) == 2


def create_job(compose: Compose) -> str:
    """Create a job with the command line, as a user does."""
    overrides = [part for key, value in SMALL_JOB.items() for part in ("--set", f"{key}={value}")]
    command = [str(ROOT / ".venv/bin/onbeat"), "jobs", "create", "examples/quickstart.toml", *overrides]
    env = {"ONBEAT_URL": compose.url, "ONBEAT_API_KEY": compose.admin_key}
    return checked("onbeat jobs create", run(command, env=env)).split()[0]


def generated(client: Client, job_id: str) -> set[str]:
    """Rollouts that have generated groups of the last iterations."""
    return {span.lane for span in client.jobs.timeline(job_id, iterations=20).spans if span.kind == "generate"}


def upgrade_broker(compose: Compose, images: Images) -> None:
    """Replace the broker by a different image with its own tag, as a new release does."""
    before = compose("ps", "--quiet", "broker").strip()
    dockerfile = f"FROM {images.of('broker')}\nLABEL org.opencontainers.image.version=next\n"
    upgraded = f"{UPGRADED}:{compose.project}"
    built = subprocess.run(["docker", "build", "-q", "-t", upgraded, "-"], input=dockerfile, text=True, timeout=120)
    assert built.returncode == 0
    tag = {"ONBEAT_TAG": compose.project}
    compose("up", "--detach", "--no-build", "--no-deps", "--wait", "broker", timeout_s=UP_S, env=tag)
    assert compose("ps", "--quiet", "broker").strip() != before


def test_nobody_without_a_key_is_answered(compose: Compose) -> None:
    with Client(compose.url) as stranger, pytest.raises(ApiError, match="401"):
        stranger.jobs.list()
