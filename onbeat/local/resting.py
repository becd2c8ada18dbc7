"""The ledger of a data folder, whether its stack runs or not: a running one's Redis, or else only Redis is started."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onbeat.contracts.data_folder import REDIS_FOLDER
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.states import JobState
from onbeat.local.redis_choice import choose_server
from onbeat.local.redis_server import redis_service
from onbeat.local.stack import make_scratch
from onbeat.local.state import StackLock, create_data_dir
from onbeat.local.supervisor import Supervisor
from onbeat.process.stacks import has_processes, running_stack
from onbeat.streams.keys import ALL_JOBS, JobKeys

CONNECT_S, ANSWER_S = 5.0, 60.0
STATES = frozenset(JobState)


@dataclass(frozen=True)
class RecordedJob:
    """The part of a job's record that its files depend on."""

    id: str
    name: str
    state: JobState
    next_iteration: int
    checkpoint_iteration: int  # 0: none was written
    checkpoint: str  # path of the newest folder; "": none
    config: str  # JSON


@contextmanager
def open_redis(data_dir: Path) -> Iterator[Any]:
    """Yield a client of the Redis of the stack that runs there; of a stopped one, start Redis alone for as long.

    Raise OnbeatError while a stack is starting or ending.
    """
    stack = running_stack(data_dir)
    if stack is None and has_processes(data_dir):
        raise OnbeatError(f"a stack in {data_dir} is just starting or ending; try again in a few seconds")
    if stack is None:
        with resting_redis(data_dir) as client:
            yield client
    else:
        with connect_to(stack.redis_url) as client:
            yield client


@contextmanager
def resting_redis(data_dir: Path) -> Iterator[Any]:
    """Run the Redis of a stopped stack, and no other service; no stack can start meanwhile. Raise OnbeatError."""
    create_data_dir(data_dir)
    with ExitStack() as held:
        lock = StackLock(data_dir)
        held.callback(lock.release)
        scratch = make_scratch(lambda _: None)
        held.callback(scratch.remove)
        redis, url = redis_service(data_dir, choose_server(data_dir / REDIS_FOLDER))
        locks = [lock.children_fd, scratch.lock_fd]
        supervisor = Supervisor(data_dir / "logs", lambda _: None, locks, scratch.path)
        held.callback(supervisor.stop)
        supervisor.start([redis])
        yield held.enter_context(connect_to(url))


@contextmanager
def connect_to(url: str) -> Iterator[Any]:
    """Yield a client. Raise OnbeatError for what goes wrong with Redis inside the block."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=CONNECT_S) as client:
            yield client
    except RedisError as error:
        raise OnbeatError(f"the Redis of the stack does not do what is needed: {error}") from error


def read_jobs(redis: Any) -> list[RecordedJob]:
    """Return the jobs of the ledger, the oldest first; those whose record is damaged are left out."""
    names = ("name", "state", "next_iteration", "checkpoint_iteration", "checkpoint", "config")
    jobs = []
    for raw_id in redis.zrange(ALL_JOBS, 0, -1):
        job_id = raw_id.decode()
        values = redis.hmget(JobKeys(job_id).job, *names)
        name, state, done, written, path, config = [(value or b"").decode(errors="replace") for value in values]
        if state in STATES:
            jobs.append(RecordedJob(job_id, name, JobState(state), int(done or 0), int(written or 0), path, config))
    return jobs
