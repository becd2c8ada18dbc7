"""What a kubelet would do with a container's spec, checked on a small pod."""

from typing import Any

import pytest

from tests.manifests.pod_run import Files, Probe, docker_run_arguments

CONFIG_MAPS = {"first": {"A": "1", "B": "1"}, "second": {"B": "2"}, "conf": {"x.conf": "port 1\n"}}
SECRETS = {"keys": {"key": "k", "password": "p"}}
FIELDS = {"status.podIP": "192.0.2.7"}


def container(**changes: Any) -> dict[str, Any]:
    return {
        "name": "main",
        "image": "image:1",
        "command": ["run", "--at=$(ADDRESS) $HOME ${X}"],
        "envFrom": [{"configMapRef": {"name": "first"}}, {"configMapRef": {"name": "second"}}],
        "env": [
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
            {"name": "URL", "value": "http://$(ADDRESS)"},
            {"name": "B", "value": "3"},
            {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "nowhere", "key": "key", "optional": True}}},
        ],
        "ports": [{"name": "http", "containerPort": 80}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 4},
        "livenessProbe": {"exec": {"command": ["true"]}},
        "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}},
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
            {"name": "own", "mountPath": "/own"},  # one of the StatefulSet's volumeClaimTemplates
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
    assert (run.entrypoint, run.arguments) == (("run", "--at=192.0.2.7 $HOME ${X}"), ())
    assert run.environment == {"A": "1", "B": "3", "ADDRESS": "192.0.2.7", "KEY": "k", "URL": "http://192.0.2.7"}
    assert (run.user, run.groups, run.grace_s) == ("5:6", (8, 7), 75)
    assert (run.is_read_only, run.dropped_capabilities) == (True, ("ALL",))
    assert run.security_options == ("no-new-privileges:true",)
    assert (run.cpus, run.memory_bytes) == (0.5, 1 << 30)
    assert (run.scratch, run.shm_bytes) == ({"/tmp": 1 << 20, "/empty": 1 << 20}, 2 << 20)
    assert run.files == {"/keys": Files({"key": "k"}, 0o440), "/etc/conf": Files({"x.conf": "port 1\n"}, 0o644)}
    assert (run.claims, run.ports) == ({"/data": "claim", "/own": "own"}, {"http": 80})
    assert run.probes == {
        "readiness": Probe("http", 80, "/ready", patience_s=12),
        "liveness": Probe("exec", command=("true",)),
    }


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
        {"resources": {"limits": {"cpu": "1", "memory": "1X"}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_does_not_exist_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match=r"there is no|subPath|runAsNonRoot|no quantity"):
        docker_run_arguments(POD, container(**changes), CONFIG_MAPS, SECRETS, FIELDS)
