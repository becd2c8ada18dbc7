"""What a kubelet would do with a container's spec, checked on a small pod."""

from pathlib import Path
from typing import Any

import pytest

from tests.containers.pod_run import Files, Probe, docker_run_arguments, environment_of, expand, quantity

CONFIG_MAPS = {"first": {"A": "1", "B": "1"}, "second": {"B": "2"}, "conf": {"x.conf": "port 1\n"}}
SECRETS = {"keys": {"key": "k", "password": "p"}}
FIELDS = {"status.podIP": "192.0.2.7"}


def container(**changes: Any) -> dict[str, Any]:
    return {
        "name": "main",
        "image": "image:1",
        "command": ["run", "--at=$(ADDRESS)"],
        "envFrom": [{"configMapRef": {"name": "first"}}, {"configMapRef": {"name": "second"}}],
        "env": [
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
            {"name": "URL", "value": "http://$(ADDRESS)"},
        ],
        "ports": [{"name": "http", "containerPort": 80}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "timeoutSeconds": 3},
        "livenessProbe": {"exec": {"command": ["true"]}},
        "resources": {"limits": {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": "2"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "secrets", "mountPath": "/keys", "readOnly": True},
            {"name": "conf", "mountPath": "/etc/conf"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "empty", "mountPath": "/empty", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "data", "mountPath": "/data"},
        ],
        **changes,
    }


POD = {
    "terminationGracePeriodSeconds": 75,
    "securityContext": {"runAsNonRoot": True, "runAsUser": 5, "runAsGroup": 6, "fsGroup": 7, "supplementalGroups": [8]},
    "volumes": [
        {
            "name": "secrets",
            "projected": {
                "defaultMode": 0o440,
                "sources": [{"secret": {"name": "keys", "items": [{"key": "key", "path": "key"}]}}],
            },
        },
        {"name": "conf", "configMap": {"name": "conf"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Mi"}},
        {"name": "empty", "emptyDir": {"sizeLimit": "1Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Mi"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}},
    ],
}


def test_a_container_runs_as_its_pod_says():
    run = docker_run_arguments(POD, container(), CONFIG_MAPS, SECRETS, FIELDS)
    assert (run.entrypoint, run.arguments) == (("run", "--at=192.0.2.7"), None)
    assert run.environment == {"A": "1", "B": "2", "ADDRESS": "192.0.2.7", "KEY": "k", "URL": "http://192.0.2.7"}
    assert (run.user, run.groups, run.grace_s) == ("5:6", (8, 7), 75)
    assert (run.is_read_only, run.dropped_capabilities) == (True, ("ALL",))
    assert run.security_options == ("no-new-privileges:true",)
    assert (run.cpus, run.memory_bytes, run.devices) == (0.5, 1 << 30, {"nvidia.com/gpu": 2})
    assert (run.scratch, run.shm_bytes) == ({"/tmp": 1 << 20, "/empty": 1 << 20}, 2 << 20)
    assert run.files == {"/keys": Files({"key": "k"}, 0o440), "/etc/conf": Files({"x.conf": "port 1\n"}, 0o644)}
    assert (run.claims, run.ports) == ({"/data": "claim"}, {"http": 80})
    assert run.probes == {
        "readiness": Probe("http", 80, "/ready", timeout_s=3),
        "liveness": Probe("exec", command=("true",)),
    }


def test_the_engine_gets_the_same_options(tmp_path: Path):
    run = docker_run_arguments(POD, container(), CONFIG_MAPS, SECRETS, FIELDS)
    options = run.sdk_options(tmp_path)
    assert (options["user"], options["group_add"], options["read_only"]) == ("5:6", [8, 7], True)
    assert (options["cap_drop"], options["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert (options["mem_limit"], options["nano_cpus"], options["shm_size"]) == (1 << 30, 500_000_000, 2 << 20)
    assert options["tmpfs"] == {
        "/tmp": "rw,mode=1777,uid=5,gid=6,size=1048576",
        "/empty": "ro,mode=1777,uid=5,gid=6,size=1048576",
    }
    assert options["entrypoint"] == ["run", "--at=192.0.2.7"]
    assert "command" not in options, "the image's own arguments stay"
    (keys,) = [Path(host) for host, mount in options["volumes"].items() if mount == {"bind": "/keys", "mode": "ro"}]
    assert {path.name: path.read_text() for path in keys.iterdir()} == {"key": "k"}


@pytest.mark.parametrize(
    "changes",
    [
        {"envFrom": [{"configMapRef": {"name": "third"}}]},
        {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "none"}}}]},
        {"env": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}]},
        {"command": ["$(NOWHERE)"]},
        {"readinessProbe": {"httpGet": {"path": "/", "port": "metrics"}}},
        {"volumeMounts": [{"name": "conf", "mountPath": "/x", "subPath": "x.conf"}]},
        {"securityContext": {"runAsUser": 0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_does_not_exist_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match=r"there is no|subPath|runAsNonRoot"):
        docker_run_arguments(POD, container(**changes), CONFIG_MAPS, SECRETS, FIELDS)


def test_volume_without_a_name_is_the_stateful_sets_claim():
    mounts = [{"name": "own", "mountPath": "/own"}]
    run = docker_run_arguments(POD, container(volumeMounts=mounts), CONFIG_MAPS, SECRETS, FIELDS)
    assert run.claims == {"/own": "own"}


def test_env_wins_over_env_from():
    spec = container(env=[{"name": "B", "value": "3"}])
    assert environment_of(spec, CONFIG_MAPS, SECRETS, {}) == {"A": "1", "B": "3"}


@pytest.mark.parametrize("name", ["keys", "nowhere"])
def test_an_optional_secret_may_be_missing(name: str):
    reference = {"secretKeyRef": {"name": name, "key": "none", "optional": True}}
    assert environment_of(container(env=[{"name": "X", "valueFrom": reference}]), CONFIG_MAPS, SECRETS, {}) == {
        "A": "1",
        "B": "2",
    }


@pytest.mark.parametrize(("text", "value"), [("250m", 0.25), ("2", 2), (3, 3), ("1Gi", 1 << 30), ("1.5k", 1500)])
def test_quantities(text: str | int, value: float):
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "1X", "-1", "Gi", "1e3x"])
def test_what_is_no_quantity_is_refused(text: str):
    with pytest.raises(ValueError, match="no quantity"):
        quantity(text)


def test_references_are_expanded_as_kubernetes_does():
    assert expand("--rank=$(RANK) $HOME ${X}", {"RANK": "3"}) == "--rank=3 $HOME ${X}"
