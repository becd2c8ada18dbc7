"""Options that a kubelet would hand to the container engine for one container of a pod: no engine, no cluster."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]
Texts = Mapping[str, Mapping[str, str]]  # name of a ConfigMap or Secret -> key -> text

REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|Ki|Mi|Gi|Ti|k|M|G|T)?")
UNITS = {None: 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
SHM = "/dev/shm"


@dataclass(frozen=True)
class Probe:
    kind: str  # http, exec or tcp
    port: int | None = None
    path: str = ""
    command: tuple[str, ...] = ()
    patience_s: int = 30  # time for which the probe may fail


@dataclass(frozen=True)
class Files:
    """Files of a ConfigMap or Secret, at a folder of the container; read-only, as the kubelet mounts them."""

    texts: Mapping[str, str]  # name -> content
    mode: int  # mode of each file; they belong to root and the pod's fsGroup


@dataclass(frozen=True)
class ContainerRun:
    image: str
    entrypoint: tuple[str, ...]  # empty: the image's
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    user: str  # uid:gid
    groups: tuple[int, ...]
    is_read_only: bool
    dropped_capabilities: tuple[str, ...]
    security_options: tuple[str, ...]
    ports: Mapping[str, int]  # ports by name
    memory_bytes: int
    cpus: float
    grace_s: int
    scratch: Mapping[str, int]  # folder -> bytes at most, of emptyDirs but /dev/shm
    shm_bytes: int | None
    files: Mapping[str, Files]  # files by folder
    claims: Mapping[str, str]  # folder -> volume claim
    read_only_folders: frozenset[str]
    probes: Mapping[str, Probe] = field(default_factory=dict)  # startup, readiness, liveness

    def sdk_options(self, folder: Path) -> dict[str, Any]:
        """Arguments of the Docker SDK's `containers.run`, but image, network and claims.

        Writes `files` below `folder`, readable by the pod's groups; whoever may not change owners gets mode 444.
        """
        volumes = {}
        for number, (path, files) in enumerate(sorted(self.files.items())):
            source = folder / str(number)
            source.mkdir(parents=True)
            source.chmod(0o755)
            for name, text in files.texts.items():
                (source / name).write_text(text)
                (source / name).chmod(files.mode | 0o444)
            volumes[str(source)] = {"bind": path, "mode": "ro"}
        options: dict[str, Any] = {
            "environment": dict(self.environment),
            "user": self.user,
            "group_add": list(self.groups),
            "read_only": self.is_read_only,
            "cap_drop": list(self.dropped_capabilities),
            "security_opt": list(self.security_options),
            "mem_limit": self.memory_bytes,
            "nano_cpus": int(self.cpus * 1e9),
            "tmpfs": {path: self._tmpfs_options(path) for path in self.scratch},
            "volumes": volumes,
        }
        given = {"entrypoint": list(self.entrypoint), "command": list(self.arguments), "shm_size": self.shm_bytes}
        return options | {name: value for name, value in given.items() if value}

    def _tmpfs_options(self, path: str) -> str:
        access = "ro" if path in self.read_only_folders else "rw"
        uid, gid = self.user.split(":")  # where the image has the folder, the engine takes the mode from there
        return f"{access},mode=1777,uid={uid},gid={gid},size={self.scratch[path]}"


def docker_run_arguments(
    pod_spec: Object, container: Object, config_maps: Texts, secrets: Texts, fields: Mapping[str, str]
) -> ContainerRun:
    """Build the arguments. `fields` are values of the pod, such as status.podIP. Raises KeyError for a missing one."""
    environment = environment_of(container, config_maps, secrets, fields)
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    pod_security, own_security = pod_spec.get("securityContext", {}), container.get("securityContext", {})
    security = pod_security | own_security
    limits = container["resources"]["limits"]
    volumes = mounted_volumes(pod_spec, container, config_maps, secrets)
    scratch = {path: content for path, content in volumes.items() if isinstance(content, int)}
    groups = [*pod_security.get("supplementalGroups", []), pod_security.get("fsGroup")]
    return ContainerRun(
        image=container["image"],
        entrypoint=tuple(expand(word, environment) for word in container.get("command", ())),
        arguments=tuple(expand(word, environment) for word in container.get("args", ())),
        environment=environment,
        user=user_of(security),
        groups=tuple(group for group in groups if group is not None),
        is_read_only=security.get("readOnlyRootFilesystem", False),
        dropped_capabilities=tuple(security.get("capabilities", {}).get("drop", [])),
        security_options=() if security.get("allowPrivilegeEscalation", True) else ("no-new-privileges:true",),
        ports=ports,
        memory_bytes=int(quantity(limits["memory"])),
        cpus=quantity(limits["cpu"]),
        grace_s=pod_spec.get("terminationGracePeriodSeconds", 30),
        scratch={path: size for path, size in scratch.items() if path != SHM},
        shm_bytes=scratch.get(SHM),
        files={path: content for path, content in volumes.items() if isinstance(content, Files)},
        claims={path: content for path, content in volumes.items() if isinstance(content, str)},
        read_only_folders=frozenset(m["mountPath"] for m in container.get("volumeMounts", []) if m.get("readOnly")),
        probes={
            name: probe_of(container[f"{name}Probe"], ports)
            for name in ("startup", "readiness", "liveness")
            if f"{name}Probe" in container
        },
    )


def environment_of(container: Object, config_maps: Texts, secrets: Texts, fields: Mapping[str, str]) -> dict[str, str]:
    """Merge the environment as the kubelet does: envFrom in order, then env. Raises KeyError for an unknown name."""
    environment: dict[str, str] = {}
    for source in container.get("envFrom", []):
        ((kind, reference),) = source.items()
        environment |= {"configMapRef": config_maps, "secretRef": secrets}[kind][reference["name"]]
    for entry in container.get("env", []):
        if "valueFrom" not in entry:
            environment[entry["name"]] = expand(entry.get("value", ""), environment)
            continue
        ((kind, reference),) = entry["valueFrom"].items()
        if kind == "fieldRef":
            environment[entry["name"]] = fields[reference["fieldPath"]]
        else:
            texts = {"configMapKeyRef": config_maps, "secretKeyRef": secrets}[kind]
            if reference.get("optional") and reference["key"] not in texts.get(reference["name"], {}):
                continue
            environment[entry["name"]] = texts[reference["name"]][reference["key"]]
    return environment


def mounted_volumes(
    pod_spec: Object, container: Object, config_maps: Texts, secrets: Texts
) -> dict[str, int | str | Files]:
    """Folder of the container -> bytes of an emptyDir, name of a claim, or files.

    A volume that the pod does not name comes from the StatefulSet's volumeClaimTemplates, whose name is the claim's.
    """
    volumes = {volume["name"]: volume for volume in pod_spec.get("volumes", [])}
    mounts: dict[str, int | str | Files] = {}
    for mount in container.get("volumeMounts", []):
        assert "subPath" not in mount, f"{mount['mountPath']}: a subPath never sees a rotated secret; mount the folder"
        volume = volumes.get(mount["name"])
        if volume is None:
            mounts[mount["mountPath"]] = mount["name"]
        elif "emptyDir" in volume:
            mounts[mount["mountPath"]] = int(quantity(volume["emptyDir"]["sizeLimit"]))
        elif "persistentVolumeClaim" in volume:
            mounts[mount["mountPath"]] = volume["persistentVolumeClaim"]["claimName"]
        else:
            mounts[mount["mountPath"]] = files_of(volume, config_maps, secrets)
    return mounts


def files_of(volume: Object, config_maps: Texts, secrets: Texts) -> Files:
    if "projected" in volume:
        sources, mode = volume["projected"]["sources"], volume["projected"].get("defaultMode", 0o644)
    else:
        ((kind, source),) = [(key, value) for key, value in volume.items() if key != "name"]
        mode = source.get("defaultMode", 0o644)
        sources = [{kind: {**source, "name": source.get("secretName") or source.get("name")}}]
    texts: dict[str, str] = {}
    for source in sources:
        ((kind, reference),) = source.items()
        content = {"configMap": config_maps, "secret": secrets}[kind][reference["name"]]
        items = reference.get("items") or [{"key": key, "path": key} for key in content]
        texts |= {item["path"]: content[item["key"]] for item in items}
    return Files(texts, mode)


def user_of(security: Object) -> str:
    uid, gid = security.get("runAsUser"), security.get("runAsGroup")
    assert uid or not security.get("runAsNonRoot"), "the kubelet could not tell that the user is not root"
    return f"{uid or 0}:{gid or 0}"


def probe_of(probe: Object, ports: Mapping[str, int]) -> Probe:
    patience_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    if "exec" in probe:
        return Probe("exec", command=tuple(probe["exec"]["command"]), patience_s=patience_s)
    kind, target = ("http", probe["httpGet"]) if "httpGet" in probe else ("tcp", probe["tcpSocket"])
    port = ports[target["port"]] if isinstance(target["port"], str) else target["port"]
    return Probe(kind, port, target.get("path", ""), patience_s=patience_s)


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does in command, args and env: an unknown name stays as it is."""
    return REFERENCE.sub(lambda match: environment[match[1]], text)


def quantity(text: str | int) -> float:
    match = QUANTITY.fullmatch(str(text))
    assert match is not None, f"{text!r} is no quantity that is used here"
    return float(match[1]) * UNITS[match[2]]
