"""`onbeat run`: one job on a local stack, from nothing to the summary, and nothing left behind."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from onbeat.client import AsyncClient
from onbeat.client.active import find_active
from onbeat.client.datasets import DataFile, take_local_files
from onbeat.config import JobConfig
from onbeat.contracts.errors import ApiError, OnbeatError
from onbeat.contracts.records import JobRecord
from onbeat.contracts.states import JobState
from onbeat.local.checkpoints import checkpoints_of
from onbeat.local.next_steps import next_steps
from onbeat.local.stack import StackOptions, describe_places, stack_at_usual_port
from onbeat.local.state import create_data_dir
from onbeat.local.supervisor import Supervisor
from onbeat.process.stacks import running_stack
from onbeat.terminal.follow import Following, follow
from onbeat.terminal.report import build_report, check_report_path, write_report
from onbeat.terminal.summary import print_summary

PAUSE_DEADLINE_S = 10.0
INTERRUPTED = 130
UP_POOL = "default"


class RunConsole(Console):
    """A console that lets a run notice that nothing reads its output any more, as behind `| head`."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):  # rich would end the process, and the job would not be paused
            super().on_broken_pipe()
        raise BrokenPipeError("nothing reads the output any more")


class JobRun:
    """One job with its data files on the broker at `url`: submit or continue, follow, summarise; or pause."""

    def __init__(
        self, url: str, config: JobConfig, files: Sequence[DataFile], report_path: Path | None, console: Console
    ) -> None:
        self._url, self._config, self._files = url, config, files
        self._report_path, self._console = report_path, console
        self.job: JobRecord | None = None  # once it is submitted
        self._cursor = "0"  # the newest event of a job that is continued

    async def run(self, is_fresh: bool, check: Callable[[], None] | None) -> JobState:
        """Run the job to its end. `check`: looks after the services, and prints how they end; None: others do."""
        following = Following() if check is None else Following(check, told_kinds=frozenset({"process.ended"}))
        async with AsyncClient(self._url) as client:
            job = self.job = await self._submit(client, is_fresh)
            self._console.out(f"job {job.id} ({job.num_iterations} iterations): {self._url}/#/jobs/{job.id}")
            following = replace(following, cursor=self._cursor)
            progress = await follow(client, job.id, self._console, following)
            self.job = progress.job
            await print_summary(client, progress, self._console)
            if self._report_path is not None:
                write_report(self._report_path, await build_report(client, job.id))
            return progress.job.state

    async def _submit(self, client: AsyncClient, is_fresh: bool) -> JobRecord:
        """Continue the unfinished job of the same file. Paused jobs of other files stay paused, and the jobs that a
        killed run has left go first."""
        for job in reversed(await find_active(client)):
            if job.state == JobState.CANCELLING or job.pool != self._config.pool:
                continue
            done = f"{job.next_iteration} of {job.num_iterations} iterations"
            if is_same(job, self._config) and not is_fresh:
                self._console.out(f"continuing job {job.id} after {done} (--fresh begins anew)")
                if past := await client.jobs.events(job.id):
                    self._cursor = past[-1].id
                return await client.jobs.resume(job.id) if job.state == JobState.PAUSED else job
            if is_fresh and (is_same(job, self._config) or job.state != JobState.PAUSED):
                await client.jobs.cancel(job.id)
            elif job.state == JobState.PAUSED:
                named = f"job {job.id} ({job.name})"
                self._console.out(f"{named} has another job file and stays paused after {done}: a new job begins")
            else:
                self._console.out(f"unfinished job {job.id} ({job.name}) goes first; --fresh cancels it")
        for file in self._files:
            await client.datasets.push(file)
        return await client.jobs.create(self._config)

    async def pause(self) -> None:
        """Let the job wait for the next run; cancel it if it has not begun, as there is nothing to keep."""
        if self.job is None:
            return
        async with asyncio.timeout(PAUSE_DEADLINE_S), AsyncClient(self._url) as client:
            try:
                self.job = await client.jobs.pause(self.job.id)
            except ApiError as refusal:
                if refusal.status != HTTPStatus.CONFLICT:
                    raise
                self.job = await client.jobs.get(self.job.id)
                if self.job.state == JobState.PENDING:
                    self.job = await client.jobs.cancel(self.job.id)
            if self._report_path is not None:
                try:
                    write_report(self._report_path, await build_report(client, self.job.id))
                except OnbeatError as error:  # the job is paused all the same
                    self._console.out(f"no report: {error}")


def run_job(
    config: JobConfig, job_folder: Path, options: StackOptions, report_path: Path | None, is_fresh: bool
) -> int:
    """Run the job. Return the exit code: 0 SUCCEEDED, 1 any other end, 130 interrupted. Raises OnbeatError."""
    console = RunConsole(highlight=False, markup=False)
    if report_path is not None:
        check_report_path(report_path)
    create_data_dir(options.data_dir)
    job = config.model_dump(mode="json")
    files = take_local_files(job, job_folder, options.data_dir)
    config = JobConfig.model_validate(job)
    run: JobRun | None = None
    with terminations_as_interrupts():
        try:
            with open_stack(replace(options, pool=config.pool), console) as (url, supervisor):
                run = JobRun(url, config, files, report_path, console)
                exit_code = run_or_pause(run, is_fresh, supervisor, console)
        except KeyboardInterrupt:
            is_submitted = run is not None and run.job is not None
            goes_on = "continues where the job stands" if is_submitted else "starts the services again"
            console.out(f"stopped; the same command {goes_on}")
            return INTERRUPTED
    if run.job is not None:
        say_what_now(run.job, options.data_dir, console, is_stopped=exit_code == INTERRUPTED)
    return exit_code


def say_what_now(job: JobRecord, data_dir: Path, console: Console, *, is_stopped: bool) -> None:
    """Say how a stopped job goes on, or what to do with one that is over."""
    if is_stopped:
        console.out(describe_stop(job, data_dir))
        return
    stack = running_stack(data_dir)  # a stack of `onbeat up`
    console.out()
    for label, line in next_steps(job, data_dir, stack.url if stack is not None else None):
        console.out(f"{label:<12} {line}")


def run_or_pause(run: JobRun, is_fresh: bool, supervisor: Supervisor | None, console: Console) -> int:
    """Run the job; pause it after Ctrl-C, and when nothing can be written, as to a terminal that has just gone.

    `supervisor`: looks after the services, and hurries after the next Ctrl-C; None: they are not ours.
    """
    check = None if supervisor is None else supervisor.check
    try:
        return 0 if asyncio.run(run.run(is_fresh, check)) == JobState.SUCCEEDED else 1
    except (KeyboardInterrupt, OSError) as reason:
        if isinstance(reason, OSError):  # the signals of a closed terminal may come after a write to it has failed
            for number in (signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        try:
            asyncio.run(run.pause())
            notice = "stopping (Ctrl-C again to stop at once)"
        except (OnbeatError, TimeoutError) as error:
            notice = f"the job was not paused in time, and goes on when services are back: {error}"
        if supervisor is not None:
            signal.signal(signal.SIGINT, lambda *_: supervisor.hurry())
        console.out(notice)
        if isinstance(reason, OSError):
            raise
        return INTERRUPTED


def describe_stop(job: JobRecord, data_dir: Path) -> str:
    """Say where the job stands, and how it goes on."""
    if job.state.is_final:
        return f"job {job.id} is {job.state}"
    if running_stack(data_dir) is not None:  # this is the stack of `onbeat up`: its trainer keeps the job
        text = f"job {job.id} is {job.state} after {job.next_iteration} of {job.num_iterations} iterations: the same "
        return text + f"command continues it, `onbeat jobs cancel {job.id}` ends it"
    checkpoints = checkpoints_of(data_dir, job.id)
    num_written = max(checkpoints, default=0)
    done = max(job.next_iteration, num_written)  # it may have committed one more before it stopped
    text = f"job {job.id} is {job.state} after {done} of {job.num_iterations} iterations: "
    text += "the same command continues it, --fresh begins anew"
    if num_written:
        text += f"; its checkpoint is {checkpoints[num_written]}"
    if num_written < done:
        text += f"; what was done since iteration {num_written} is computed again from the recorded responses"
    return text


@contextmanager
def open_stack(options: StackOptions, console: Console) -> Iterator[tuple[str, Supervisor | None]]:
    """Yield the URL of the stack of `onbeat up`, or else of our own with the supervisor of its services."""
    running = running_stack(options.data_dir)
    if running is not None and running.command == "up":
        if options.pool != UP_POOL:
            raise OnbeatError(
                f"the stack that is up serves pool {UP_POOL!r}, the job asks for {options.pool!r}: "
                f"`onbeat down` first, or add --set pool={UP_POOL}"
            )
        console.out(f"using the stack that is up at {running.url}, with its own rollouts, engine and cores")
        yield running.url, None
        return
    rollouts = "1 rollout" if options.num_rollouts == 1 else f"{options.num_rollouts} rollouts"
    console.out(f"starting Redis, broker, trainer and {rollouts} in {options.data_dir}")
    console.out(describe_places(options))
    with stack_at_usual_port(options, "run", console.out) as stack:
        yield stack


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end a run as Ctrl-C does. They often come twice, and count once.

    Output to a closed terminal is discarded.
    """
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def interrupt(received: int, _: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        if received == signal.SIGHUP:
            for descriptor in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # commands in a script's background ignore Ctrl-C
            interrupt_between_callbacks()
        else:
            signal.raise_signal(signal.SIGINT)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
    before |= {number: signal.signal(number, interrupt) for number in numbers}  # a terminal may close under nohup
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_between_callbacks() -> None:
    """Raise KeyboardInterrupt, in an event loop only between two callbacks: inside one it could leave a lock taken.

    `Popen.poll` has such a lock. While it is taken a process seems to run on, and `Popen.wait` never returns. A
    callback that waits for ever, as for a reader of its output, is not interrupted.
    """

    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # none runs
        interrupt()
    else:
        loop.call_soon_threadsafe(interrupt)  # this wakes the loop, too


def is_same(job: JobRecord, config: JobConfig) -> bool:
    try:
        recorded = JobConfig.model_validate(job.config)
        return recorded == (config if recorded.rendering.now is None else config.dated(recorded.rendering.now))
    except ValidationError:
        return False  # it is of another version of Onbeat
