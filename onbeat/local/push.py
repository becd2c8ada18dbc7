"""A push of an exported folder to a model repository on the Hugging Face hub: all of it in one commit, or nothing."""

import os
import re
from pathlib import Path

from onbeat.contracts.errors import OnbeatError
from onbeat.process.extras import require_extra

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
# Files of an earlier push that this one may lack, and that a reader would take for parts of it.
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def check_push(repository: str) -> None:
    """Raise ValueError or OnbeatError, before anything is written, for a push that cannot be."""
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"--push {repository}: give the name of a repository, as ORG/NAME")
    if not os.environ.get("HF_TOKEN"):
        raise OnbeatError("--push needs a token of the hub that may write, in the environment variable HF_TOKEN")
    require_extra("hub", user="a push")


def push_folder(folder: Path, repository: str, message: str) -> str:
    """Push the files of a folder, and return the address of the repository, which is made if there is none, private.

    Equal files make no commit. Raises OnbeatError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # the one of httpx or of httpx2

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ["HF_TOKEN"])
    try:
        url = str(api.create_repo(repository, private=True, exist_ok=True))
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=WEIGHTS)
    except (HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OnbeatError(f"{repository} was not pushed, and is as it was: {reason}") from error
    return url
