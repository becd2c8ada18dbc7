"""Possible next moves: the services' own order of calls, cut at every call, and what time, users and faults add.

Each actor is what its process remembers; all else is in Redis or on the disk. An actor that dies is one that has
forgotten everything; a zombie is one that has not, while time has passed for others.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from onbeat.contracts.errors import LeaseLost
from onbeat.contracts.states import JobState, Verdict
from onbeat.streams.codec import (
    PromptTask,
    Response,
    RolloutGroup,
    VersionSpan,
    decode_group,
    group_digest,
    used_digest,
)
from onbeat.streams.keys import ROLLOUT_GROUP
from tests.model.bounds import Bounds
from tests.model.invariants import Violation, does_count
from tests.model.store import EXPIRED_MS, JOB, KEYS, LEASE_S, NUM_GROUPS, State, Store, View

FOREVER_S = 1e6


class Worker(NamedTuple):
    name: str
    incarnation: int = 0
    flight: tuple[str, int, str] | None = None  # group id, policy version that it was generated with, source

    @property
    def id(self) -> str:
        return f"{self.name}{self.incarnation}"


class Checkpoint(NamedTuple):
    next_iteration: int = 0
    digest: str = "start"  # digest of the weights


class Trainer(NamedTuple):
    epoch: str
    step: str = "restore"  # restore -> announce -> train -> commit -> train -> ... -> finish
    iteration: int = 0
    digest: str = ""  # digest of the weights at the iteration's start
    known: frozenset[str] = frozenset()  # groups that have arrived here
    trained: tuple[tuple[int, str], ...] = ()  # micro-batches of the iteration: rank, group ids
    num_durable: int = 0  # iterations that were acknowledged
    writing: tuple[Checkpoint, ...] = ()  # the first is being written
    written: tuple[Checkpoint, ...] = ()  # checkpoints to be acknowledged


class World(NamedTuple):
    """All that there is at one time."""

    redis: int  # a state of the store
    workers: tuple[Worker, ...]
    brokers: tuple[tuple[int, int] | None, ...]  # iteration and version that one is about to open
    trainers: tuple[Trainer | None, ...]
    disk: Checkpoint
    num_faults: int
    num_pauses: int
    num_cancels: int
    num_resumes: int


class Move(NamedTuple):
    label: str
    world: World
    kind: str = ""  # '' may be hoped for; fault | cancel are not


def first_world(bounds: Bounds) -> World:
    return World(
        redis=0,
        workers=tuple(Worker(chr(ord("a") + i)) for i in range(bounds.num_workers)),
        brokers=(None,) * bounds.num_brokers,
        trainers=(None,) * bounds.num_trainers,
        disk=Checkpoint(bounds.first_iteration),
        num_faults=bounds.num_faults,
        num_pauses=bounds.num_pauses,
        num_cancels=bounds.num_cancels,
        num_resumes=bounds.num_resumes,
    )


# ---- calls of the ledger ---------------------------------------------------------------------------------------------
# Each on the store's ledger and the state that is in Redis; results are plain values that name groups, never entries.


def claim(store: Store, _: State, worker: str) -> list[tuple[str, int, str]]:
    claims = store.run(store.ledger.rollout.claim(JOB, worker, 1, LEASE_S))
    return [(claim.task.group_id, claim.task.policy_version, claim.task.source) for claim in claims]


def submit(store: Store, state: State, worker: str, group_id: str, version: int, source: str) -> Verdict:
    group = make_group(worker, group_id, version, source)
    return store.run(store.ledger.rollout.submit(JOB, state.entries[group_id], group))


def renew(store: Store, state: State, worker: str, group_id: str) -> bool:
    return bool(store.run(store.ledger.rollout.renew(JOB, worker, [state.entries[group_id]])))


def release(store: Store, state: State, worker: str, group_id: str) -> bool:
    return bool(store.run(store.ledger.rollout.release(JOB, worker, [state.entries[group_id]])))


def open_iteration(store: Store, _: State, iteration: int, version: int) -> str:
    tasks = [
        PromptTask(group_id=f"{iteration}-{index}", iteration=iteration, text="prompt", source=source_of(store, index))
        for index in range(NUM_GROUPS + store.bounds.num_spares)
    ]
    return store.run(store.ledger.iterations.open(JOB, iteration, version, tasks[:NUM_GROUPS], tasks[NUM_GROUPS:]))


def move_job(store: Store, _: State, wanted: JobState, epoch: str = "") -> JobState:
    return store.run(store.ledger.jobs.move(JOB, wanted, epoch=epoch))


def resume(store: Store, _: State) -> None:
    store.run(store.ledger.jobs.resume(JOB, JobState.CANCELLED))


def claim_job(store: Store, _: State) -> str | None:
    return store.run(store.ledger.trainer.claim_job(JOB, "trainer", FOREVER_S))


def renew_job(store: Store, _: State, epoch: str, lease_s: float = FOREVER_S) -> JobState:
    return store.run(store.ledger.trainer.renew_job(JOB, epoch, lease_s))


def announce(store: Store, _: State, epoch: str, version: int, digest: str) -> None:
    store.run(store.ledger.versions.announce(JOB, epoch, version, "127.0.0.1:1", digest))


def take(store: Store, _: State) -> list[str]:
    return [group.group_id for group in store.run(store.ledger.trainer.take(JOB, "rank-0", 64, 0.001))]


def record(store: Store, _: State, epoch: str, iteration: int, rank: int, index: int, wanted: tuple[str, ...]) -> Any:
    """Twice: the answer may have been lost."""
    place = (JOB, epoch, iteration, rank, index, list(wanted))
    granted = store.run(store.ledger.trainer.record_micro_batch(*place))
    again = store.run(store.ledger.trainer.record_micro_batch(*place))
    assert granted == again, f"granted {granted}, and {again} when the call was repeated"
    return granted


def commit(store: Store, state: State, epoch: str, iteration: int, digest: str, trained: tuple[str, ...]) -> bool:
    contents = {group.group_id: group for group in map(decode_group, state.view.contents.values())}
    used = used_digest({name: group_digest(contents[name]) for name in trained if name in contents})
    return store.run(store.ledger.trainer.commit(JOB, epoch, iteration, iteration + 1, digest, {}, used))


def checkpointed(store: Store, _: State, epoch: str, first: int, next_iteration: int) -> None:
    store.run(store.ledger.trainer.checkpointed(JOB, epoch, first, next_iteration, "folder"))


def trim(store: Store, _: State, iteration: int) -> bool:
    return store.run(store.ledger.iterations.trim(JOB, iteration, 0))


def expire_group(store: Store, state: State, group_id: str, holder: str) -> None:
    options = {"idle": EXPIRED_MS, "justid": True}
    store.client.xclaim(KEYS.prompts, ROLLOUT_GROUP, holder, 0, [state.entries[group_id]], **options)


def expire_job(store: Store, _: State) -> None:
    store.client.hset(KEYS.job, "lease_until", 0)


def group_ids(iteration: int) -> tuple[str, ...]:
    return tuple(f"{iteration}-{index}" for index in range(NUM_GROUPS))


def source_of(store: Store, index: int) -> str:
    """Return the source of an iteration's prompt; '' if there is one only."""
    return f"source-{index % store.bounds.num_sources}" if store.bounds.num_sources > 1 else ""


def make_group(worker: str, group_id: str, version: int, source: str) -> RolloutGroup:
    span = VersionSpan(policy_version=version, start=0, end=1)
    rewards = [0.0, float(does_count(group_id, source))]
    response = {"token_ids": [4], "rollout_logprobs": [-0.5], "version_spans": [span], "finish_reason": "stop"}
    return RolloutGroup(
        group_id=group_id,
        iteration=int(group_id.split("-")[0]),
        policy_version=version,
        prompt_token_ids=[1],
        responses=[Response(reward=reward, **response) for reward in rewards],
        worker_id=worker,
        source=source,
    )


# ---- moves -----------------------------------------------------------------------------------------------------------


class Actors:
    """All moves out of a world."""

    def __init__(self, store: Store, bounds: Bounds) -> None:
        self._store, self._bounds = store, bounds

    def moves(self, world: World) -> Iterator[Move]:
        view = self._store.states[world.redis].view
        for place in range(len(world.workers)):
            yield from self._worker(world, view, place)
        for place in range(len(world.brokers)):
            yield from self._broker(world, view, place)
        for place in range(len(world.trainers)):
            yield from self._trainer(world, view, place)
        yield from self._time(world, view)
        yield from self._user(world)

    def _call(self, world: World, do: Any, *args: Any) -> tuple[World, Any]:
        """Return the world after a call of the ledger, and the call's result or the exception that callers handle."""
        outcome = self._store.call(world.redis, do, *args)
        return world._replace(redis=outcome.number), outcome.result

    # ---- a rollout: claims one group at a time -----------------------------------------------------------------------

    def _worker(self, world: World, view: View, place: int) -> Iterator[Move]:
        worker = world.workers[place]

        def become(after: World, **changes: Any) -> World:
            return after._replace(workers=put(after.workers, place, worker._replace(**changes)))

        if worker.flight is None:
            if is_like_an_earlier_one(world, view, place):
                return
            after, claims = self._call(world, claim, worker.id)
            if claims:
                yield Move(f"rollout {worker.id} claims {claims[0][0]}", become(after, flight=claims[0]))
            if claims and world.num_faults:
                yield fault(f"rollout {worker.id} claims {claims[0][0]}, the answer is lost", after)
            return
        group_id, version, source = worker.flight
        after, verdict = self._call(world, submit, worker.id, group_id, version, source)
        yield Move(f"rollout {worker.id} submits {group_id}: {verdict}", become(after, flight=None))
        after, is_mine = self._call(world, renew, worker.id, group_id)
        kept = worker.flight if is_mine else None
        yield Move(f"rollout {worker.id} renews {group_id}: {is_mine}", become(after, flight=kept))
        if not world.num_faults:
            return
        reborn = worker.incarnation + 1
        yield fault(f"rollout {worker.id} dies holding {group_id}", become(world, flight=None, incarnation=reborn))
        after, verdict = self._call(world, submit, worker.id, group_id, version, source)
        yield fault(f"rollout {worker.id} submits {group_id}, the answer is lost: {verdict}", after)
        after, verdict = self._call(world, submit, worker.id, group_id, version + 1, source)
        yield fault(f"rollout {worker.id} submits {group_id} of another version: {verdict}", become(after, flight=None))
        after, is_mine = self._call(world, release, worker.id, group_id)
        yield fault(f"rollout {worker.id} hands back {group_id}: {is_mine}", become(after, flight=None))

    # ---- a broker: looks, and later opens what it saw ----------------------------------------------------------------

    def _broker(self, world: World, view: View, place: int) -> Iterator[Move]:
        seen = world.brokers[place]
        due = (int(view.job["num_opened"]), int(view.job.get("policy_version", "-1")))
        is_due = view.job["state"] == JobState.RUNNING and due[0] < view.num_iterations
        is_due = is_due and due[1] >= max(self._bounds.first_iteration, due[0] - self._bounds.max_staleness)
        if is_due and due[1] < due[0]:
            is_due = not any(entry.state == "new" for entry in view.prompts)
        if is_due and seen != due:
            looked = world._replace(brokers=put(world.brokers, place, due))
            yield Move(f"a broker sees iteration {due[0]} due on version {due[1]}", looked)
        if seen is not None:
            after, reason = self._call(world, open_iteration, *seen)
            after = after._replace(brokers=put(after.brokers, place, None))
            yield Move(f"a broker opens iteration {seen[0]} on version {seen[1]}: {reason or 'open'}", after)
        if view.job["state"] == JobState.CANCELLING and view.job["lease"] != "fresh":
            after, _ = self._call(world, move_job, JobState.CANCELLED)
            yield Move("a broker ends the job that was cancelled", after)
        num_trimmed = int(view.job.get("num_trimmed", "0"))
        if num_trimmed in view.iterations:
            after, is_trimmed = self._call(world, trim, num_trimmed)
            if is_trimmed:
                yield Move(f"a broker trims iteration {num_trimmed}", after)

    # ---- a trainer ---------------------------------------------------------------------------------------------------

    def _trainer(self, world: World, view: View, place: int) -> Iterator[Move]:
        trainer = world.trainers[place]
        if trainer is None:
            after, epoch = self._call(world, claim_job)
            if epoch:
                yield Move(f"a trainer claims the job, epoch {epoch}", become(after, place, Trainer(epoch)))
            return
        if world.num_faults:
            yield fault(
                f"trainer {trainer.epoch} dies at {trainer.step} {trainer.iteration}", become(world, place, None)
            )
        if trainer.writing:
            done = trainer.writing[0]
            changed = trainer._replace(writing=trainer.writing[1:], written=(*trainer.written, done))
            after = become(world._replace(disk=max(world.disk, done)), place, changed)
            yield Move(f"trainer {trainer.epoch}: checkpoint {done.next_iteration} is on disk", after)
        if trainer.written:
            first, next_iteration = trainer.num_durable, trainer.written[0].next_iteration
            changed = trainer._replace(written=trainer.written[1:], num_durable=next_iteration)
            label = f"acknowledges checkpoint {next_iteration}"
            yield self._owned(world, place, label, changed, checkpointed, first, next_iteration)
        if view.job["lease"] == "expired":
            yield self._owned(world, place, "renews its lease", trainer, renew_job)
        if view.job["state"] == JobState.CANCELLING:
            yield self._owned(world, place, "ends the job that was cancelled", None, move_job_as, JobState.CANCELLED)
        yield from getattr(self, f"_{trainer.step}")(world, view, place, trainer)

    def _owned(self, world: World, place: int, label: str, changed: Trainer | None, do: Any, *args: Any) -> Move:
        """Make a call under the trainer's epoch, and leave the job when the trainer was fenced off."""
        trainer = world.trainers[place]
        assert trainer is not None
        after, result = self._call(world, do, trainer.epoch, *args)
        if isinstance(result, LeaseLost):
            return Move(f"trainer {trainer.epoch} {label}: fenced", become(after, place, None))
        return Move(f"trainer {trainer.epoch} {label}: {result}", become(after, place, changed))

    def _restore(self, world: World, view: View, place: int, trainer: Trainer) -> Iterator[Move]:
        """Read the newest checkpoint and acknowledge it again: its writer may have died before that."""
        disk = world.disk
        changed = trainer._replace(
            step="announce", iteration=disk.next_iteration, digest=disk.digest, num_durable=disk.next_iteration
        )
        label = f"restores checkpoint {disk.next_iteration}"
        if disk.next_iteration > self._bounds.first_iteration:
            yield self._owned(
                world, place, label, changed, checkpointed, self._bounds.first_iteration, disk.next_iteration
            )
        else:
            yield Move(f"trainer {trainer.epoch} starts from the model", become(world, place, changed))

    def _announce(self, world: World, view: View, place: int, trainer: Trainer) -> Iterator[Move]:
        changed = begin(trainer._replace(known=frozenset(accepted(view))), view)
        yield self._owned(
            world, place, f"announces version {trainer.iteration}", changed, announce, trainer.iteration, trainer.digest
        )

    def _train(self, world: World, view: View, place: int, trainer: Trainer) -> Iterator[Move]:
        """Groups arrive, micro-batches are recorded, then the step; its version is announced before it is committed."""
        undelivered = [entry.group_id for entry in view.rollouts if entry.state == "new"]
        if undelivered:
            after, names = self._call(world, take)
            changed = trainer._replace(known=trainer.known | relevant(trainer, names))
            yield Move(f"trainer {trainer.epoch} takes {', '.join(names)}", become(after, place, changed))
            if world.num_faults:
                yield fault(f"trainer {trainer.epoch} takes {', '.join(names)}, the answer is lost", after)
        lost = relevant(trainer, accepted(view)) - trainer.known - set(undelivered)
        if lost:
            looked = become(world, place, trainer._replace(known=trainer.known | lost))
            yield Move(f"trainer {trainer.epoch} looks into the ledger for {', '.join(sorted(lost))}", looked)
        wanted = {*group_ids(trainer.iteration), *view.groups.get(trainer.iteration, ())}
        trained = {name for _, names in trainer.trained for name in names.split(",")}
        if trained >= wanted and trainer.known >= wanted:
            version, digest = trainer.iteration + 1, stepped(trainer)
            changed = trainer._replace(step="commit")
            yield self._owned(world, place, f"announces version {version}", changed, announce, version, digest)
        for rank in range(self._bounds.num_ranks):
            done = {name for its_rank, names in trainer.trained if its_rank == rank for name in names.split(",")}
            ready = [entry.group_id for entry in view.rollouts if entry.group_id in (trainer.known & wanted) - done]
            for names in {tuple(ready), tuple(ready[:1])} - {()}:
                if self._bounds.num_ranks > 1 or not trained & set(names):
                    yield self._record(world, place, trainer, rank, names)

    def _record(self, world: World, place: int, trainer: Trainer, rank: int, names: tuple[str, ...]) -> Move:
        index = sum(its_rank == rank for its_rank, _ in trainer.trained)
        after, granted = self._call(world, record, trainer.epoch, trainer.iteration, rank, index, names)
        label = f"trainer {trainer.epoch} records {', '.join(names)} for rank {rank}"
        if isinstance(granted, LeaseLost):
            return Move(f"{label}: fenced", become(after, place, None))
        batch = ((rank, ",".join(granted)),) if granted else ()
        return Move(f"{label}: {granted}", become(after, place, trainer._replace(trained=trainer.trained + batch)))

    def _commit(self, world: World, view: View, place: int, trainer: Trainer) -> Iterator[Move]:
        names = tuple(sorted(name for _, names in trainer.trained for name in names.split(",")))
        if len(set(names)) != len(names):
            raise Violation(f"a group is in two micro-batches: {trainer.trained}")
        iteration, digest = trainer.iteration, stepped(trainer)
        next_iteration = iteration + 1
        is_due = next_iteration == view.num_iterations or next_iteration % self._bounds.every_iterations == 0
        save = (Checkpoint(next_iteration, digest),) if is_due else ()
        changed = trainer._replace(iteration=next_iteration, digest=digest, writing=trainer.writing + save)
        changed = begin(changed, view)
        label = f"commits iteration {iteration}"
        move = self._owned(world, place, label, changed, commit, iteration, digest, names)
        yield move
        if world.num_faults and move.world.trainers[place] is not None:
            lost = move.world._replace(trainers=world.trainers)
            yield fault(f"trainer {trainer.epoch} {label}, the answer is lost", lost)

    def _finish(self, world: World, view: View, place: int, trainer: Trainer) -> Iterator[Move]:
        """End the job when all is durable.

        A trainer that does not know yet that the job is paused or cancelled tries in vain, and leaves: the job is
        claimed again.
        """
        is_running = view.job["state"] == JobState.RUNNING
        if trainer.writing or trainer.written or not (is_running or world.num_faults):
            return
        move = self._owned(world, place, "ends the job", None, move_job_as, JobState.SUCCEEDED)
        after, _ = self._call(move.world, renew_job, trainer.epoch, 0.0)
        yield Move(move.label, after) if is_running else fault(move.label, after)

    # ---- time and users ----------------------------------------------------------------------------------------------

    def _time(self, world: World, view: View) -> Iterator[Move]:
        """Leases run out: of the dead for certain, of the living when they are paused or cut off."""
        for entry in view.prompts:
            if entry.pending is not None and entry.pending.lease == "fresh":
                holder = entry.pending.consumer
                is_alive = holder in {worker.id for worker in world.workers if worker.flight}
                if world.num_faults or not is_alive:
                    after, _ = self._call(world, expire_group, entry.group_id, holder)
                    label = f"the lease of {holder} on {entry.group_id} runs out"
                    yield fault(f"{label}, it is paused", after) if is_alive else Move(label, after)
        if view.job["lease"] == "fresh":
            epoch = view.job["epoch"]
            is_alive = epoch in {trainer.epoch for trainer in world.trainers if trainer}
            if world.num_faults or not is_alive:
                after, _ = self._call(world, expire_job)
                label = f"the lease of trainer {epoch} runs out"
                yield fault(f"{label}, it is paused", after) if is_alive else Move(label, after)

    def _user(self, world: World) -> Iterator[Move]:
        if world.num_pauses:
            after, before = self._call(world, move_job, JobState.PAUSED)
            yield Move(f"the user pauses: {before}", after._replace(num_pauses=world.num_pauses - 1))
        if self._store.states[world.redis].view.job["state"] == JobState.PAUSED:
            after, _ = self._call(world, move_job, JobState.RUNNING)
            yield Move("the user resumes", after)
        if world.num_cancels:
            is_pending = self._store.states[world.redis].view.job["state"] == JobState.PENDING
            after, before = self._call(world, move_job, JobState.CANCELLED if is_pending else JobState.CANCELLING)
            yield Move(f"the user cancels: {before}", after._replace(num_cancels=world.num_cancels - 1), "cancel")
        if world.num_resumes and self._store.states[world.redis].view.job["state"] == JobState.CANCELLED:
            after, _ = self._call(world, resume)
            yield Move("the user resumes the cancelled job", after._replace(num_resumes=world.num_resumes - 1))


def move_job_as(store: Store, state: State, epoch: str, wanted: JobState) -> JobState:
    return move_job(store, state, wanted, epoch)


def is_like_an_earlier_one(world: World, view: View, place: int) -> bool:
    """Return whether an idle worker holds nothing, like an earlier one: one of them stands for all."""
    holders = {entry.pending.consumer for entry in view.prompts if entry.pending}
    free = [worker.flight is None and worker.id not in holders for worker in world.workers]
    return free[place] and any(free[:place])


def put(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


def become(world: World, place: int, trainer: Trainer | None) -> World:
    return world._replace(trainers=put(world.trainers, place, trainer))


def fault(label: str, after: World) -> Move:
    return Move(label, after._replace(num_faults=after.num_faults - 1), "fault")


def accepted(view: View) -> set[str]:
    return {name for iteration in view.groups for name in view.accepted(iteration)}


def begin(trainer: Trainer, view: View) -> Trainer:
    """Ready for its iteration: what was recorded of it before is repeated, in the order of recording."""
    if trainer.iteration == view.num_iterations:
        return trainer._replace(step="finish", known=frozenset(), trained=())
    recorded = []
    for place, content in view.micro_batches.get(trainer.iteration, {}).items():
        number, _, names = content.partition("|")
        recorded.append((int(number), int(place.split(":")[0]), names))
    trained = tuple((rank, names) for _, rank, names in sorted(recorded))
    return trainer._replace(step="train", known=relevant(trainer, trainer.known), trained=trained)


def relevant(trainer: Trainer, names: Any) -> frozenset[str]:
    return frozenset(name for name in names if int(name.split("-")[0]) >= trainer.iteration)


def stepped(trainer: Trainer) -> str:
    """Return the digest of the weights after the step: other micro-batches in another order give other bits."""
    ranks = sorted(trainer.trained, key=lambda batch: batch[0])
    return hashlib.sha1(f"{trainer.digest} {ranks}".encode(), usedforsecurity=False).hexdigest()[:8]
