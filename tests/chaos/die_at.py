"""`python -m tests.chaos.die_at SERVICE`: the real service, which dies exactly at a point of its own code when ordered.

The methods below are wrapped from outside; production code knows nothing of it. An order is a file in the folder
CHAOS_ORDERS (see `Orders`). The first process that comes to the point takes it, so whoever starts again lives on. Until
an order comes the service is the ordinary one, so one stack serves all tests.

Every group that an engine is asked for is written to the file `generated` there.
"""

import functools
import importlib
import inspect
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEDGER = "onbeat.streams.ledger"
CHECKPOINT = "services.trainer.checkpoints.store"
METHODS = {
    "services.broker": [
        f"{LEDGER}.scripts:LedgerPart._run",
        f"{LEDGER}.jobs:Jobs.create",
        f"{LEDGER}.jobs:Jobs.move",
        f"{LEDGER}.iterations:Iterations.open",
        f"{LEDGER}.iterations:Iterations.open_rows",
        f"{LEDGER}.evaluations:Evaluations.open",
        f"{LEDGER}.evaluations:Evaluations.finish",
    ],
    "services.rollout": [
        f"{LEDGER}.rollout_side:RolloutSide.claim",
        f"{LEDGER}.rollout_side:RolloutSide.submit",
        "services.rollout.responder:Responder._generate",
        "services.rollout.episodes.runner:EpisodeRunner.play",
        "services.rollout.episodes.episode:Episode.chat",
        "services.rollout.engines.transformers_engine:TransformersEngine._sample",
    ],
    "services.trainer": [
        f"{LEDGER}.trainer_side:TrainerSide.claim_job",
        f"{LEDGER}.trainer_side:TrainerSide.take",
        f"{LEDGER}.trainer_side:TrainerSide.record_row_tokens",
        f"{LEDGER}.trainer_side:TrainerSide.record_micro_batch",
        f"{LEDGER}.trainer_side:TrainerSide.record_rows",
        f"{LEDGER}.versions:Versions.announce",
        f"{LEDGER}.trainer_side:TrainerSide.commit",
        f"{LEDGER}.trainer_side:TrainerSide.checkpointed",
        f"{LEDGER}.jobs:Jobs.move",
        "services.trainer.loop:TrainLoop.step",
        f"{CHECKPOINT}:sync_path",
        f"{CHECKPOINT}:write_state",
        f"{CHECKPOINT}:appear",
    ],
}
HELD_FOR_S = 120.0


@dataclass(frozen=True)
class Orders:
    """Files in a folder: `METHOD.before` or `METHOD.after`, METHOD without its module; `LedgerPart._run:SCRIPT` is a
    script.

    The content is JSON: `action`, kill | stop (SIGKILL, SIGSTOP) | hold (the calling thread waits until the orders are
    withdrawn), and `nth`, 1 for the next call. Who takes it leaves its process id in `....taken`.
    """

    folder: Path

    def give(self, point: str, action: str, nth: int = 1) -> None:
        draft = self.folder / f"{point}.new"
        draft.write_text(json.dumps({"action": action, "nth": nth}))
        draft.rename(self.folder / point)

    def taken_by(self, point: str) -> int | None:
        """Return the process that reached the point, or None while none has."""
        try:
            return int((self.folder / f"{point}.taken").read_text())
        except FileNotFoundError:
            return None

    def withdraw(self) -> None:
        """Remove all points, so that held processes go on, and forget the generated groups."""
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)

    def generated(self) -> list[tuple[str, float]]:
        """Return (group id, Unix time) for each time that an engine was asked for a group."""
        path = self.folder / "generated"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(line.split()[0], float(line.split()[1])) for line in lines]


class Obedience:
    """This process and the orders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_calls: dict[str, int] = {}

    def at(self, point: str) -> None:
        order, taken = self._folder / point, self._folder / f"{point}.taken"
        try:
            content = json.loads(order.read_text())
        except FileNotFoundError:
            self._num_calls.pop(point, None)
            return
        self._num_calls[point] = self._num_calls.get(point, 0) + 1
        if self._num_calls[point] < content["nth"]:
            return
        try:
            order.unlink()
        except FileNotFoundError:  # another process was faster
            return
        draft = order.with_name(f"{point}.draft")
        draft.write_text(str(os.getpid()))
        draft.rename(taken)
        if content["action"] == "hold":
            deadline = time.monotonic() + HELD_FOR_S
            while taken.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        else:  # this thread gets the signal: it may not run on until another one has seen it
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[content["action"]]
            signal.pthread_kill(threading.get_ident(), number)

    def write_down(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("GroupProducer._generate", "EpisodeRunner.play"):
            with (self._folder / "generated").open("a") as file:
                file.write(f"{arguments[1].claim.task.group_id} {time.time()}\n")

    def wrap(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def wrapped_async(*args: Any, **options: Any) -> Any:
                point = f"{name}:{args[1]}" if name == "LedgerPart._run" else name  # the name of its script
                self.at(f"{point}.before")
                self.write_down(name, args)
                result = await method(*args, **options)
                if result != []:  # nothing claimed, nothing taken: not there yet
                    self.at(f"{point}.after")
                return result

            return wrapped_async

        @functools.wraps(method)
        def wrapped(*args: Any, **options: Any) -> Any:
            self.at(f"{name}.before")
            result = method(*args, **options)
            self.at(f"{name}.after")
            return result

        return wrapped


def main() -> None:
    service = sys.argv[1]
    obedience = Obedience(Path(os.environ["CHAOS_ORDERS"]))
    for place in METHODS[service]:
        module, _, name = place.partition(":")
        *owners, attribute = name.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, attribute, obedience.wrap(getattr(owner, attribute), name))
    sys.argv = [service]
    runpy.run_module(service, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
