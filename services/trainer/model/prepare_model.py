"""A command that converts a bundled model before a job: `python -m services.trainer.model.prepare_model NAME`."""

import sys
from pathlib import Path

from services.trainer.model.bundled import prepare
from services.trainer.settings import Settings


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m services.trainer.model.prepare_model NAME (such as smollm2-135m-instruct)")
    try:
        folder: Path = prepare(sys.argv[1].removeprefix("bundled:"), Settings().cache_dir)
    except ValueError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
