"""Private temporary folders: gone with their owner, swept after an owner that was killed, and nobody else's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.process.temporary import MARK, PrivateFolder, private_folder

PREFIX = "onbeat-x-"
OWNER = """
import sys, time
from pathlib import Path
from onbeat.process.temporary import PrivateFolder
folder = PrivateFolder(sys.argv[1], Path(sys.argv[2]))
(folder.path / "inside").mkdir()
(folder.path / "inside" / "file").write_text("left")
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def test_folder_is_private_and_goes_with_all_that_is_inside(parent: Path) -> None:
    with pytest.raises(RuntimeError), private_folder(PREFIX, parent / "new") as folder:  # noqa: PT012
        assert folder.parent == parent / "new"
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "link").symlink_to(parent)
        (folder / "file").write_text("x")
        raise RuntimeError
    assert list((parent / "new").iterdir()) == []


def test_what_a_killed_owner_left_goes_with_the_next(parent: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, PREFIX, str(parent)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        PrivateFolder(PREFIX, parent).remove()
        assert (left / "inside" / "file").read_text() == "left", "its owner lives"
        owner.kill()
    PrivateFolder("onbeat-y-", parent).remove()
    assert left.exists(), "of another prefix"
    PrivateFolder(PREFIX, parent).remove()
    assert list(parent.iterdir()) == []


def test_it_stays_while_an_heir_of_the_lock_lives(parent: Path) -> None:
    folder = PrivateFolder(PREFIX, parent)
    heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[folder.lock_fd])
    folder.leave()  # as the owner's death would
    PrivateFolder(PREFIX, parent).remove()
    assert folder.path.exists()
    heir.communicate(b"\n")
    PrivateFolder(PREFIX, parent).remove()
    assert not folder.path.exists()


def test_what_was_not_made_here_is_never_removed(parent: Path) -> None:
    """Folders of the user with such a name, and links to one."""
    theirs = parent / f"{PREFIX}notes_22"
    (theirs / "inside").mkdir(parents=True)
    longer = parent / f"{PREFIX}notes_2026"
    longer.mkdir()
    (longer / MARK).touch()
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / MARK).touch()
    (parent / f"{PREFIX}linkhere").symlink_to(elsewhere)
    before = sorted(parent.rglob("*"))
    PrivateFolder(PREFIX, parent).remove()
    assert sorted(parent.rglob("*")) == before


def test_an_interrupted_sweep_is_finished_by_the_next(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateFolder(PREFIX, parent)
    for name in ("a", "b"):
        (folder.path / name).mkdir()
    folder.leave()
    with monkeypatch.context() as patch:
        patch.setattr("onbeat.process.temporary.subprocess.run", lambda command, **_: os.rmdir(folder.path / "a"))
        PrivateFolder(PREFIX, parent).remove()
    assert folder.path.exists()
    PrivateFolder(PREFIX, parent).remove()
    assert list(parent.iterdir()) == []
