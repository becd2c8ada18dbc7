"""The Kubernetes manifests, without a cluster: they build, fit the schemas and hang together."""

import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import kubernetes_validate
import pytest
import yaml

from onbeat.local.backup import ledger_files
from onbeat.local.redis_choice import Release
from tests.manifests.kustomize import KUBERNETES, Manifests, Pod, build, build_variant, selects, write_kustomization

pytestmark = pytest.mark.slow

# Each overlay as it is, and each component on an overlay that it is made for.
VARIANTS = [(path.name, ()) for path in sorted((KUBERNETES / "overlays").iterdir())] + [
    ("cpu", ("external-redis",)),
    ("cpu", ("tracing", "datasets")),
    ("nvidia", ("model-hub", "datasets", "autoscale-keda")),
    ("ascend", ("multi-node",)),
    ("nvidia", ("multi-node", "autoscale-keda")),
]


@pytest.fixture(scope="session", params=VARIANTS, ids=lambda variant: "+".join((variant[0], *variant[1])))
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return build_variant(*request.param, tmp_path_factory.mktemp("variant"))


def test_every_component_is_in_a_variant():
    components = {path.name for path in (KUBERNETES / "components").iterdir()}
    used = {name for _, names in VARIANTS for name in names}
    assert components == used


def test_all_lies_in_one_namespace_of_restricted_pods(manifests: Manifests):
    (namespace,) = manifests.of("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {item["metadata"].get("namespace") for item in manifests.objects if item["kind"] != "Namespace"} == {
        namespace["metadata"]["name"]
    }


# The label pod-index came with 1.28
@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_objects_fit_the_schemas_of_the_api(manifests: Manifests, version: str):
    core_objects = [item for item in manifests.objects if not item["apiVersion"].startswith("keda.sh/")]
    assert len(core_objects) >= 25
    for item in core_objects:
        check_schema(json.dumps(item), version)


@functools.cache
def check_schema(item: str, version: str) -> None:
    """Most objects are the same in many variants."""
    kubernetes_validate.validate(json.loads(item), version, strict=True)


# ---- KEDA: its resources are no part of the API's schemas ------------------------------------------------------------


def test_scaled_objects_fit_what_keda_documents(manifests: Manifests):
    """The fields are those of keda.sh/v1alpha1 and https://keda.sh/docs/latest/scalers/metrics-api/, all strings."""
    for item in manifests.of("ScaledObject"):
        spec = item["spec"]
        assert (spec["scaleTargetRef"], spec["minReplicaCount"]) == ({"name": "onbeat-rollout"}, 0)
        assert all(spec[name] > 0 for name in ("maxReplicaCount", "pollingInterval", "cooldownPeriod"))
        (trigger,) = spec["triggers"]
        metadata, name = trigger["metadata"], trigger["authenticationRef"]["name"]
        assert (trigger["type"], metadata["authMode"]) == ("metrics-api", "bearer")
        assert metadata.keys() == {"url", "valueLocation", "targetValue", "authMode"}
        assert all(isinstance(value, str) for value in metadata.values())
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        hpa = {"scaleTargetRef": {"kind": "Deployment", "name": "x"}, "maxReplicas": 1, "behavior": behavior}
        autoscaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": hpa}
        kubernetes_validate.validate(autoscaler, "1.32", strict=True)
        (secret,) = manifests.get("TriggerAuthentication", name)["spec"]["secretTargetRef"]
        assert secret["parameter"] == "token"
        assert secret["key"] in manifests.secrets()[secret["name"]]


def test_what_is_scaled_has_no_number_of_its_own(manifests: Manifests):
    """`kubectl apply` would set it back."""
    targets = [scaler["spec"]["scaleTargetRef"] for scaler in manifests.of("ScaledObject")]
    assert len(targets) <= 1, "two scalers would fight"
    for deployment in manifests.of("Deployment"):
        is_scaled = deployment["metadata"]["name"] in {target["name"] for target in targets}
        assert ("replicas" in deployment["spec"]) != is_scaled
    assert all(
        target["name"] in {item["metadata"]["name"] for item in manifests.of("Deployment")} for target in targets
    )


# ---- pod security ----------------------------------------------------------------------------------------------------


def check_restricted(pod: Pod) -> None:
    """Hold a pod against the pod security standard `restricted`, and against what is promised beyond it."""
    spec, container = pod.spec, pod.container
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"}
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    security = spec["securityContext"]
    assert security["runAsUser"] > 0 < security["runAsGroup"]
    harmless = {"runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "supplementalGroups"}
    others = {name: value for name, value in security.items() if name not in harmless}
    assert others == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for volume in spec.get("volumes", []):
        (kind,) = volume.keys() - {"name"}
        assert kind in {"configMap", "emptyDir", "projected", "secret", "persistentVolumeClaim"}, volume
        assert kind != "emptyDir" or "sizeLimit" in volume["emptyDir"], volume
    closed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == closed
    assert not any("hostPort" in port for port in container.get("ports", []))
    assert all({"cpu", "memory"} <= container["resources"][kind].keys() for kind in ("requests", "limits"))


def test_pods_are_restricted(manifests: Manifests):
    for pod in manifests.pods():
        check_restricted(pod)


# ---- references ------------------------------------------------------------------------------------------------------


def references(pod: Pod) -> Iterator[tuple[str, str]]:
    """Kind and name of what a pod needs, but what is optional."""
    yield "ServiceAccount", pod.spec["serviceAccountName"]
    kinds = {"configMap": "ConfigMap", "secret": "Secret", "persistentVolumeClaim": "PersistentVolumeClaim"}
    for volume in pod.spec.get("volumes", []):
        for source in volume.get("projected", {}).get("sources", [volume]):
            for kind in kinds.keys() & source.keys():
                target = source[kind]
                yield kinds[kind], target.get("name") or target.get("secretName") or target["claimName"]
    for source in pod.container.get("envFrom", []):
        for kind, reference in source.items():
            yield {"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], reference["name"]
    for entry in pod.container.get("env", []):
        for kind, reference in entry.get("valueFrom", {}).items():
            if kind != "fieldRef" and not reference.get("optional"):
                yield {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}[kind], reference["name"]


def test_pods_mount_the_volumes_that_they_have(manifests: Manifests):
    for pod in manifests.pods():
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])} | pod.claims
        mounted = {mount["name"] for mount in pod.container["volumeMounts"]}
        assert volumes == mounted, pod.name


def test_what_pods_refer_to_is_there_and_nothing_else(manifests: Manifests):
    needed = {reference for pod in manifests.pods() for reference in references(pod)}
    for kind in ("ServiceAccount", "ConfigMap", "Secret", "PersistentVolumeClaim"):
        assert {name for kind_needed, name in needed if kind_needed == kind} == {
            o["metadata"]["name"] for o in manifests.of(kind)
        }
    for account in manifests.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_selectors_match_their_pods(manifests: Manifests):
    pods = {pod.name: pod.labels for pod in manifests.pods()}
    for item in manifests.of("Deployment") + manifests.of("StatefulSet"):
        name, spec = item["metadata"]["name"], item["spec"]
        assert [pod for pod, labels in pods.items() if selects(spec["selector"], labels)] == [name]
        for spread in spec["template"]["spec"].get("topologySpreadConstraints", []):
            assert [pod for pod, labels in pods.items() if selects(spread["labelSelector"], labels)] == [name]
    for kind in ("Service", "PodDisruptionBudget"):
        assert {item["metadata"]["name"] for item in manifests.of(kind)} == pods.keys(), kind
        for item in manifests.of(kind):
            selector = item["spec"]["selector"]
            selector = selector if kind == "PodDisruptionBudget" else {"matchLabels": selector}
            assert [pod for pod, labels in pods.items() if selects(selector, labels)] == [item["metadata"]["name"]]
    for item in manifests.of("StatefulSet"):
        manifests.get("Service", item["spec"]["serviceName"])


def test_services_lead_to_ports_of_their_pods(manifests: Manifests):
    for pod in manifests.pods():
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        assert len(ports) == len(pod.container["ports"]), f"{pod.name}: two ports of one name"
        for port in manifests.get("Service", pod.name)["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], pod.name


def test_more_than_one_pod_is_spread(manifests: Manifests):
    for pod in manifests.pods():
        assert (pod.service == "redis") != ("topologySpreadConstraints" in pod.spec), pod.name


# ---- network ---------------------------------------------------------------------------------------------------------

Flow = tuple[str, str, int]


def allowed(manifests: Manifests, direction: Literal["ingress", "egress"]) -> set[Flow]:
    """Return (from, to, port) between our pods, as one direction's policies allow it; 0 stands for every port."""
    pods = list(manifests.pods())
    flows = set()
    for policy in manifests.of("NetworkPolicy"):
        selected = [pod for pod in pods if selects(policy["spec"]["podSelector"], pod.labels)]
        for rule in policy["spec"].get(direction, []):
            peers = rule["from" if direction == "ingress" else "to"]
            ours = [peer["podSelector"] for peer in peers if peer.keys() == {"podSelector"}]
            others = [pod for pod in pods if any(selects(selector, pod.labels) for selector in ours)]
            numbers = [port["port"] for port in rule.get("ports", [{"port": 0}])]
            for a, b, port in itertools.product(selected, others, numbers):
                ends = (b, a) if direction == "ingress" else (a, b)
                flows.add((ends[0].service, ends[1].service, port))
    return flows


def test_only_those_talk_who_must(manifests: Manifests):
    clients = {"broker", "trainer", "rollout"}
    services = {pod.service for pod in manifests.pods()}
    expected = {("rollout", "trainer", 8801), ("rollout", "rollout", 8801)}
    if "redis" in services:
        expected |= {(client, "redis", 6379) for client in clients}
    if len(manifests.of("PersistentVolumeClaim")) and manifests.pod("trainer").container.get("command"):
        expected |= {("trainer", "trainer", 0), ("rollout", "trainer", 8900)}
    assert allowed(manifests, "ingress") & allowed(manifests, "egress") == expected
    assert allowed(manifests, "ingress") == expected, "a way in without a way out"
    assert allowed(manifests, "egress") == expected, "a way out without a way in"


def test_all_else_is_denied(manifests: Manifests):
    deny = manifests.get("NetworkPolicy", "onbeat-default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in manifests.of("NetworkPolicy"):
        spec = policy["spec"]
        selected = [pod for pod in manifests.pods() if selects(spec["podSelector"], pod.labels)]
        assert selected, f"{policy['metadata']['name']} is for no pod"
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            assert (direction in spec) <= (direction.title() in spec["policyTypes"])
            for rule in spec.get(direction, []):
                assert rule.get(peers), f"{policy['metadata']['name']}: a rule without {peers} is for everybody"


def test_outside_clients_reach_published_ports_only(manifests: Manifests):
    for policy in manifests.of("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            if any("namespaceSelector" in peer or "ipBlock" in peer for peer in rule["from"]):
                ports = {port["port"] for port in rule["ports"]}
                assert ports in ({8800}, {8802}), policy["metadata"]["name"]


# ---- several nodes ---------------------------------------------------------------------------------------------------


def test_ranks_of_several_nodes_find_each_other(manifests: Manifests):
    pod, workload = manifests.pod("trainer"), manifests.get("StatefulSet", "onbeat-trainer")["spec"]
    if "command" not in pod.container:
        assert workload["replicas"] == 1
        return
    environment = manifests.environment("trainer")
    arguments = " ".join(pod.container["command"] + pod.container["args"])
    assert environment["NUM_NODES"] == str(workload["replicas"])
    assert "--nnodes=$(NUM_NODES) " in arguments
    assert "--node-rank=$(NODE_RANK) " in arguments
    assert f"--master-addr={workload['serviceName']}-0.{workload['serviceName']} " in arguments
    assert arguments.endswith("-m services.trainer")
    service = manifests.get("Service", workload["serviceName"])["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert workload["podManagementPolicy"] == "Parallel"
    assert workload["updateStrategy"] == {"type": "OnDelete"}
    claim = manifests.get("PersistentVolumeClaim", "onbeat-trainer-data")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


# ---- the runbook -----------------------------------------------------------------------------------------------------


def test_the_runbook_s_kustomizations_build(tmp_path: Path):
    def yaml_blocks(text: str) -> list[str]:
        return [block.split("\n```", 1)[0] for block in text.split("```yaml\n")[1:]]

    text = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text()
    blocks = yaml_blocks(text)
    assert len(blocks) >= 2
    for number, block in enumerate(blocks):
        content = yaml.safe_load(block)
        paths = content.pop("components", [])
        components = tuple(Path(path).name for path in paths)
        assert paths == [f"../../components/{name}" for name in components], "from clusters/mine"
        folder = tmp_path / str(number)
        folder.mkdir()
        build(write_kustomization(folder, "nvidia", components, yaml.safe_dump(content)))


def test_each_pod_of_the_runbook_has_one_volume_of_a_backup():
    """One pod with both could not be scheduled where they are in different zones."""
    base = build(KUBERNETES / "base")
    (claim,) = base.pod("redis").claims
    claims = {
        "redis": f"{claim}-onbeat-redis-0",
        "trainer": base.get("PersistentVolumeClaim", "onbeat-trainer-data")["metadata"]["name"],
    }
    items = yaml.safe_load_all((KUBERNETES / "restore-pods.yaml").read_text())
    for (service, claim), item in zip(claims.items(), items, strict=True):
        kubernetes_validate.validate(item, "1.32", strict=True)
        pod = Pod("Pod", item["metadata"]["name"], {}, item["spec"])
        check_restricted(pod)
        assert pod.name == f"onbeat-restore-{service}"
        assert item["metadata"]["namespace"] == base.of("Namespace")[0]["metadata"]["name"]
        assert [volume["persistentVolumeClaim"]["claimName"] for volume in pod.spec["volumes"]] == [claim]
        assert base.pod(service).spec["securityContext"]["runAsUser"] == pod.spec["securityContext"]["runAsUser"]


def test_commands_of_a_backup_name_what_is_there(tmp_path: Path):
    """No cluster runs them: the pods that they enter, the volumes that they write there, and all that they stop."""
    text = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text("utf-8")
    section = text.split("\n## Back up and restore\n")[1].split("\n## ")[0]
    base, conf = build(KUBERNETES / "base"), (KUBERNETES / "base" / "redis.conf").read_text("utf-8")
    workloads = {(pod.kind.lower(), pod.name) for pod in base.pods()}
    assert set(re.findall(r"(deployment|statefulset)/([\w-]+)", section)) == workloads

    items = list(yaml.safe_load_all((KUBERNETES / "restore-pods.yaml").read_text("utf-8")))
    restoring = {item["metadata"]["name"]: Pod("Pod", item["metadata"]["name"], {}, item["spec"]) for item in items}
    assert set(re.findall(r"pod/([\w-]+)", section)) == restoring.keys()
    pods = restoring | {f"{pod.name}-0": pod for pod in base.pods() if pod.kind == "StatefulSet"}
    entered = re.findall(r"exec (?:-i )?(\S+) -- (.*)", section)
    for name, command in entered:
        mounts = {mount["mountPath"] for mount in pods[name].container["volumeMounts"] if not mount.get("readOnly")}
        assert {*re.findall(r"(?<![\w.])/\w+", command)} <= mounts, (name, command)
    assert {name for name, _ in entered} == pods.keys()
    (selector,) = re.findall(r"--for=delete pod -l (\S+)=(\S+)", section)
    assert all(pod.labels[selector[0]] == selector[1] for pod in base.pods())

    assert "dir /data\n" in conf
    assert not re.search(r"^append(filename|dirname)", conf, re.MULTILINE), "Redis would look elsewhere for its file"
    files = ledger_files(Release("Redis", (7, 2)), tmp_path / "dump.rdb", tmp_path)
    for path in files.keys() - {"redis/server.json"}:
        assert f"/{path}" in section, "no name of a local stack's backup"
    assert (tmp_path / "manifest").read_text("utf-8").strip() in section
