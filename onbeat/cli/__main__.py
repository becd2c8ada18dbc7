"""`python -m onbeat.cli` is `onbeat`."""

import sys

from onbeat.cli import main

if __name__ == "__main__":
    sys.exit(main())
