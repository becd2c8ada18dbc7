"""Checkpoints at iteration boundaries: a Hugging Face model folder plus what training needs to go on. No pickle.

    checkpoints/iteration-000040/
      onbeat_job.json                              the job that wrote it
      model.safetensors config.json tokenizer...   loads as the source does; of a sharded model one file for each rank,
                                                   of a large one with experts several, and
                                                   model.safetensors.index.json
      optimizer/rank-00000-of-00002.safetensors    that rank's rows: float32 masters, both moments, GAC's last gradient
      policies/000038-00000.safetensors            published versions that open iterations are generated with
      state.json                                   written last, with the size of every file: without it nothing counts

A folder appears under its name only when it is complete and on disk. It is written in the background, by all ranks
together on one shared disk, and can be read by another number of ranks.
"""

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from onbeat.contracts.errors import JobFailed
from services.trainer.model.exported_weights import Convert, in_parts
from services.trainer.model.tensor_files import HostShards, Tensors, read_tensors
from services.trainer.world import ALONE, PeerLost, World

logger = logging.getLogger(__name__)

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Sizes = dict[str, int]  # bytes of each file, by its name in the checkpoint's folder
WEIGHTS_FILE = "model.safetensors"
NAME = re.compile(r"iteration-\d{6,}")  # name of a checkpoint's folder; a copy beside it has another name


class NotWritten(JobFailed):
    """A checkpoint could not be written: no disk space, or no right to. Nothing of it is left; older ones are whole."""


@dataclass(frozen=True)
class TrainState:
    """The point that training has reached: all iterations before `next_iteration` are in the weights."""

    job_id: str
    model_path: str
    next_iteration: int = 0
    policy_version: int = 0
    published_version: int = 0  # the newest that rollouts know; older than policy_version when a transfer was skipped
    num_steps: int = 0
    first_mismatch: float | None = None  # mismatch of the job's first iteration, nats per token; see `iteration`
    reward_parts: list[str] = field(default_factory=list)  # parts that have curves, in the order in which they came
    num_without_signal: int = 0  # number of the last iterations in a row

    def forked(self, job_id: str) -> "TrainState":
        """Return the state of a job whose rollouts have yet to get this version and to be compared on it."""
        forked = replace(self, job_id=job_id, published_version=self.policy_version)
        return replace(forked, first_mismatch=None, reward_parts=[], num_without_signal=0)


@dataclass(frozen=True)
class Content:
    """The part of a checkpoint that one rank writes. Nothing in it changes any more."""

    state: TrainState
    shards: HostShards
    files: Mapping[str, bytes]  # files of rank 0
    is_sharded: bool  # weights are written by every rank; else all of them by rank 0
    weights: Tensors = field(default_factory=dict)
    policies: Mapping[int, Tensors] = field(default_factory=dict)
    convert: Convert | None = None  # the weights are not those of the source's files, which are made of them


class CheckpointStore:
    """The checkpoints of a job; at most one save is in flight. Every rank creates the store, and calls `save` and
    `restore` at the same points."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        world: World = ALONE,
        writer: str = "0",
        timeout_s: float = 1800.0,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the store. `writer` distinguishes two trainers that both believe the job is theirs: the epoch of the
        lease, a number. `while_waiting` is called each second of a wait for the disk, which `timeout_s` bounds."""
        self.timeout_s, self._while_waiting = timeout_s, while_waiting
        self.folder, self._keep, self._world, self._writer = folder, keep, world, writer
        self._channel = self._world.side_channel  # channel of the writing threads, beside the messages of the training
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: tuple[int, Future[None]] | None = None
        self._is_read = threading.Event()  # writing does not need the live tensors any more
        self._is_read.set()
        self._finished: list[tuple[int, Path]] = []

    # ---- writing -----------------------------------------------------------------------------------------------------

    def save(
        self,
        state: TrainState,
        weights: NamedTensors,
        tensors: Tensors,
        files: Mapping[str, bytes],
        policies: Mapping[int, NamedTensors] | None = None,
        is_sharded: bool = False,
        convert: Convert | None = None,
    ) -> None:
        """Wait for the save before, copy what is on an accelerator, and return; writing goes on in the background.

        `tensors` may change after `wait_until_read`: a copy of them would be most of the trainer's memory.
        So may `weights`, in the dtype they are published in, on the host. `policies` (by version) are host tensors that
        will not change, such as those of an older version. Both are rank 0's, or of a sharded model each rank's own.
        `convert`: see `exported_weights`. Raises as `wait`.
        """
        self.wait()
        shards = HostShards.of(tensors, self._world.is_main)
        content = Content(state, shards, files if self._world.is_main else {}, is_sharded)
        if self._world.is_main or is_sharded:
            frozen = {version: dict(named) for version, named in (policies or {}).items()}
            content = replace(content, weights=dict(weights), policies=frozen, convert=convert)
        self._is_read.clear()
        self._in_flight = (state.next_iteration, self._thread.submit(self._write, content))

    def wait_until_read(self) -> None:
        """Return when the tensors of the last save may change. Raises JobFailed when that takes long."""
        self._wait_for(lambda: self._is_read.wait(timeout=1.0))

    def wait(self) -> None:
        """Wait until nothing is being written. Raises NotWritten when that failed, JobFailed when it takes long."""
        if self._in_flight is None:
            return
        next_iteration, written = self._in_flight
        self._wait_for(lambda: bool(futures_wait([written], timeout=1.0).done))
        self._in_flight = None
        path = self.path(next_iteration)
        try:
            written.result()
        except (OSError, SafetensorError) as error:
            raise NotWritten(f"{path} cannot be written: {error}; free disk space or change its rights") from error
        self._finished.append((next_iteration, path))

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        """Call it, which takes a second at most, until it returns True. Raises JobFailed after `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while not is_done():
            self._while_waiting()
            if time.monotonic() > deadline:
                assert self._in_flight is not None
                raise JobFailed(
                    f"checkpoint {self.path(self._in_flight[0])} is still not on disk after {self.timeout_s:.0f} s "
                    "(ONBEAT_CHECKPOINT_TIMEOUT_S); is the disk slow?"
                )

    def close(self, timeout_s: float = 60.0) -> None:
        """Let a write in flight come to its end, so that this folder is neither read nor written meanwhile."""
        if self._in_flight is not None:
            futures_wait([self._in_flight[1]], timeout_s)
        self._thread.shutdown(wait=False)

    def finished(self) -> list[tuple[int, Path]]:
        """Return (next_iteration, folder) of what became durable since the last call, at once. Raises as `wait`."""
        if self._in_flight is not None and self._in_flight[1].done():
            self.wait()
        finished, self._finished = self._finished, []
        return finished

    def _write(self, content: Content) -> None:
        target = self.path(content.state.next_iteration)
        partial = self.folder / f".{target.name}.{self._writer}.partial"
        try:
            self._together(lambda: prepare(partial) if self._world.is_main else None)
            files = self._together(lambda: write_content(partial, content, self._world, self._is_read.set))
            self._together(lambda: self._seal(partial, target, content.state, files) if self._world.is_main else None)
        except OSError:  # an error on one rank is raised on all, so that none writes there any more
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # the written part takes the disk space that is missing
            raise
        finally:
            self._is_read.set()

    def _together(self, step: Callable[[], Sizes | None]) -> Sizes:
        """Run a step on every rank; return the files that all wrote. Raises OSError everywhere if it failed on any."""
        report: dict[str, Any] = {"failure": "", "files": {}}
        try:
            report["files"] = step() or {}
        except (OSError, SafetensorError) as error:
            report["failure"] = f"rank {self._world.rank}: {error}"
        reports = [json.loads(text) for text in self._channel.all_gather_bytes(json.dumps(report).encode())]
        if failures := [report["failure"] for report in reports if report["failure"]]:
            raise OSError("; ".join(failures))
        return {name: size for report in reports for name, size in report["files"].items()}

    def _seal(self, partial: Path, target: Path, state: TrainState, files: Sizes) -> None:
        """Complete a checkpoint whose files are all written: list them, sync, let it appear, then drop the oldest."""
        check_files(partial, files)
        write_state(partial, state, files | write_index(partial))
        appear(partial, target)
        for leftover in self.folder.glob(".*.partial"):
            if epoch_of(leftover) < epoch_of(partial):  # never what a successor is writing
                shutil.rmtree(leftover, ignore_errors=True)
        for old in self.complete()[: -self._keep]:
            (old / "state.json").unlink(missing_ok=True)  # first: the rest does not count any more
            shutil.rmtree(old, ignore_errors=True)  # another trainer may be at it, too

    # ---- reading -----------------------------------------------------------------------------------------------------

    def path(self, next_iteration: int) -> Path:
        return self.folder / folder_name(next_iteration)

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        folders = (path.parent for path in self.folder.glob("iteration-*/state.json"))
        return sorted((folder for folder in folders if NAME.fullmatch(folder.name)), key=number_of)

    def restore(
        self,
        job_id: str,
        model_path: str,
        load: Callable[[Tensors, int], None],
        before: int | None = None,
        sharded: Mapping[str, torch.Tensor] | None = None,
    ) -> TrainState | None:
        """Hand the newest checkpoint's tensors and number of steps to `load`; None when there is no checkpoint.

        `before`: only checkpoints that do not contain this iteration. `sharded`: parameters by name whose state is
        wanted sharded as they are; all else comes whole. Raises ValueError, naming the folder, when it is torn or
        belongs to another job or model.
        """
        usable = [folder for folder in self.complete() if before is None or number_of(folder) <= before]
        name = self._world.broadcast_bytes((usable[-1].name if usable else "").encode()).decode()
        folder = self.folder / name
        if not name:
            return None
        if b"" in self._world.all_gather_bytes(b"here" if folder.is_dir() else b""):
            raise PeerLost(f"{folder} is not there on every rank; give all of them one shared disk (ONBEAT_DATA_DIR)")
        try:
            state = check(folder)
            if (state.job_id, state.model_path) != (job_id, model_path):
                raise ValueError(f"it belongs to job {state.job_id} on {state.model_path}")
            load(read_tensors(folder / "optimizer", sharded or {}), state.num_steps)
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            if self._world.size == 1 and not (folder / "state.json").exists():  # a predecessor has just dropped it
                return self.restore(job_id, model_path, load, before, sharded)
            raise ValueError(
                f"checkpoint {folder} cannot be used: {error}; restore it from a backup, or submit the job again"
            ) from error
        logger.info("resumed from %s: next iteration %d", folder, state.next_iteration)
        return state

    def policies(self, next_iteration: int) -> dict[int, Iterator[tuple[str, torch.Tensor]]]:
        """Return the frozen policies of a complete checkpoint by version, each read as it is iterated."""
        files: dict[int, list[Path]] = {}
        for file in sorted((self.path(next_iteration) / "policies").glob("*.safetensors")):
            files.setdefault(int(file.stem.partition("-")[0]), []).append(file)
        return {version: chain.from_iterable(map(read_named, parts)) for version, parts in files.items()}


def folder_name(next_iteration: int) -> str:
    return f"iteration-{next_iteration:06d}"


def number_of(folder: Path) -> int:
    """Return the next iteration of a checkpoint: `iteration-000040` -> 40."""
    return int(folder.name.removeprefix("iteration-"))


def check(folder: Path) -> TrainState:
    """Return the folder's state. Raises OSError or ValueError, naming the file, when one is missing or torn."""
    try:
        record = json.loads((folder / "state.json").read_text("utf-8"))
        state, files = TrainState(**record["state"]), record["files"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"state.json is torn or of another version of Onbeat ({error})") from error
    check_files(folder, files)
    return state


def check_files(folder: Path, sizes: Sizes) -> None:
    """Raise OSError naming the first file that is missing or torn."""
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise OSError(f"{name} is missing (if another rank has it: all ranks need the same disk, ONBEAT_DATA_DIR)")
        if path.stat().st_size != size:
            raise OSError(f"{name} is torn: {path.stat().st_size} bytes instead of {size}")


def prepare(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def write_content(partial: Path, content: Content, world: World, on_read: Callable[[], None]) -> Sizes:
    """Write and sync this rank's files; their sizes in bytes by name. `on_read`: the live tensors may change."""
    rank, size = world.rank, world.size
    paths: list[Path] = []

    def new(name: str) -> Path:
        paths.append(partial / name)
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        return paths[-1]

    if content.shards.tensors:
        content.shards.write(new(f"optimizer/rank-{rank:05d}-of-{size:05d}.safetensors"))
    weights_file = shard_name(rank, size) if content.is_sharded else WEIGHTS_FILE
    if content.weights:
        for name, part in in_parts(content.weights, content.convert, weights_file):
            save_file(part, new(name), metadata={"format": "pt"})
    on_read()
    for name, file in content.files.items():
        new(name).write_bytes(file)
    for version, policy in content.policies.items():
        if policy:
            save_file(policy, new(f"policies/{version:06d}-{rank:05d}.safetensors"), metadata={"format": "pt"})
    for path in paths:
        path.chmod(0o644)  # safetensors writes for the owner only
        sync_path(path)
    return {str(path.relative_to(partial)): path.stat().st_size for path in paths}


def write_index(partial: Path) -> Sizes:
    """Write which file has which of the weights, where they are in several; its size in bytes by name."""
    files = sorted(partial.glob("model*.safetensors"))
    if [file.name for file in files] in ([], [WEIGHTS_FILE]):
        return {}
    index: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            index |= dict.fromkeys(stored.keys(), file.name)
    path = partial / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2), "utf-8")
    sync_path(path)
    return {path.name: path.stat().st_size}


def write_state(partial: Path, state: TrainState, files: Sizes) -> None:
    """Write the last file. Returns when all names in the folder are on disk."""
    (partial / "state.json").write_text(json.dumps({"state": asdict(state), "files": files}, indent=2), "utf-8")
    for path in [partial / "state.json", *(path for path in partial.iterdir() if path.is_dir()), partial]:
        sync_path(path)


def appear(partial: Path, target: Path) -> None:
    """Rename in one move. A complete checkpoint stays: it has the same bits, and a process may be reading it."""
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        is_complete = (target / "state.json").exists()
        shutil.rmtree(partial if is_complete else target)
        if not is_complete:  # it was being removed when its trainer died
            partial.rename(target)
    sync_path(target.parent)


def epoch_of(partial: Path) -> int:
    """Return the number of the writer: `.iteration-000003.7.partial` -> 7."""
    return int(partial.name.split(".")[-2])


def shard_name(rank: int, size: int) -> str:
    return f"model-{rank + 1:05d}-of-{size:05d}.safetensors"


def read_named(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118  not a mapping
            yield name, stored.get_tensor(name)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
