"""Programs of the services, which commands run in processes of their own: this one never imports torch."""

import subprocess
import sys
from collections.abc import Sequence

DEADLINE_S = 300.0

CHILDREN: list["subprocess.Popen[str]"] = []  # that run just now


def run_service(module: str, arguments: Sequence[str], given: str) -> str:
    """Run a module of a service with a text as its standard input, and return what it prints.

    Raises ValueError if it prints nothing or takes too long.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        CHILDREN.append(child)
        try:
            printed, complaints = child.communicate(given, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            child.kill()
            text = f"{module} took longer than {DEADLINE_S:.0f} s; try again when this machine is less busy"
            raise ValueError(text) from error
        finally:
            CHILDREN.remove(child)
    if not printed:
        raise ValueError(complaints.strip().splitlines()[-1] if complaints.strip() else f"{module} failed")
    return printed
