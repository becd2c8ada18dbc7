"""`python -m tests.model`: the larger bounds, with what was counted. Exit status 1 at the first violation."""

import argparse
import sys
import time

import redis

from onbeat.process.temporary import private_folder
from tests.conftest import own_redis
from tests.model.bounds import LARGE
from tests.model.search import Search


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(LARGE), help=f"of {', '.join(LARGE)}; default: all")
    with private_folder("onbeat-model-") as folder, own_redis(folder) as url:
        for name in parser.parse_args().names:
            started = time.monotonic()
            report = Search(redis.Redis.from_url(url), LARGE[name]).run()
            sys.stdout.write(f"{name}: {time.monotonic() - started:.1f} s, {report}\n")
            if report.violation:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
