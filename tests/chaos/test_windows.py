"""One death for each row of the table "Who dies when" in docs/protocol.md, exactly there: the job is as if nothing was.

All windows share one stack: two trainers and two rollouts, so that somebody takes over while the dead start again.
"""

import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from onbeat.client import BrokerUnreachable
from onbeat.config import JobConfig
from onbeat.contracts.errors import ApiError
from onbeat.contracts.states import EvaluationState, JobState
from onbeat.local.redis_server import free_port
from onbeat.local.stack import missing_answer
from onbeat.local.supervisor import ServiceSpec
from onbeat.streams.keys import ROLLOUT_GROUP, JobKeys
from tests.chaos.die_at import Orders
from tests.chaos.exactly_once import accepted_at, check_exactly_once
from tests.chaos.options import GAME, OPTIONS, check_signs, install_opinions
from tests.e2e.stack import RunningStack, running, tiny_job
from tests.waiting import wait_until

TRAINER_LEASE_S, ROLLOUT_LEASE_S = 2.0, 3.0
SMALL = {"num_prompts_per_iteration": 4, "num_samples_per_prompt": 2, "max_response_tokens": 8}
BOUNDED = {"mode": "bounded", "max_staleness": 1, "num_iterations": 3}
EVERY = {"every_iterations": 1}
EVALUATION = {"every_iterations": 1, "num_prompts": 2, "num_samples_per_prompt": 1}


@dataclass(frozen=True)
class Window:
    name: str  # the row in docs/protocol.md
    point: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.name}-{self.point}"


WARM = {  # two supervised iterations and two of RL
    "warm_start": {"num_rows_per_iteration": 3, "num_iterations": 2, "learning_rate": 1e-3},
    "schedule": {"num_iterations": 4},
}
KL = {"type": "grpo", "kl": {"coef": 0.1}}

# Each job has two deaths: of a trainer, and of a broker or a rollout. With the sections of the job, and the name of its
# options in options.py.
JOBS: list[tuple[Window, Window, dict[str, Any]]] = [
    (
        Window("trainer:claimed-not-announced", "Versions.announce.before"),
        Window("broker:created-not-answered", "Jobs.create.after"),
        {},
    ),
    (
        Window("trainer:taken-not-recorded", "TrainerSide.take.after"),
        Window("broker:indexed-not-created", "LedgerPart._run:create_job.before"),
        {"environment": GAME},
    ),
    (
        Window("trainer:rows-sized-not-trained", "TrainerSide.record_row_tokens.after"),
        Window("rollout:before-claim", "RolloutSide.claim.before", nth=2),
        {"training": {"max_tokens_per_micro_batch": "auto"}},
    ),
    (
        Window("trainer:recorded-not-trained", "TrainerSide.record_micro_batch.after"),  # so the version stays a while
        Window("broker:evaluation-due-not-opened", "Evaluations.open.before"),
        {"evaluation": EVALUATION, "options": "parts"},
    ),
    (
        Window("trainer:stepped-not-published", "TrainLoop.step.after"),
        Window("broker:opened-not-answered", "Iterations.open.after", nth=2),
        {"options": "sources"},
    ),
    (
        Window("trainer:stepped-not-published", "TrainLoop.step.after", nth=2),
        Window("rollout:generating", "TransformersEngine._sample.before", nth=3),
        {"schedule": BOUNDED, "options": "mask"},
    ),
    (
        Window("trainer:published-not-committed", "TrainerSide.commit.before"),
        Window("broker:evaluation-drained-not-ended", "Evaluations.finish.before"),
        {"evaluation": EVALUATION},
    ),
    (
        Window("trainer:published-not-committed", "TrainerSide.commit.before", nth=2),
        Window("rollout:before-claim", "RolloutSide.claim.before"),
        {"checkpoint": EVERY, "options": "solved"},
    ),
    (
        Window("trainer:committed-not-checkpointed", "TrainerSide.commit.after"),
        Window("broker:due-not-opened", "Iterations.open.before"),
        {"options": "scaled parts"},
    ),
    (
        Window("trainer:checkpoint-half-written", "sync_path.after", nth=2),
        Window("rollout:claimed-not-started", "RolloutSide.claim.after"),
        {"checkpoint": EVERY, "options": "part"},
    ),
    (
        Window("trainer:checkpoint-half-written", "write_state.after"),
        Window("rollout:generating", "TransformersEngine._sample.before"),
        {"checkpoint": EVERY, "options": "opinions"},
    ),
    (
        Window("trainer:checkpoint-not-acknowledged", "appear.after"),
        Window("rollout:playing", "Episode.chat.after", nth=2),
        {"checkpoint": EVERY, "options": "environments"},
    ),
    (
        Window("trainer:checkpoint-not-acknowledged", "TrainerSide.checkpointed.before"),
        Window("rollout:generated-not-submitted", "RolloutSide.submit.before"),
        {"checkpoint": EVERY},
    ),
    (
        Window("trainer:finished-not-succeeded", "Jobs.move.before"),
        Window("rollout:submitted-not-answered", "RolloutSide.submit.after"),
        {"options": "sources"},
    ),
    (
        Window("trainer:rows-read-not-recorded", "TrainerSide.record_rows.before"),
        Window("broker:due-not-opened", "Iterations.open_rows.before", nth=2),
        WARM,
    ),
    (
        Window("trainer:rows-recorded-not-trained", "TrainerSide.record_rows.after", nth=2),
        Window("broker:opened-not-answered", "Iterations.open_rows.after"),
        WARM | {"checkpoint": EVERY},
    ),
    (  # death in the last step of the warm start
        Window("trainer:stepped-not-published", "TrainLoop.step.after", nth=2),
        Window("rollout:claimed-not-started", "RolloutSide.claim.after"),
        WARM | {"objective": KL},
    ),
    (  # death between the warm start and RL
        Window("trainer:committed-not-checkpointed", "TrainerSide.commit.after", nth=2),
        Window("rollout:generated-not-submitted", "RolloutSide.submit.before"),
        WARM | {"objective": KL, "checkpoint": EVERY},
    ),
    (
        Window("trainer:taken-not-recorded", "TrainerSide.take.after", nth=3),
        Window("rollout:generated-not-submitted", "RolloutSide.submit.before", nth=2),
        {"options": "all"},
    ),
]


class ChaosStack:
    """The stack, the orders to its services, and the jobs that they are hurt with."""

    def __init__(self, stack: RunningStack, folder: Path) -> None:
        self.stack, self.folder, self.orders = stack, folder, Orders(folder / "orders")

    def submit(self, key: str, options: str = "", **sections: Any) -> str:
        """Submit a job as a client that repeats the request until a broker answers; return the job's id."""
        shape = {"rollout": SMALL, "schedule": {"num_iterations": 2}} | OPTIONS[options].sections | sections
        job = tiny_job(self.folder, **(shape | {"rollout": SMALL | shape["rollout"]}))
        if "evaluation" in sections:
            job["evaluation"] = sections["evaluation"] | {"data": job["data"]}
        if "warm_start" in sections:
            examples = {"type": "jsonl", "path": job["data"]["path"], "response_field": "answer"}
            job["warm_start"] = sections["warm_start"] | {"data": examples}
        answers = []

        def is_created() -> bool:
            try:
                answers.append(self.stack.client.jobs.create(job, idempotency_key=key))
            except BrokerUnreachable:
                return False
            except ApiError as error:
                if error.status < 500:
                    raise
                return False
            return True

        wait_until(is_created, "the job is created")
        return answers[0].id

    def wait_for_taken(self, point: str) -> int:
        """Return the process that reached the point."""
        wait_until(lambda: self.orders.taken_by(point) is not None, f"a process comes to {point}", poll_s=0.02)
        pid = self.orders.taken_by(point)
        assert pid is not None
        return pid

    def check(self, job_id: str, scratch: Path, options: str = "") -> None:
        """Check that the job is like an undisturbed one, and that no accepted group was generated again."""
        self.stack.wait(job_id)
        groups = check_exactly_once(self.stack, job_id, scratch)
        config = JobConfig.model_validate(self.stack.job(job_id).config)
        check_signs(OPTIONS[options], config, groups, self.stack.client.jobs.iterations(job_id))
        num_iterations = config.schedule.num_iterations
        times = accepted_at(self.stack, job_id, num_iterations)
        asked = [(group_id, time) for group_id, time in self.orders.generated() if group_id in times]
        assert not [group_id for group_id, time in asked if time > times[group_id]], "generated after it was accepted"

    def check_nothing_was_repeated(self) -> None:
        ids = [group_id for group_id, _ in self.orders.generated()]
        assert len(ids) == len(set(ids)), f"generated more than once: {sorted({i for i in ids if ids.count(i) > 1})}"

    def events(self, job_id: str, kind: str) -> list[Any]:
        return self.stack.events(job_id, kind)

    def name_of(self, pid: int) -> str:
        """Trainer or rollout that has this process now."""
        names = [service.spec.name for service in self.stack.services]
        return next(name for name in names if (process := self.stack.process(name)) and process.pid == pid)


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    (folder / "orders").mkdir()
    python_path = install_opinions(folder / "site")

    def change(specs: list[ServiceSpec]) -> list[ServiceSpec]:
        specs += [
            replace(spec, name="trainer-1", env={**spec.env, "ONBEAT_TRAINER_ID": "trainer-1"})
            for spec in specs
            if spec.name == "trainer"
        ]
        return [obedient(spec, folder / "orders", python_path) for spec in specs]

    with patch("onbeat.local.supervisor.FIRST_DELAY_S", 0.1), running(folder, num_rollouts=2, change=change) as stack:
        yield ChaosStack(stack, folder)


def obedient(spec: ServiceSpec, orders: Path, python_path: str) -> ServiceSpec:
    *python, _, module = spec.command  # python -P -m services.NAME
    lease_s = TRAINER_LEASE_S if spec.name.startswith("trainer") else ROLLOUT_LEASE_S
    env = {**spec.env, "PYTHONPATH": python_path, "CHAOS_ORDERS": str(orders), "ONBEAT_LEASE_S": str(lease_s)}
    return replace(spec, command=[*python, "-m", "tests.chaos.die_at", module], env=env)


@pytest.fixture(autouse=True)
def _no_orders_left(chaos):
    chaos.orders.withdraw()
    yield
    chaos.orders.withdraw()
    for service in chaos.stack.services:
        chaos.stack.signal(service.spec.name, signal.SIGCONT)


@pytest.mark.parametrize(
    ("trainers", "other", "sections"), JOBS, ids=[f"{first}-{second}" for first, second, _ in JOBS]
)
def test_deaths_in_these_windows_change_nothing(chaos, trainers, other, sections, tmp_path, request):
    for window in (trainers, other):
        chaos.orders.give(window.point, "kill", window.nth)
    job_id = chaos.submit(request.node.name, **sections)
    victims = [chaos.wait_for_taken(window.point) for window in (trainers, other)]
    chaos.check(job_id, tmp_path, sections.get("options", ""))
    assert not any(map(psutil.pid_exists, victims))
    if other.name.startswith("broker:"):  # only with a rollout dies what it was generating
        chaos.check_nothing_was_repeated()
    if "evaluation" in sections:
        scored = chaos.stack.client.jobs.evaluations(job_id)
        assert [(record.evaluation, record.state) for record in scored] == [
            (e, EvaluationState.DONE) for e in (0, 1, 2)
        ]


def test_rollout_draining(chaos, tmp_path):
    """Asked to stop while it generates, and killed before it is done."""
    chaos.orders.give("TransformersEngine._sample.before", "hold")
    job_id = chaos.submit("draining")
    victim = chaos.wait_for_taken("TransformersEngine._sample.before")
    name = chaos.name_of(victim)
    os.kill(victim, signal.SIGTERM)
    workers = chaos.stack.client.workers
    wait_until(lambda: any(w.id == name and w.state == "draining" for w in workers("default")), f"{name} drains")
    os.kill(victim, signal.SIGKILL)
    chaos.check(job_id, tmp_path)


def test_broker_cancelling_not_cancelled(chaos):
    """The user cancels, all trainers are away, and the broker dies when it is about to end the job."""
    job_id = chaos.submit("cancelling", schedule={"num_iterations": 100})  # it does not end meanwhile
    wait_until(lambda: chaos.stack.job(job_id).state is JobState.RUNNING, f"{job_id} runs")
    for trainer in ("trainer", "trainer-1"):
        wait_until(lambda name=trainer: chaos.stack.signal(name, signal.SIGSTOP), f"{trainer} is there to be stopped")
    chaos.orders.give("Jobs.move.before", "kill", nth=2)  # the first one is the user's
    chaos.stack.client.jobs.cancel(job_id)
    victim = chaos.wait_for_taken("Jobs.move.before")
    assert chaos.stack.wait(job_id).state is JobState.CANCELLED
    assert not psutil.pid_exists(victim)


def test_redis_killed(chaos, tmp_path):
    chaos.orders.give("RolloutSide.submit.after", "hold", nth=2)
    job_id = chaos.submit("redis", "all")
    chaos.wait_for_taken("RolloutSide.submit.after")
    assert chaos.stack.signal("redis")
    chaos.orders.withdraw()
    chaos.check(job_id, tmp_path, "all")


# ---- zombies: they were paused for longer than their lease, and wake up ------------------------------------------


def test_zombie_rollout(chaos, tmp_path):
    """It wakes up with groups that another rollout generates just now: refused, and the other one's are taken."""
    chaos.orders.give("RolloutSide.submit.before", "stop")
    job_id = chaos.submit("zombie rollout")
    zombie = chaos.wait_for_taken("RolloutSide.submit.before")
    name = chaos.name_of(zombie)
    wait_until(lambda: num_holders(chaos, job_id) == 1, "only the zombie holds groups")
    chaos.orders.give("TransformersEngine._sample.before", "hold")
    chaos.wait_for_taken("TransformersEngine._sample.before")  # the other one has the zombie's
    os.kill(zombie, signal.SIGCONT)
    wait_until(lambda: chaos.events(job_id, "group.lost"), "the zombie is refused")
    chaos.orders.withdraw()
    chaos.check(job_id, tmp_path)
    assert chaos.events(job_id, "group.lost")[0].data["worker_id"] == name


def num_holders(chaos: ChaosStack, job_id: str) -> int:
    """Rollouts with claimed groups, once all groups are claimed; else 0."""
    redis, prompts = chaos.stack.redis, JobKeys(job_id).prompts
    pending = redis.xpending(prompts, ROLLOUT_GROUP)
    return len(pending["consumers"]) if pending["pending"] == redis.xlen(prompts) else 0


def test_zombie_trainer(chaos, tmp_path):
    """It wakes up about to commit what another trainer has committed since."""
    chaos.orders.give("TrainerSide.commit.before", "stop")
    job_id = chaos.submit("zombie trainer", checkpoint=EVERY)
    zombie = chaos.wait_for_taken("TrainerSide.commit.before")
    name = chaos.name_of(zombie)
    wait_until(lambda: chaos.events(job_id, "iteration.committed"), "another trainer commits")
    os.kill(zombie, signal.SIGCONT)
    wait_until(lambda: f"{job_id} is left to another" in chaos.stack.log(name), "the zombie gives up")
    chaos.check(job_id, tmp_path)
    assert len(chaos.events(job_id, "job.taken_over")) == 1
    chaos.check_nothing_was_repeated()


def test_zombie_trainer_spares_its_successors_checkpoint(chaos, tmp_path):
    chaos.orders.give("appear.before", "stop")
    job_id = chaos.submit("zombie checkpoint", checkpoint=EVERY)
    zombie = chaos.wait_for_taken("appear.before")
    name = chaos.name_of(zombie)
    chaos.orders.give("write_state.before", "hold")
    chaos.wait_for_taken("write_state.before")
    os.kill(zombie, signal.SIGCONT)
    wait_until(lambda: f"{job_id} is left to another" in chaos.stack.log(name), "the zombie gives up")
    chaos.orders.withdraw()
    chaos.check(job_id, tmp_path)


def test_zombie_broker(chaos, tmp_path):
    """It wakes up about to open an iteration that another broker has opened since."""
    (spec,) = [service.spec for service in chaos.stack.services if service.spec.name == "broker"]
    port = free_port()
    chaos.orders.give("Iterations.open.before", "stop", nth=2)
    job_id = chaos.submit("zombie broker")
    zombie = chaos.wait_for_taken("Iterations.open.before")
    env = {**spec.env, "ONBEAT_PORT": str(port)}
    missing = partial(missing_answer, f"http://127.0.0.1:{port}/readyz")
    chaos.stack.launch(replace(spec, name="broker-1", env=env, missing=missing))
    num_groups = 2 * SMALL["num_prompts_per_iteration"]
    wait_until(lambda: chaos.stack.redis.xlen(JobKeys(job_id).rollouts) == num_groups, "all is generated")
    os.kill(zombie, signal.SIGCONT)
    chaos.check(job_id, tmp_path)
    assert len(chaos.events(job_id, "iteration.opened")) == 2
    chaos.check_nothing_was_repeated()
