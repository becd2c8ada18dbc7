"""A push of an exported folder, with a stand-in for the hub: one commit with all of it, or none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.contracts.errors import OnbeatError
from onbeat.local.push import check_push, push_folder
from tests.stand_in_hub import Hub, running_hub

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield hub


def write_export(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in ({"README.md": "# Adder\n", "model.safetensors": "weights"} | files).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_push_is_one_commit_and_equal_files_make_none(hub: Hub, tmp_path: Path) -> None:
    folder = write_export(tmp_path / "first")
    assert push_folder(folder, "org/adder", "Onbeat job job-1 after 3 iterations") == f"{hub.url}/org/adder"
    assert hub.files == {"README.md": b"# Adder\n", "model.safetensors": b"weights"}
    assert hub.commits == ["Onbeat job job-1 after 3 iterations"]
    assert hub.created[0]["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_secret"}
    push_folder(folder, "org/adder", "again")
    assert len(hub.commits) == 1
    (folder / "README.md").write_text("# Better adder\n", encoding="utf-8")
    push_folder(folder, "org/adder", "a better card")
    assert hub.commits[1:] == ["a better card"]


def test_weights_of_an_earlier_push_do_not_stay(hub: Hub, tmp_path: Path) -> None:
    shards = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b", "notes.txt": "mine"}
    push_folder(write_export(tmp_path / "first", **shards), "org/adder", "sharded")
    push_folder(write_export(tmp_path / "second"), "org/adder", "whole")
    assert set(hub.files) == {"README.md", "model.safetensors", "notes.txt"}
    assert hub.commits == ["sharded", "whole"]


def test_push_that_is_cut_off_leaves_nothing_half(hub: Hub, tmp_path: Path) -> None:
    folder = write_export(tmp_path / "first")
    hub.is_cut = True
    with pytest.raises(OnbeatError, match=r"^org/adder was not pushed, and is as it was: "):
        push_folder(folder, "org/adder", "cut")
    assert (hub.files, hub.commits) == ({}, [])
    hub.is_cut = False
    push_folder(folder, "org/adder", "whole")
    assert (len(hub.files), hub.commits) == (2, ["whole"])


def test_push_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(OnbeatError, match="--push needs a token of the hub that may write, in the environment"):
        check_push("org/adder")
    with pytest.raises(ValueError, match="--push adder: give the name of a repository, as ORG/NAME"):
        check_push("adder")
