"""A check of whether a hub's model can be had where the trainers share this machine: in the cache, or on the hub."""

import os
from pathlib import Path

import httpx

from services.broker.admission.models import Complaint, is_folder_path
from services.broker.datasets.hub import HUB_ID

HUB = "https://huggingface.co"
ASK_S = 5.0


async def review_hub_model(path: str) -> list[Complaint]:
    """Complain about a model that is neither in the cache nor on a hub that answers."""
    if path.startswith("bundled:") or is_folder_path(path) or not HUB_ID.fullmatch(path) or is_cached(path):
        return []
    remedy = "download it where there is a hub and give its folder, or take bundled:smollm2-135m-instruct"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return [("model.path", f"{path} is not in this machine's cache, and HF_HUB_OFFLINE is set; {remedy}")]
    hub, token = os.environ.get("HF_ENDPOINT", HUB).rstrip("/"), own_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with httpx.AsyncClient(timeout=ASK_S, follow_redirects=True) as client:
            answer = await client.get(f"{hub}/api/models/{path}", headers=headers)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        message = f"{path} is not in this machine's cache, and the hub {hub} does not answer ({reason}); {remedy}"
        return [("model.path", message)]
    if answer.status_code in (401, 403, 404):
        return [
            ("model.path", f"{hub} has no model {path}, or not for this HF_TOKEN; correct the id, or give a folder")
        ]
    return []  # a hub that is busy answers the trainer later


def home() -> Path:
    return Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))


def own_token() -> str:
    """Return the token that is set, or that `hf auth login` has written; '' without one."""
    if token := os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return token
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or home() / "token").read_text().strip()
    except OSError:
        return ""


def is_cached(path: str) -> bool:
    cache = Path(os.environ.get("HF_HUB_CACHE") or home() / "hub")
    return any(cache.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json"))
