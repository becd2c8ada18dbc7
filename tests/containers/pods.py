"""The pods of the Kubernetes manifests as containers of the local engine: their environment, limits and probes, on a
network of their own. What a cluster adds (scheduling, network policies) is not here."""

import secrets
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from docker.models.containers import Container
from docker.models.volumes import Volume
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from tests.conftest import free_port
from tests.containers.conftest import Images
from tests.containers.leftovers import LABEL, new_project
from tests.manifests.kustomize import Manifests
from tests.manifests.pod_run import ContainerRun, Probe, docker_run_arguments

READY_S = 180.0
# A Python for each look would take the processor from what is looked at.
GET = r"""
exec 3<>/dev/tcp/127.0.0.1/"$0" && printf 'GET %s HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n' "$1" >&3
read -t 5 -r _ status _ <&3 && test "$status" = 200
"""
PORT = 8800  # the broker's port


class Pods:
    """Use as a context manager: leaving removes containers, volumes and network."""

    def __init__(self, manifests: Manifests, images: Images, folder: Path) -> None:
        self._manifests, self._images, self._folder = manifests, images, folder
        self._labels = {LABEL: new_project("onbeat-test")}  # labels of everything that is made here
        self._network = Network(docker_network_kw={"labels": self._labels})
        self._cleanup = ExitStack()
        self._port = free_port()  # the same after a restart
        self._containers: dict[str, DockerContainer] = {}
        self._claims: dict[str, Volume] = {}
        self.runs: dict[str, ContainerRun] = {}

    def __enter__(self) -> Self:
        self._network.create()
        self._cleanup.callback(self._network.remove)
        return self

    def __exit__(self, *_: object) -> None:
        with self._cleanup:  # every step runs even if others fail: containers before the networks that they use
            for claim in self._claims.values():
                self._cleanup.callback(claim.remove)
            for container in self._containers.values():
                self._cleanup.callback(container.stop)

    def start(self, service: str, name: str = "", **settings: str) -> None:
        """Start one pod of a workload, with more environment variables, and return when its probes pass."""
        pod = self._manifests.pod(service)
        name = name or pod.name
        config_maps, secret_texts = self._manifests.config_maps(), self._manifests.secrets()
        fields = {"status.podIP": name, "metadata.name": name}  # other containers reach it by its name just as well
        run = docker_run_arguments(pod.spec, pod.container, config_maps, secret_texts, fields)
        options = run.sdk_options(self._folder / name)
        container = DockerContainer(self._images.of(service)).with_name(f"{name}-{secrets.token_hex(3)}")
        container.with_envs(**options.pop("environment"), **settings).with_command(options.pop("command", None))
        for host, mount in options.pop("volumes").items():
            container.with_volume_mapping(host, mount["bind"], mount["mode"])
        for path, claim in run.claims.items():
            container.with_volume_mapping(self._claim(claim), path, "rw,nocopy")
        for path, tmpfs_options in options.pop("tmpfs").items():
            container.with_tmpfs_mount(path, tmpfs_options)
        container.with_kwargs(hostname=name, labels=self._labels, **options).with_network(
            self._network
        ).with_network_aliases(name)
        if service == "broker":
            container.with_bind_ports(PORT, self._port)
        self._containers[name], self.runs[name] = container, run
        container.start()
        self.wait_ready(name)

    def wait_ready(self, name: str) -> None:
        probes = self.runs[name].probes
        deadline = time.monotonic() + READY_S
        for kind in ("startup", "readiness", "liveness"):
            while not self.passes(name, probes[kind]):
                state = self.container(name).status
                assert time.monotonic() < deadline, f"{kind} of {name} fails, {state}: {self.log(name)}"
                assert state == "running", f"{name} {state}: {self.log(name)}"
                time.sleep(0.5)

    def passes(self, name: str, probe: Probe) -> bool:
        """Run a probe inside the container, with the image's own tools: the probed port is not published."""
        command = {
            "exec": list(probe.command),
            "http": ["bash", "-c", GET, str(probe.port), probe.path],
            "tcp": ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{probe.port}"],
        }[probe.kind]
        container = self.container(name)
        return container.status == "running" and container.exec_run(command).exit_code == 0

    def container(self, name: str) -> Container:
        """Return the container's state from the engine."""
        container = self._containers[name].get_wrapped_container()
        container.reload()
        return container

    def kill(self, name: str) -> None:
        self.container(name).kill()

    def restart(self, name: str) -> None:
        """Restart the container as a kubelet does: the same pod, another process."""
        self.container(name).start()
        self.wait_ready(name)

    def log(self, name: str) -> str:
        text: bytes = self.container(name).logs(tail=60)
        return text.decode(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _claim(self, name: str) -> str:
        """Name of its volume, which belongs to the pods' group, as fsGroup makes it."""
        if name not in self._claims:
            client = self._network._docker.client
            volume = client.volumes.create(labels=self._labels)
            self._claims[name] = volume
            owner = ["chown", "10001:10001", "/claim"]
            mounted = {volume.name: {"bind": "/claim", "mode": "rw"}}
            once = {"entrypoint": owner, "user": "0", "remove": True, "volumes": mounted, "labels": self._labels}
            client.containers.run(self._images.redis, **once)
        return self._claims[name].name
