"""`python -m docs.generate`: write the pages. With --check: exit 1 if one is not what the code says."""

import sys
from pathlib import Path

from docs.generate import COMMAND, PAGES

FOLDER = Path(__file__).resolve().parents[1]


def main() -> int:
    is_check = sys.argv[1:] == ["--check"]
    (FOLDER / "reference").mkdir(exist_ok=True)
    stale = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not is_check:
            path.write_text(text)
    sys.stdout.write(f"{'stale' if is_check else 'written'}: {', '.join(stale) or 'none'}\n")
    if is_check and stale:
        sys.stdout.write(f"write them anew with: {COMMAND}\n")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
