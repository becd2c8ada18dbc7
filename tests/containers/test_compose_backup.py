"""`onbeat backup --compose` while a job runs, `onbeat restore --compose` into new volumes: the same bits at the end.

The engine is the reference one, which computes one group at a time: the responses depend on weights and seed alone. And
a sum of two gradients is the same in either order.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.client import Client
from onbeat.local.archive import check_archive
from onbeat.local.backup import write_backup
from onbeat.local.resting import resting_redis
from onbeat.streams.keys import ALL_JOBS, JobKeys
from tests.containers.conftest import (
    DOWN_S,
    JOB_S,
    ROOT,
    Compose,
    Images,
    check_succeeded,
    checked,
    run,
    started_compose,
    wait_until,
)
from tests.tiny_models import write_tied_model

NUM_ITERATIONS, NUM_GROUPS, BACKED_UP_AFTER = 40, 2, 3
MODEL = "/cache/tiny"  # path in the trainer's container
JOB = {
    "name": "restored",
    "model": {"path": MODEL, "dtype": "float32"},
    "data": {"type": "jsonl", "path": "questions.jsonl"},
    "reward": {"name": "regex", "options": {"pattern": "[0-9a-m]"}},  # some random responses have one
    "rollout": {"num_prompts_per_iteration": NUM_GROUPS, "num_samples_per_prompt": 4, "max_response_tokens": 24},
    "training": {"max_tokens_per_micro_batch": 160},  # a group alone
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"num_iterations": NUM_ITERATIONS},
    "checkpoint": {"every_iterations": 2, "keep": 2},
}

pytestmark = pytest.mark.timeout(3000)  # the first one builds the images


@pytest.fixture(scope="module")
def compose(images: Images) -> Iterator[Compose]:
    with started_compose(images, ONBEAT_ENGINE="transformers") as compose:
        yield compose


def onbeat(compose: Compose, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does beside compose.yaml."""
    env = compose.env | {"COMPOSE_PROJECT_NAME": compose.project, "ONBEAT_URL": compose.url}
    return run([str(ROOT / ".venv/bin/onbeat"), *map(str, arguments)], 300.0, env)


def create_job(compose: Compose, folder: Path) -> str:
    write_tied_model(folder / "tiny")
    (folder / "tiny" / "model.safetensors").chmod(0o644)  # root owns it in the container
    compose("cp", str(folder / "tiny"), f"trainer:{MODEL}")
    rows = [{"prompt": f"say {number}", "answer": "x"} for number in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "job.json").write_text(json.dumps(JOB), "utf-8")
    created = onbeat(compose, "jobs", "create", folder / "job.json", "--api-key", compose.admin_key)
    return checked("onbeat jobs create", created).split()[0]


def end_of_job(compose: Compose, job_id: str) -> list[str]:
    """Wait for the end of the job and a clean audit. Return digest and path of the weights in its two checkpoints."""
    with Client(compose.url, api_key=compose.admin_key) as client:
        check_succeeded(client, job_id, NUM_ITERATIONS, NUM_GROUPS)
    weights = f"sha256sum /data/jobs/{job_id}/checkpoints/iteration-*/model.safetensors"
    return compose("exec", "-T", "trainer", "sh", "-c", weights).splitlines()


def test_job_restored_into_new_volumes_ends_with_the_same_bits(compose: Compose, tmp_path: Path) -> None:
    job_id, file = create_job(compose, tmp_path), tmp_path / "backup.tar"
    with Client(compose.url, api_key=compose.admin_key) as client:

        def is_under_way() -> bool:
            job = client.jobs.get(job_id)
            assert not job.state.is_final, job.error
            return job.next_iteration >= BACKED_UP_AFTER

        wait_until(is_under_way, f"{BACKED_UP_AFTER} iterations are committed", JOB_S)
    printed = checked("onbeat backup", onbeat(compose, "backup", file, "--compose"))
    assert f"{file} is written: 1 job, " in printed
    assert check_archive(file)["jobs"] == [{"id": job_id, "name": "restored", "state": "RUNNING"}]
    whole = end_of_job(compose, job_id)
    assert len({line.split()[0] for line in whole}) == 2, "nothing was learned, so any bits would do"
    refused = onbeat(compose, "restore", file, "--compose")
    assert "error: the stack runs (broker, redis, rollout, trainer); stop it first" in refused.stderr

    compose("down", "--timeout", "30", timeout_s=DOWN_S)
    volumes = [f"{compose.project}_{name}-data" for name in ("redis", "trainer", "broker")]
    checked("docker volume rm", run(["docker", "volume", "rm", *volumes]))
    printed = checked("onbeat restore", onbeat(compose, "restore", file, "--compose"))
    assert "compose's stack has 1 job again, 1 unfinished" in printed
    refused = onbeat(compose, "restore", file, "--compose")
    assert "error: the volumes of redis and trainer and broker hold data already; --replace" in refused.stderr
    compose.up()
    assert end_of_job(compose, job_id) == whole


def test_backup_of_a_local_stack_replaces_what_is_there(compose: Compose, tmp_path: Path) -> None:
    data_dir, file = tmp_path / "data", tmp_path / "local.tar"
    folder = data_dir / "jobs" / "job-local" / "checkpoints" / "iteration-000002"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}", "utf-8")
    record = {"name": "local", "state": "PAUSED", "next_iteration": 2, "checkpoint_iteration": 2}
    with resting_redis(data_dir) as redis:
        redis.hset(JobKeys("job-local").job, mapping=record | {"checkpoint": str(folder), "config": "{}"})
        redis.zadd(ALL_JOBS, {"job-local": 0})
    write_backup(data_dir, file)
    compose("down", "--timeout", "30", timeout_s=DOWN_S)
    printed = checked("onbeat restore", onbeat(compose, "restore", file, "--compose", "--replace"))
    assert "compose's stack has 1 job again, 1 unfinished" in printed
    compose("up", "--detach", "--wait", "--no-build", "redis")
    password = compose("run", "--rm", "-T", "init", "show", "redis-admin-password").strip()
    asked = ["redis-cli", "--user", "admin", "hget", JobKeys("job-local").job, "checkpoint"]
    answer = compose("exec", "-T", "-e", "REDISCLI_AUTH", "redis", *asked, env={"REDISCLI_AUTH": password})
    assert answer.strip() == "/data/jobs/job-local/checkpoints/iteration-000002"
