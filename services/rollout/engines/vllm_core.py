"""The process of vLLM's engine core. On a CPU it is a forked child of the service, so that vLLM is imported once, and
both share the memory that this takes. vLLM itself would start a new process, which imports everything again.

A forked child has all that the service has, and lets go of what is not its own:

    descriptors    connections, ports and locks would be held for as long as the core lives, and a signal to the core
                   would wake the service's event loop
    handlers       until vLLM has its own, signals would be ignored

The service removes the core's shared memory in the end: a core that vLLM has to kill takes its own tracker along.

While it serves, it collects no garbage among the service's objects: each page that this writes to would be copied.
"""

import functools
import gc
import multiprocessing
import os
import signal
import stat
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.context import ForkContext, ForkProcess

from services.rollout.engines.imports import IMPORTING

# Seconds that the engine core has to end its workers after its parent process has died.
EXIT_GRACE_S = 10.0

STANDARD_STREAMS = range(3)


class ForkedCore(ForkProcess):
    def start(self) -> None:
        """Fork in a new thread. A core forked by a thread that has computed with OpenMP would wait for that thread's
        helpers, which are not there; one forked by a thread of a pool would join itself at its end."""
        thread = threading.Thread(target=self._fork, name="fork-engine-core")
        thread.start()
        thread.join()
        if self.pid is None:
            raise RuntimeError("vLLM's engine core could not be forked; the log has the error")

    def _fork(self) -> None:
        resource_tracker.ensure_running()
        with IMPORTING:  # a module that another thread is importing would stay locked in the child
            super().start()

    def run(self) -> None:
        from vllm import plugins

        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_DFL)
        let_go_of_descriptors()
        end_with_parent()
        gc.freeze()
        plugins.plugins_loaded = False  # they set up this process, too
        super().run()


class CoreContext(ForkContext):
    Process = ForkedCore


def fork_engine_cores() -> None:
    """Make vLLM fork the engine cores that this process starts."""
    from vllm.v1.engine import core, utils  # noqa: F401, `core` is imported for the child

    utils.get_mp_context = CoreContext


def let_go_of_descriptors() -> None:
    """Replace all descriptors but standard streams and pipes, through some of which parent and child watch each other.

    They are not closed: the objects that own them still exist, and may close these numbers later.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {*STANDARD_STREAMS, nothing}:
        with suppress(OSError):  # the descriptor of the listing itself is closed
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


@functools.cache
def end_with_parent() -> None:
    """End this engine core with its parent: it would outlive a killed one and keep the device. Workers follow it."""
    threading.Thread(target=wait_for_parents_end, name="end-with-parent", daemon=True).start()


def wait_for_parents_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_GRACE_S)
    os._exit(1)
