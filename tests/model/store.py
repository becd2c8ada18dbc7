"""The states of one job in Redis, and the calls of the real ledger that lead from one to another.

A state is known by what scripts can tell apart: no times but `is the lease fresh`, and stream entries by the group that
they carry. The first state of each kind is kept as it is (DUMP), and put back (RESTORE) before a call is tried on it.
What a call does depends on nothing else, so each is tried once per state, whatever the actors are at.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import redis

from onbeat.contracts.errors import OnbeatError
from onbeat.streams.codec import PromptTask, decode_group
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from tests.model.bounds import Bounds

JOB = "job-model"
NUM_GROUPS = 2  # groups of an iteration
KEYS = JobKeys(JOB)
PREFIX = KEYS.job.removesuffix("job")
UNREAD_KEYS = {"busy", "events", "lengths", "lost_rollouts", "versions", "weights"}  # nor by these
CONFIG = {"name": "model", "pool": "model"}
LEASE_S = 3600.0  # none runs out by itself while the check runs
EXPIRED_MS = 2 * 3600 * 1000  # idle for so long: the lease has run out, and was not handed back
HANDED_BACK_MS = 24 * 3600 * 1000
# No script decides by these fields: times, counters for people, copied values.
UNREAD = {"audit_link", "checkpoint", "config", "doing", "doing_since", "lease_until", "metrics", "num_duplicate"}
UNREAD |= {"num_discarded_tokens", "num_handed_back", "num_lost", "num_stale", "owner", "weights_address", "worked_s"}

# All of a job but its events: [key, type, content] of each as JSON, then each as a dump. Of a stream: entries, last
# delivered id, pending entries.
READ = """
local found, answer = {}, {''}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind, content = redis.call('TYPE', key).ok, {}
  if kind == 'hash' then content = redis.call('HGETALL', key)
  elseif kind == 'set' then content = redis.call('SMEMBERS', key)
  elseif kind == 'list' then content = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'stream' then
    content = {redis.call('XRANGE', key, '-', '+'), '0-0', {}}
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      content[2] = group[8]
      content[3] = redis.call('XPENDING', key, group[2], '-', '+', 100)
    end
  end
  if key ~= ARGV[2] then
    found[#found + 1] = {key, kind, content}
    answer[#answer + 1] = redis.call('DUMP', key)
  end
end
answer[1] = cjson.encode(found)
return answer
"""
WRITE = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end
for i, key in ipairs(KEYS) do redis.call('RESTORE', key, 0, ARGV[i + 1]) end
"""


@dataclass(frozen=True)
class Pending:
    consumer: str
    lease: str  # fresh | expired | handed back


@dataclass(frozen=True)
class Entry:
    """One of a stream, in its order."""

    id: str = field(repr=False)
    group_id: str
    state: str  # new: never delivered; deleted: not in the stream, but pending; else ''
    pending: Pending | None


@dataclass
class View:
    """The job as the invariants see it."""

    job: dict[str, str] = field(default_factory=dict)  # fields without times; `lease` is fresh | expired | none
    iterations: dict[int, dict[str, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)  # group id -> waiting | accepted
    spares: dict[int, list[str]] = field(default_factory=dict)  # group ids
    places: dict[str, str] = field(default_factory=dict)  # group id -> entry, as the ledger has it
    sources: dict[str, str] = field(default_factory=dict)  # group id -> source, of groups that are kept; with several
    prompts: list[Entry] = field(default_factory=list)
    rollouts: list[Entry] = field(default_factory=list)
    micro_batches: dict[int, dict[str, str]] = field(default_factory=dict)  # rank:index -> number|group ids
    taken: dict[int, list[str]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)  # rollouts entry -> RolloutGroup
    audit: list[tuple[str, str]] = field(default_factory=list)  # line, link

    @property
    def num_iterations(self) -> int:
        return int(self.job["num_iterations"])

    def accepted(self, iteration: int) -> set[str]:
        return {name for name, state in self.groups.get(iteration, {}).items() if state == "accepted"}

    def canonical(self) -> str:
        streams = (self.prompts, self.rollouts)
        contents = (self.job, self.iterations, self.groups, self.spares, self.sources, *streams)
        return repr((*contents, self.micro_batches, self.taken))


@dataclass
class State:
    view: View
    dumps: dict[str, bytes]
    contents: dict[str, Any]  # contents by key: all, to the last byte, except the clock of leases
    names: dict[str, str]  # entry id -> group id, of all entries that ever were
    entries: dict[str, str]  # group id -> its entry of the prompts stream, which may be gone
    number: int = -1


class AsyncFace:
    """A blocking client as the ledger wants it: quicker than a client that waits, where nothing ever does.

    `mutate` may change a script before it is registered.
    """

    def __init__(self, client: Any, mutate: Callable[[str], str]) -> None:
        self._client, self._mutate = client, mutate

    def register_script(self, text: str) -> Any:
        return AsyncScript(self._client.register_script(self._mutate(text)))

    def pipeline(self, **options: Any) -> Any:
        pipeline = self._client.pipeline(**options)
        pipeline.execute = as_coroutine(pipeline.execute)
        return pipeline

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        return as_coroutine(getattr(self._client, name))


class AsyncScript:
    def __init__(self, script: Any) -> None:
        self.sha, self.script, self._run = script.sha, script.script, as_coroutine(script)

    def __call__(self, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._run(**options)


def as_coroutine(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return call


Call = Callable[..., Any]  # arguments: a store, its state, which is in Redis, and the call's own


@dataclass(frozen=True)
class Outcome:
    number: int  # number of the state after the call
    result: Any  # or the exception that was raised
    is_untouched: bool  # not one byte of the job is other than before


Check = Callable[[State, str, tuple[Any, ...], Outcome, State], None]


class Store:
    """All states of the job that were reached, by number; 0 is a job that was just created."""

    def __init__(self, client: redis.Redis, bounds: Bounds, check: Check, mutate: Callable[[str], str]) -> None:
        """Create a store. `check` sees every call once, with the states before and after it; its errors are raised."""
        self.ledger = Ledger(AsyncFace(client, mutate))
        self.states: list[State] = []
        self.bounds = bounds
        self.client, self._check = client, check
        self._numbers: dict[str, int] = {}
        self._outcomes: dict[Any, Outcome] = {}
        self._read, self._write = client.register_script(READ), client.register_script(WRITE)
        self._in_redis = 0
        self._loop = asyncio.new_event_loop()
        self._write(keys=[], args=[PREFIX + "*"])
        fork = {"fork": {"iteration": bounds.first_iteration}} if bounds.first_iteration else {}
        self.run(self.ledger.jobs.create(JOB, CONFIG | fork, bounds.num_iterations, bounds.max_staleness))
        self._look(State(View(), {}, {}, {}, {}))

    def call(self, number: int, do: Call, *args: Any) -> Outcome:
        """Try `do` on a state."""
        key = (number, do, args)
        if key not in self._outcomes:
            self._outcomes[key] = self._try(number, do, args)
        return self._outcomes[key]

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        self._loop.close()

    @property
    def num_calls(self) -> int:
        return len(self._outcomes)

    def _try(self, number: int, do: Call, args: tuple[Any, ...]) -> Outcome:
        before = self.states[number]
        if self._in_redis != number:
            self._write(keys=list(before.dumps), args=[PREFIX + "*", *before.dumps.values()])
        try:
            result = do(self, before, *args)
        except (OnbeatError, AssertionError, redis.RedisError) as error:
            result = error
        after = self._look(before)
        outcome = Outcome(after.number, result, after.contents == before.contents)
        self._check(before, do.__name__, args, outcome, after)
        return outcome

    def _look(self, before: State) -> State:
        """Return the present contents of Redis."""
        state = read_state(self._read(args=[PREFIX + "*", KEYS.events]), before)
        number = self._numbers.setdefault(state.view.canonical(), len(self.states))
        state.number = number
        if number == len(self.states):
            self.states.append(state)
        self._in_redis = number if state.contents == self.states[number].contents else -1
        return state


# ---- reading -----------------------------------------------------------------------------------------------------


def read_state(answer: list[bytes], before: State) -> State:
    headers, dumps = json.loads(answer[0].decode("latin-1")), answer[1:]  # one character a byte, for what is not text
    state = State(View(), {}, {}, dict(before.names), dict(before.entries))
    view = state.view
    for (key, kind, content), dump in sorted(zip(headers, dumps, strict=True)):
        content = NORMAL[kind](content)
        state.dumps[key], state.contents[key] = dump, content
        name, _, number = key.removeprefix(PREFIX).partition(":")
        if name == "job":
            view.job = visible(content) | {"lease": job_lease(content)}
        elif name == "iteration":
            view.iterations[int(number)] = visible(content)
        elif name == "groups":
            for group_id, ledger in content.items():
                view.groups.setdefault(int(number), {})[group_id], _, view.places[group_id] = ledger.partition(":")
        elif name == "spares":
            view.spares[int(number)] = content[::2]
        elif name == "micro_batches":
            view.micro_batches[int(number)] = content
        elif name == "taken":
            view.taken[int(number)] = content
        elif name == "audit":
            view.audit = [(fields["line"], fields["link"]) for fields in content.entries.values()]
        elif name == "prompts":
            view.prompts = read_entries(state, content)
            tasks = [PromptTask.FromString(fields["task"].encode("latin-1")) for fields in content.entries.values()]
            view.sources |= {task.group_id: task.source for task in tasks if task.source}
            state.entries |= {entry.group_id: entry.id for entry in view.prompts}
        elif name == "rollouts":
            view.rollouts = read_entries(state, content)
            view.contents = {entry: fields["group"].encode("latin-1") for entry, fields in content.entries.items()}
            groups = map(decode_group, view.contents.values())
            view.sources |= {group.group_id: group.source for group in groups if group.source}
        else:
            assert name in UNREAD_KEYS, f"does a script decide by {key}? Then View must have it, else UNREAD_KEYS"
    return state


@dataclass
class Stream:
    entries: dict[str, dict[str, str]]
    last_delivered: str
    pending: dict[str, Pending]
    num_deliveries: dict[str, int]


def read_stream(content: list[Any]) -> Stream:
    entries = {entry: pairs(fields) for entry, fields in content[0]}
    pending = {entry: Pending(holder, group_lease(idle_ms)) for entry, holder, idle_ms, _ in content[2]}
    return Stream(entries, content[1], pending, {entry: count for entry, _, _, count in content[2]})


def read_entries(state: State, stream: Stream) -> list[Entry]:
    """Entries in their order; pending ones that the stream does not hold any more come last."""
    state.names |= {entry: fields["group_id"] for entry, fields in stream.entries.items()}
    entries = []
    for entry in [*stream.entries, *(stream.pending.keys() - stream.entries.keys())]:
        is_new = place(entry) > place(stream.last_delivered)
        kind = "deleted" if entry not in stream.entries else "new" if is_new else ""
        entries.append(Entry(entry, state.names[entry], kind, stream.pending.get(entry)))
    return entries


def pairs(flat: list[str]) -> dict[str, str]:
    return dict(sorted(zip(flat[::2], flat[1::2], strict=True)))


NORMAL: dict[str, Callable[[Any], Any]] = {"hash": pairs, "set": sorted, "list": list, "stream": read_stream}


def place(entry: str) -> tuple[int, ...]:
    return tuple(map(int, entry.split("-")))


def visible(fields: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if name not in UNREAD and not name.endswith("_at")}


def job_lease(fields: dict[str, str]) -> str:
    if "lease_until" not in fields:
        return "none"
    return "fresh" if float(fields["lease_until"]) > time.time() else "expired"


def group_lease(idle_ms: int) -> str:
    return "handed back" if idle_ms >= HANDED_BACK_MS else "expired" if idle_ms >= EXPIRED_MS else "fresh"
