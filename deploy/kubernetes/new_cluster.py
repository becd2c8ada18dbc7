"""Makes clusters/NAME: a kustomization on top of an overlay, with secrets of its own. It never replaces one.

python deploy/kubernetes/new_cluster.py NAME [OVERLAY]
"""

import argparse
import hashlib
import os
import re
import secrets
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from onbeat.process.api_keys import Role, new_key, write_keys

HERE = Path(__file__).resolve().parent
ACL_TEMPLATE = HERE.parent / "redis" / "users.acl.example"
OVERLAYS = sorted(path.name for path in (HERE / "overlays").iterdir())
KUSTOMIZATION = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: onbeat
resources:
  - {overlay}
# components:
#   - ../../components/model-hub  # and others of deploy/kubernetes/components
secretGenerator:
  - name: onbeat-secrets
    behavior: replace
    options: {{disableNameSuffixHash: true}}
    files:
{files}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the cluster: letters, digits, - and _")
    parser.add_argument("overlay", nargs="?", default="cpu", choices=OVERLAYS)
    options = parser.parse_args()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", options.name):
        parser.error(f"{options.name!r} is no name: use letters, digits, - and _")
    folder = HERE / "clusters" / options.name
    try:
        create(folder, options.overlay)
    except FileExistsError:
        parser.error(f"{folder} exists already; its secrets are in use, so nothing was changed")
    sys.stdout.write(f"made {folder}: keep its folders secrets and private out of version control\n")
    return 0


def create(folder: Path, overlay: str) -> None:
    """Write the cluster's folder. Raises FileExistsError when the folder is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder)  # after an error: nobody uses its secrets yet
        fill(folder, overlay)
        undo.pop_all()


def fill(folder: Path, overlay: str) -> None:
    password, admin_password = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    users = ACL_TEMPLATE.read_text()
    users = users.replace("SHA256_OF_THE_ADMIN_PASSWORD", sha256(admin_password))
    users = users.replace("SHA256_OF_THE_PASSWORD", sha256(password))
    read_key, read_entry = new_key("keda and prometheus", Role.READ)
    admin_key, admin_entry = new_key("admin", Role.ADMIN)
    weights_key = secrets.token_urlsafe(32)
    in_cluster = {"redis-password": password, "users.acl": users, "weights-key": weights_key, "read-key": read_key}
    private = {"redis-admin-password": admin_password, "admin-key": admin_key}  # only its operator has them
    for name, contents in (("secrets", in_cluster), ("private", private)):
        (folder / name).mkdir()
        for file, content in contents.items():
            (folder / name / file).write_text(content)
    write_keys(folder / "secrets" / "api-keys.json", [read_entry, admin_entry])
    files = "\n".join(f"      - secrets/{path.name}" for path in sorted((folder / "secrets").iterdir()))
    base = os.path.relpath(HERE / "overlays" / overlay, folder)
    (folder / "kustomization.yaml").write_text(KUSTOMIZATION.format(overlay=base, files=files))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
