"""A process that prepares itself and then becomes a command.

The `preexec_fn` of subprocess would do the same, but it forks this process. Once gRPC is loaded here, its fork handlers
run in the child and crash some of them (85 of 300 beside a busy server) before the command begins.
"""

import sys

IMPORTS = "import fcntl, os, signal, sys, termios"
BECOME = "os.execvp(sys.argv[1], sys.argv[1:])"
# Ctrl-C and a hang-up there mean this process, also where these tests run in the background.
TAKE_TERMINAL = "fcntl.ioctl(0, termios.TIOCSCTTY, 0); signal.signal(signal.SIGINT, signal.SIG_DFL)"
BLOCK_HANG_UP = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])"


def launch(command: list[str], *preparations: str) -> list[str]:
    """Return the command with statements before it; they see the modules of IMPORTS."""
    return [sys.executable, "-I", "-S", "-c", "\n".join([IMPORTS, *preparations, BECOME]), *command]
