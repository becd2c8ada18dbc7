"""A container engine and the project's images. Where neither is there nor can be made, these tests are skipped, but
never in CI."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from onbeat.client import BrokerUnreachable, Client
from onbeat.contracts.errors import ApiError
from onbeat.contracts.states import IterationState, JobState
from tests import waiting
from tests.conftest import free_port
from tests.containers.leftovers import UPGRADED, new_project, remove_dead

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "docker"
PUBLIC_REDIS = "redis:7.2-bookworm"
OWN_REDIS = "onbeat-test-redis:bookworm"
ENGINE_S, BUILD_S, PULL_S, JOB_S = 600.0, 1500.0, 60.0, 900.0
UP_S, DOWN_S = 300.0, 180.0

# The library's own reaper is an image that would have to be pulled; fixtures here end what they start.
os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"


@dataclass(frozen=True)
class Images:
    redis: str
    tag: str

    def of(self, service: str) -> str:
        return self.redis if service == "redis" else f"onbeat/{service}:{self.tag}"


@dataclass
class Compose:
    project: str
    env: dict[str, str]

    def __call__(self, *arguments: str, timeout_s: float = 120.0, env: dict[str, str] | None = None) -> str:
        command = ["docker", "compose", "--project-name", self.project, *arguments]
        return checked(f"docker compose {arguments[0]}", run(command, timeout_s, self.env | (env or {})))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.env['ONBEAT_PUBLISHED_PORT']}"

    @property
    def admin_key(self) -> str:
        """As docs/deploy.md tells the user."""
        return self("run", "--rm", "init", "show", "admin-key").strip()

    def up(self) -> None:
        self("up", "--detach", "--wait", "--no-build", "--wait-timeout", "240", timeout_s=UP_S)


@pytest.fixture(scope="session")
def engine() -> Iterator[None]:
    """Use the running engine, or start one while the tests run; remove leftovers of killed test sessions there."""
    was_running = run(["docker", "info"]).returncode == 0
    started = run([str(SCRIPTS / "engine.sh"), "start"], timeout_s=ENGINE_S)
    if started.returncode != 0 and os.environ.get("CI"):
        pytest.fail(f"CI needs a container engine:\n{started.stderr}")
    if started.returncode != 0:
        pytest.skip(f"no container engine: {started.stderr.strip().splitlines()[-1]}")
    remove_dead()
    yield
    if not was_running:
        checked("stopping the engine", run([str(SCRIPTS / "engine.sh"), "stop"]))


@pytest.fixture(scope="session")
def images(engine: None) -> Images:
    checked("building the images", run([str(SCRIPTS / "build-images.sh"), "cpu"], timeout_s=BUILD_S))
    version = checked("the version", run([str(ROOT / ".venv/bin/onbeat"), "--version"])).split()[-1]
    return Images(redis_image(), f"{version}-cpu")


def redis_image() -> str:
    """Return the public image if it is here or can be pulled, else one that is built of Debian's package."""
    if run(["docker", "image", "inspect", PUBLIC_REDIS]).returncode == 0:
        return PUBLIC_REDIS
    base = checked("the base image", run([str(SCRIPTS / "base-image.sh")], timeout_s=BUILD_S)).strip()
    if not base.startswith("onbeat-base") and run(["docker", "pull", "-q", PUBLIC_REDIS], PULL_S).returncode == 0:
        return PUBLIC_REDIS
    dockerfile = str(Path(__file__).parent / "redis.Dockerfile")
    build = ["docker", "build", "-q", "-t", OWN_REDIS, "--build-arg", f"BASE_IMAGE={base}", "-f", dockerfile]
    checked("building Redis", run([*build, str(Path(__file__).parent)], timeout_s=BUILD_S))
    return OWN_REDIS


@contextlib.contextmanager
def started_compose(images: Images, **env: str) -> Iterator[Compose]:
    """Run the stack with one rollout, all healthy; afterwards remove its containers, networks and volumes."""
    cores = sorted(os.sched_getaffinity(0))
    compose = Compose(
        project=new_project("onbeat-test"),
        env={
            "COMPOSE_PROFILES": "cpu",
            "ONBEAT_TAG": images.tag,
            "ONBEAT_REDIS_IMAGE": images.redis,
            "ONBEAT_PUBLISHED_PORT": str(free_port()),
            "ONBEAT_ROLLOUT_CORES": str(cores[0]),
            "ONBEAT_TRAINER_CORES": str(cores[-1]),
            **env,
        },
    )
    with contextlib.ExitStack() as cleanup:  # every step runs even if others fail
        cleanup.callback(run, ["docker", "image", "rm", f"{UPGRADED}:{compose.project}"])
        cleanup.callback(compose, "down", "--volumes", "--remove-orphans", "--timeout", "30", timeout_s=DOWN_S)
        cleanup.callback(lambda: sys.stdout.write(compose("logs", "--no-color")[-20_000:]))  # shown when a test failed
        compose.up()
        yield compose


def run(
    command: list[str], timeout_s: float = 120.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command. A command that does not exist or takes too long has failed as well."""
    given = os.environ | (env or {})
    try:
        return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=timeout_s)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def checked(command: str, done: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a command, or fail the test with its errors."""
    if done.returncode != 0:
        pytest.fail(f"{command} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def wait_until(is_true: Callable[[], bool], event: str, timeout_s: float = 240.0) -> None:
    """Wait, also while a broker is just being replaced or was killed: it answers later."""

    def is_answered() -> bool:
        with contextlib.suppress(BrokerUnreachable, ApiError):
            return is_true()
        return False

    waiting.wait_until(is_answered, event, timeout_s, poll_s=0.5)


def wait_until_served(client: Client, job_id: str, num_rollouts: int) -> None:
    """Wait until that many rollouts have a policy version of the job, and pause it, so that it does not end before."""

    def versions() -> list[int | None]:
        return [worker.policy_version for worker in client.workers() if worker.job_id == job_id]

    wait_until(lambda: len(versions()) == num_rollouts, f"{num_rollouts} rollouts join {job_id}")
    client.jobs.pause(job_id)
    wait_until(lambda: None not in versions() and len(versions()) == num_rollouts, f"{num_rollouts} serve {job_id}")
    client.jobs.resume(job_id)


def check_succeeded(client: Client, job_id: str, num_iterations: int, num_groups: int) -> None:
    """Wait until the job has succeeded, with every group of its iterations once and a clean audit."""
    wait_until(lambda: client.jobs.get(job_id).state.is_final, "the job ends", timeout_s=JOB_S)
    assert client.jobs.get(job_id).state is JobState.SUCCEEDED, client.jobs.get(job_id).error
    iterations = client.jobs.iterations(job_id)
    assert [i.iteration for i in iterations] == list(range(num_iterations))
    assert {(i.state, i.num_accepted, i.num_failed_groups) for i in iterations} == {
        (IterationState.COMMITTED, num_groups, 0)
    }
    report = client.jobs.audit(job_id)
    assert report.is_clean, report.violation
    assert (report.num_groups, report.num_commits) == (num_groups * num_iterations, num_iterations)
