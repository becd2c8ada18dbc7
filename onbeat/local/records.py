"""The program behind `onbeat.process.records`: it opens the records of a data folder, writes the address of the broker
to its standard output, and ends with its standard input."""

import json
import select
import signal
import sys
from pathlib import Path

from onbeat.contracts.errors import OnbeatError
from onbeat.local.daemon import raise_exit
from onbeat.local.redis_server import free_port
from onbeat.local.stack import StackOptions, local_stack
from onbeat.process.extras import require_extra
from onbeat.process.stacks import VIEW

CHECK_S = 0.5


def main() -> int:
    signal.signal(signal.SIGTERM, raise_exit)  # `onbeat down`
    try:
        require_extra("broker", user="a look at records")
        # The usual port is left to stacks that run.
        options = StackOptions(Path(sys.argv[1]), port=free_port(), is_view=True)
        with local_stack(options, VIEW, report=lambda _: None) as (url, supervisor):
            say(url=url)
            while not select.select([sys.stdin], [], [], CHECK_S)[0]:
                supervisor.check()
        return 0
    except (OnbeatError, OSError, ValueError) as error:
        say(error=str(error))
        return 1


def say(**answer: str) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
