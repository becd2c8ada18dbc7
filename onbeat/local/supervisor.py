"""Child processes: started together, restarted when they die, stopped in waves with nothing left.

Each child runs under its own guard (see guard.py) in its own session, with its output in a log file.
"""

import contextlib
import math
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onbeat.contracts.errors import OnbeatError
from onbeat.machine.memory import num_oom_kills
from onbeat.process.children import command_of, kill_group

MAX_RESTARTS = 4
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 15.0
HEALTHY_AFTER_S = 120.0  # a service that ran for this long starts again with a clean record
TAIL_LINES = 20
OOM_S = 15.0  # a service is killed for want of memory this long before its guard is gone, at most
KILLED = 128 + signal.SIGKILL  # exit code of a guard whose service was killed so
KILL_S = 5.0  # time for the kernel to end a killed process
GUARD_S = 7.0  # time for a guard to kill the remaining processes of its service
# Variables with these prefixes are not inherited: the shell may have them for services elsewhere.
NOT_INHERITED = (
    *("ONBEAT_API_KEY", "ONBEAT_URL", "ONBEAT_CA_FILE", "ONBEAT_TLS_", "ONBEAT_REDIS_USERNAME"),
    *("ONBEAT_REDIS_PASSWORD_FILE", "ONBEAT_REDIS_CA_FILE", "ONBEAT_REDIS_CERT_FILE", "ONBEAT_REDIS_KEY_FILE"),
    *("ONBEAT_WEIGHTS_API_KEY_FILE", "ONBEAT_WEIGHTS_HOST", "ONBEAT_WEIGHTS_PORT", "ONBEAT_WEIGHTS_ADVERTISE"),
    *("ONBEAT_WEIGHTS_TLS_", "ONBEAT_METRICS_"),
)


def inherited_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}


class StackFailed(OnbeatError):
    """A service does not start, or keeps dying. The message ends with the tail of its log."""


@dataclass(frozen=True)
class ServiceSpec:
    name: str
    command: Sequence[str]
    wave: int  # stopped in descending order
    env: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 10.0
    missing: Callable[[], str] = lambda: ""  # the part that is still missing for readiness; "" when it is ready
    ready_deadline_s: float = 30.0
    process: str = ""  # the id by which jobs know it; "": its name
    run_variable: str = ""  # a variable that gets a new id with each start; "": none


@dataclass(frozen=True)
class ServiceEnd:
    """A service that ended and was not asked to. None of its processes is left."""

    process: str
    run: str  # the id of this start; "" if it has none
    exit_code: int
    sentence: str  # the way it ended, and the next step of its supervisor


class Service:
    """One child under its guard, whose process id is also the id of its process group."""

    def __init__(self, spec: ServiceSpec, log_path: Path, held_fds: Sequence[int], scratch: Path) -> None:
        self.spec, self.log_path, self._scratch, self._held_fds = spec, log_path, scratch, held_fds
        self.num_failures = 0
        self.restart_at: float | None = None
        self.spawn()

    def spawn(self) -> None:
        guard = command_of("onbeat.process.guard", str(os.getpid()), str(self.spec.grace_s))
        shutil.rmtree(self._scratch, ignore_errors=True)  # the predecessor that wrote there has no process left
        self._scratch.mkdir(parents=True, exist_ok=True)
        self.run = secrets.token_hex(8) if self.spec.run_variable else ""
        variables = {"TMPDIR": str(self._scratch), **self.spec.env, "PYTHONUNBUFFERED": "1"}
        if self.run:
            variables[self.spec.run_variable] = self.run
        with self.log_path.open("ab") as output:
            self.guard = subprocess.Popen(
                [*guard, *self.spec.command],
                env=inherited_environment() | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._held_fds,
            )
        self._started_at = time.monotonic()
        self.restart_at = None

    def kill_group(self) -> None:
        """Kill the process group, also after the guard's death: processes that it could not kill are still in it."""
        kill_group(self.guard.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a kernel that waits for a disk, or Ctrl-C inside `poll`
            self.guard.wait(KILL_S)

    def schedule_restart(self) -> bool:
        """Schedule a restart after a growing delay. Return False when the service has died too often."""
        now = time.monotonic()
        if now - self._started_at > HEALTHY_AFTER_S:
            self.num_failures = 0
        self.num_failures += 1
        self.restart_at = now + min(FIRST_DELAY_S * 2 ** (self.num_failures - 1), MAX_DELAY_S)
        return self.num_failures <= MAX_RESTARTS

    def tail(self) -> str:
        log = self.log_path.read_text("utf-8", errors="replace") if self.log_path.exists() else ""  # it may be gone
        lines = log.splitlines()[-TAIL_LINES:]
        body = "\n".join(f"  {line}" for line in lines) or "  (nothing was logged)"
        return f"last lines of {self.log_path}:\n{body}"


class Supervisor:
    """A supervisor of services: call `start` for those that start together, `check` about every second, and `stop` in
    any case.

    Guards keep `held_fds` open: a lock among them stays taken until the last child is gone, even if we are killed.
    Temporary files of a service go to its own folder in `scratch`, which is emptied before each of its starts. `on_end`
    is called after each end, before the restart.
    """

    def __init__(
        self,
        log_dir: Path,
        report: Callable[[str], None],
        held_fds: Sequence[int],
        scratch: Path,
        on_end: Callable[[ServiceEnd], None] = lambda end: None,
    ) -> None:
        self._log_dir, self._scratch = log_dir, scratch
        self._held_fds = held_fds
        self._report, self._on_end = report, on_end
        self._num_oom_kills, self._oom_at = num_oom_kills(), -math.inf  # the latter by time.monotonic()
        self._is_hurried = False
        self.services: list[Service] = []

    def start(self, specs: Sequence[ServiceSpec]) -> None:
        """Start the services together. Raises StackFailed when one of them dies or is not ready in time."""
        for service in [self._launch(spec) for spec in specs]:
            wait_until_ready(service)

    def _launch(self, spec: ServiceSpec) -> Service:
        log_path = self._log_dir / f"{spec.name}.log"
        if log_path.exists():
            log_path.replace(log_path.with_suffix(".log.1"))
        service = Service(spec, log_path, self._held_fds, self._scratch / spec.name)
        self.services.append(service)
        return service

    def check(self) -> None:
        """Notice deaths and restart after a growing delay. Raises StackFailed when a service keeps dying."""
        before, self._num_oom_kills = self._num_oom_kills, num_oom_kills()
        if self._num_oom_kills > before:
            self._oom_at = time.monotonic()
        for service in self.services:
            if service.restart_at is not None:
                if time.monotonic() >= service.restart_at:
                    service.spawn()
            elif (exit_code := service.guard.poll()) is not None:
                service.kill_group()
                cause = describe_exit(exit_code)
                if exit_code == KILLED and time.monotonic() - self._oom_at < OOM_S:
                    cause += " by the kernel, as memory ran out here"
                self._restart(service, exit_code, cause)

    def _restart(self, service: Service, exit_code: int, cause: str) -> None:
        """Schedule a restart, and tell it. Raises StackFailed when the service keeps dying."""
        spec, is_hopeless = service.spec, not service.schedule_restart()
        process = spec.process or spec.name
        then = f"restart {service.num_failures} of {MAX_RESTARTS} (log: {service.log_path})"
        if is_hopeless:
            then = f"it was restarted {MAX_RESTARTS} times, so the stack ends (log: {service.log_path})"
        self._on_end(ServiceEnd(process, service.run, exit_code, f"{process} {cause}; {then}"))
        if is_hopeless:
            raise StackFailed(f"{spec.name} {cause}, after {MAX_RESTARTS} restarts; {service.tail()}")
        self._report(f"{process} {cause}; {then}")

    def hurry(self) -> None:
        """Let the `stop` that runs, or the next one, kill everything and raise KeyboardInterrupt.

        This is for a handler of Ctrl-C: an exception that it raises itself is lost where Python frees objects.
        """
        self._is_hurried = True

    def stop(self, *, is_urgent: bool = False) -> None:
        """Stop the services, the last wave first: SIGTERM, then SIGKILL for the process groups. Safe to call twice.

        `is_urgent`, or `hurry` or an exception (Ctrl-C) meanwhile: everything is killed.
        """
        try:
            waves = {service.spec.wave for service in self.services} if not is_urgent else set()
            for wave in sorted(waves, reverse=True):
                services = [service for service in self.services if service.spec.wave == wave]
                for service in services:
                    service.guard.terminate()
                wait_for_end(services, max(service.spec.grace_s for service in services), lambda: self._is_hurried)
                if self._is_hurried:
                    raise KeyboardInterrupt
        finally:
            for service in self.services:
                service.guard.send_signal(signal.SIGINT)  # it kills the service and all that this has started
            wait_for_end(self.services, 0.0)
            self.services = []


def wait_for_end(services: Sequence[Service], grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
    """Return when all guards are gone and nothing is left of their process groups."""
    deadline = time.monotonic() + grace_s + GUARD_S
    while any(service.guard.poll() is None for service in services) and time.monotonic() < deadline:
        if is_hurried():
            break
        time.sleep(0.02)
    for service in services:
        service.kill_group()


def wait_until_ready(service: Service) -> None:
    spec = service.spec
    deadline = time.monotonic() + spec.ready_deadline_s
    while missing := spec.missing():
        if (exit_code := service.guard.poll()) is not None:
            raise StackFailed(f"{spec.name} {describe_exit(exit_code)} while starting; {service.tail()}")
        if time.monotonic() > deadline:
            raise StackFailed(
                f"{spec.name} is not ready after {spec.ready_deadline_s:.0f} s: {missing}; {service.tail()}"
            )
        time.sleep(0.05)


def describe_exit(exit_code: int) -> str:
    number = exit_code - 128 if exit_code > 128 else -exit_code
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
    return f"exited with code {exit_code}"
