"""`onbeat up` and `onbeat down`: the local stack in a background process of its own."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from onbeat.contracts.errors import OnbeatError
from onbeat.local.stack import StackOptions, stack_at_usual_port
from onbeat.local.state import LEFTOVERS_DEADLINE_S, OWNER_DEADLINE_S, create_data_dir, take_lock
from onbeat.process.children import command_of
from onbeat.process.stacks import OWNER_LOCK, StackState, has_processes, running_stack, this_machine, wait_until

log = logging.getLogger(__name__)

DAEMON_COMMAND = command_of("onbeat.local.daemon")
START_DEADLINE_S = 300.0  # a second try at another port included
STOP_DEADLINE_S = 120.0


def start_in_background(options: StackOptions) -> StackState:
    """Start the stack and return when it is ready. Raises OnbeatError with the reason of the failure."""
    create_data_dir(options.data_dir)
    log_path = options.data_dir / "logs" / "stack.log"
    with take_lock(options.data_dir / OWNER_LOCK, OWNER_DEADLINE_S):  # or else the log is another stack's
        log_path.write_bytes(b"")
    arguments = json.dumps({**asdict(options), "data_dir": str(options.data_dir)})
    with log_path.open("ab") as output:  # two that start at the same moment do not overwrite each other
        daemon = subprocess.Popen(
            [*DAEMON_COMMAND, arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return wait_until_up(daemon, options.data_dir, log_path)
    except BaseException:  # Ctrl-C while starting, too
        daemon.terminate()
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(STOP_DEADLINE_S)
        raise


def wait_until_up(daemon: "subprocess.Popen[bytes]", data_dir: Path, log_path: Path) -> StackState:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        state = running_stack(data_dir)
        if state is not None and state.pid == daemon.pid:
            return state
        if daemon.poll() is not None:
            written = log_path.read_text(encoding="utf-8", errors="replace").strip()
            reason = written or f"it wrote nothing to {log_path}: is the disk full?"
            raise OnbeatError(f"the stack did not start:\n{reason}")
        time.sleep(0.1)
    raise OnbeatError(f"the stack is not up after {START_DEADLINE_S:.0f} s; see {log_path}")


def stop_in_background(data_dir: Path) -> bool:
    """Stop the stack of this data folder, no matter what started it. Return False if none was running."""
    wait_until(lambda: running_stack(data_dir) is not None or not has_processes(data_dir), LEFTOVERS_DEADLINE_S)
    state = running_stack(data_dir)
    if state is None:
        if has_processes(data_dir):
            raise OnbeatError(f"a stack in {data_dir} is just starting or ending; try again in a few seconds")
        return False
    if state.machine not in ("", this_machine()):
        raise OnbeatError(f"the stack in {data_dir} runs elsewhere, on {state.host} or in a container: stop it there")
    for number, deadline_s in ((signal.SIGTERM, STOP_DEADLINE_S), (signal.SIGKILL, 20.0)):
        try:
            with suppress(ProcessLookupError):
                os.kill(state.pid, number)
        except PermissionError as error:
            user = f"the user who started it has to stop it (process {state.pid})"
            raise OnbeatError(f"the stack in {data_dir} is another user's; {user}") from error
        if wait_until(lambda: not has_processes(data_dir), deadline_s):
            # It gives up the locks just before it is gone.
            wait_until(lambda: not Path(f"/proc/{state.pid}").exists(), 0.3)
            return True
    raise OnbeatError(f"the stack in {data_dir} (process {state.pid}) does not stop")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    given = json.loads(sys.argv[1])
    options = StackOptions(**{**given, "data_dir": Path(given["data_dir"])})
    signal.signal(signal.SIGTERM, raise_exit)
    asked: list[int] = []  # signals; raised within `check`, an exception could leave the lock of a process taken
    try:
        with stack_at_usual_port(options, command="up") as (url, supervisor):
            signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
            log.info("the stack is up at %s", url)
            while not asked:
                supervisor.check()
                time.sleep(0.5)
    except (OnbeatError, OSError, ValueError) as error:
        log.error("%s", error)
        return 1
    return 0


def raise_exit(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stopping takes its time, and only once
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
