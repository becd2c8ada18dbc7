"""Tests that the manifests describe the services as the code and compose.yaml do."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from onbeat import __version__
from onbeat.contracts.records import PoolStatus
from onbeat.machine.malloc import KEEP_FREED
from onbeat.process.api_keys import Role
from onbeat.process.health import Health
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from services.broker.__main__ import DRAIN_S
from services.broker.app import NUM_ADMISSIONS, create_app
from services.broker.auth import required_role
from services.broker.settings import Settings as BrokerSettings
from services.rollout.settings import Settings as RolloutSettings
from services.trainer.settings import Settings as TrainerSettings
from tests.manifests.kustomize import FIELDS, KUBERNETES, ROOT, Manifests, build, build_variant
from tests.manifests.pod_run import ContainerRun, docker_run_arguments, quantity

SETTINGS: dict[str, type[BaseSettings]] = {
    "broker": BrokerSettings,
    "trainer": TrainerSettings,
    "rollout": RolloutSettings,
}
PLATFORMS = {"cpu": "cpu", "nvidia": "cuda", "ascend": "npu"}  # overlay -> tag of its images
SECRETS_FOLDER = "/run/onbeat"
UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "kb": 2**10, "mb": 2**20, "gb": 2**30}

Variant = tuple[str, tuple[str, ...]]
VARIANTS: list[Variant] = [(overlay, ()) for overlay in PLATFORMS] + [("nvidia", ("multi-node", "model-hub"))]


@pytest.fixture(scope="session", params=VARIANTS, ids=lambda variant: "+".join((variant[0], *variant[1])))
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return build_variant(*request.param, tmp_path_factory.mktemp("variant"))


@pytest.fixture(scope="session")
def cpu() -> Manifests:
    return build(KUBERNETES / "overlays" / "cpu")


def run_of(manifests: Manifests, service: str) -> ContainerRun:
    pod = manifests.pod(service)
    return docker_run_arguments(pod.spec, pod.container, manifests.config_maps(), manifests.secrets(), FIELDS)


def settings_of(
    manifests: Manifests, service: str, folder: Path, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Read the service's settings from exactly its pod's environment; secret files are in `folder` instead."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in list(SETTINGS[service].model_fields):
        monkeypatch.delenv(f"ONBEAT_{name}".upper(), raising=False)
    for name, value in manifests.environment(service).items():
        monkeypatch.setenv(name, value.replace(SECRETS_FOLDER, str(folder)))
    return SETTINGS[service]()


# ---- the environment and the settings --------------------------------------------------------------------------------


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_a_setting(manifests: Manifests, service: str):
    # These names belong to torchrun, NCCL, HCCL, Python and Hugging Face.
    foreign = re.compile(r"NUM_NODES|PROCESSES_PER_NODE|NODE_RANK|PYTHONSAFEPATH|HF_TOKEN|(NCCL|HCCL)_[A-Z_]+")
    known = {f"ONBEAT_{name}".upper() for name in SETTINGS[service].model_fields}
    given = manifests.environment(service).keys()
    assert {name for name in given - known if not foreign.fullmatch(name)} == set()


@pytest.mark.parametrize("service", SETTINGS)
def test_the_settings_are_what_the_pod_is(manifests, service, tmp_path, monkeypatch):
    good_secrets = {"redis-password": "secret", "weights-key": "key", "api-keys.json": '{"keys": []}'}
    settings = settings_of(manifests, service, tmp_path, good_secrets, monkeypatch)
    run = run_of(manifests, service)
    assert set(good_secrets) >= run.files[SECRETS_FOLDER].texts.keys()
    assert settings.connect_redis() is not None
    assert settings.redis_url == "redis://onbeat-redis:6379"
    assert settings.log_format == "json"
    if service == "broker":
        assert run.ports == {"http": settings.port}
        assert (settings.host, settings.allow_anonymous) == ("0.0.0.0", False)
        assert str(settings.data_dir) in run.scratch.keys() | run.claims.keys()
        assert (1 + NUM_ADMISSIONS) * settings.dataset_memory_mb * 2**20 + 2**29 <= run.memory_bytes
        return
    assert run.ports == {"weights": settings.weights_port, "metrics": settings.metrics_port}
    assert (settings.weights_host, settings.metrics_host) == ("0.0.0.0", "0.0.0.0")
    assert settings.weights_advertise == FIELDS["status.podIP"]
    assert settings.wire_security().api_key == "key"
    assert settings.device == run.image.rpartition("-")[2]
    if service == "trainer":
        assert run.claims == {str(settings.data_dir): "onbeat-trainer-data"}
        assert str(settings.cache_dir) in run.scratch
    else:
        assert run.grace_s == settings.drain_s + 15
        assert run.memory_bytes > settings.kv_cache_gib * 2**30 + run.shm_bytes
    assert run.shm_bytes >= 2**30, "vLLM and collective libraries want more than the engine's 64 MiB"


def test_ranks_on_one_node_have_ports_of_their_own(manifests: Manifests):
    environment = manifests.environment("trainer")
    ports = [int(environment[f"ONBEAT_{name}_PORT"]) for name in ("WEIGHTS", "METRICS")]
    if "NUM_NODES" in environment:
        assert ports[1] not in range(ports[0], ports[0] + 1024), "rank r serves its shard at weights_port + r"


# ---- probes ----------------------------------------------------------------------------------------------------------


async def paths_of(service: str) -> set[str]:
    """Return the paths that answer without a key."""
    if service == "broker":
        app = create_app(BrokerSettings(), Ledger(connect("redis://127.0.0.1:1")))
        paths = {getattr(route, "path", "") for route in app.routes}
        return {path for path in paths if required_role("GET", path) is None}

    def status_of(path: str) -> str:
        statuses: list[str] = []
        list(Health()({"PATH_INFO": path, "REQUEST_METHOD": "GET"}, lambda status, _: statuses.append(status)))  # type: ignore[arg-type,func-returns-value,return-value]
        return statuses[0]

    return {path for path in ("/livez", "/readyz", "/healthz", "/") if not status_of(path).startswith("404")}


@pytest.mark.parametrize("service", SETTINGS)
async def test_probes_ask_what_the_service_answers(manifests: Manifests, service: str):
    probes, ports = run_of(manifests, service).probes, run_of(manifests, service).ports
    assert {name: probe.path for name, probe in probes.items()} == {
        "startup": "/livez",
        "readiness": "/readyz",
        "liveness": "/livez",
    }
    assert {probe.path for probe in probes.values()} <= await paths_of(service)
    assert {probe.port for probe in probes.values()} == {ports["http" if service == "broker" else "metrics"]}
    assert probes["startup"].patience_s >= 120


def test_a_broker_ends_when_nobody_is_sent_to_it_any_more(cpu: Manifests):
    pod = cpu.pod("broker")
    program, pause_s = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert 3 <= int(pause_s) <= run_of(cpu, "broker").grace_s - 2 * DRAIN_S


def test_the_scaler_asks_what_the_broker_answers():
    manifests = build(KUBERNETES / "overlays" / "autoscale")
    (scaled,) = manifests.of("ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    address, _, path = trigger["metadata"]["url"].removeprefix("http://").partition("/")
    service = manifests.get("Service", "onbeat-broker")
    port = service["spec"]["ports"][0]["port"]
    assert address == f"{service['metadata']['name']}.{service['metadata']['namespace']}:{port}"
    app = create_app(BrokerSettings(), Ledger(connect("redis://127.0.0.1:1")))
    assert "/v1/pools/{pool}" in {getattr(route, "path", "") for route in app.routes}
    assert path == f"v1/pools/{manifests.environment('rollout')['ONBEAT_POOL']}"
    assert required_role("GET", f"/{path}") is Role.READ
    assert PoolStatus.model_fields[trigger["metadata"]["valueLocation"]].annotation is int


# ---- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", SETTINGS)
def test_placeholders_start_no_service(cpu: Manifests, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    placeholders = dict(run_of(cpu, service).files[SECRETS_FOLDER].texts)
    assert all("REPLACE ME" in text for text in placeholders.values())
    with pytest.raises(ValueError, match=r"API_KEYS_FILE|api-keys\.json|WEIGHTS_API_KEY"):
        settings_of(cpu, service, tmp_path, placeholders, monkeypatch).wire_security()


# ---- compose ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compose() -> dict[str, Any]:
    """compose.yaml with the version of .env and the defaults of its variables."""
    text = (ROOT / "compose.yaml").read_text().replace("${ONBEAT_VERSION}", __version__)
    text = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text).replace("$$", "$")
    assert "${" not in text
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


@pytest.mark.parametrize("service", [*SETTINGS, "redis"])
def test_images_are_those_of_compose(cpu: Manifests, compose: dict[str, Any], service: str):
    image = run_of(cpu, service).image
    assert image == compose[service]["image"]
    if service != "redis":
        made = compose[service]["build"]
        assert made["args"].get("SERVICE", "broker") == service
        assert made["dockerfile"] == f"deploy/docker/{'broker' if service == 'broker' else 'worker'}.Dockerfile"
        assert (ROOT / made["dockerfile"]).exists()


@pytest.mark.parametrize("overlay", PLATFORMS)
def test_images_of_a_platform_have_its_tag(overlay: str):
    manifests = build(KUBERNETES / "overlays" / overlay)
    images = {service: run_of(manifests, service).image for service in SETTINGS}
    assert images == {service: f"onbeat/{service}:{__version__}-{PLATFORMS[overlay]}" for service in SETTINGS}


@pytest.mark.parametrize("service", SETTINGS)
def test_the_environment_is_that_of_compose(cpu: Manifests, compose: dict[str, Any], service: str):
    # Cache and data folders are the image's there, and the advertised name is the container's own.
    own_of_kubernetes = {
        "ONBEAT_CACHE_DIR",
        "ONBEAT_DATA_DIR",
        "ONBEAT_DEVICE",
        "ONBEAT_KV_CACHE_GIB",
        "ONBEAT_REDIS_URL",
        "ONBEAT_WEIGHTS_ADVERTISE",
    }
    # These are unset, or set by a component of Kubernetes.
    own_of_compose = {"ONBEAT_CPU_CORES", "ONBEAT_OTLP_ENDPOINT", "ONBEAT_NOTIFY_URL", "HF_TOKEN"}
    theirs = {name: str(value) for name, value in compose[service]["environment"].items()}
    ours = cpu.environment(service)
    assert {k: v for k, v in ours.items() if k not in own_of_kubernetes} == {
        k: v for k, v in theirs.items() if k not in own_of_compose | own_of_kubernetes
    }


def test_data_of_jobs_fits_into_the_brokers_container(cpu: Manifests, compose: dict[str, Any]):
    limit = compose["broker"]["deploy"]["resources"]["limits"]["memory"]
    assert int(limit[:-1]) * UNITS[limit[-1]] == run_of(cpu, "broker").memory_bytes


def test_rollouts_on_npus_have_the_engine_of_compose(compose: dict[str, Any]):
    ascend = build(KUBERNETES / "overlays" / "ascend")
    engine = ascend.environment("rollout")["ONBEAT_ENGINE"]
    assert engine == compose["rollout-npu"]["environment"]["ONBEAT_ENGINE"]


@pytest.mark.parametrize("service", [*SETTINGS, "redis"])
def test_containers_are_as_hardened_as_in_compose(cpu: Manifests, compose: dict[str, Any], service: str):
    run, other = run_of(cpu, service), compose[service]
    assert (run.is_read_only, list(run.dropped_capabilities)) == (other["read_only"], other["cap_drop"])
    assert list(run.security_options) == other["security_opt"]
    assert run.user == other["user"]
    grace_s = int(other["stop_grace_period"].removesuffix("s"))
    assert run.grace_s == grace_s if service in SETTINGS else run.grace_s >= grace_s
    if "shm_size" in other:
        assert run.shm_bytes == UNITS[other["shm_size"][-1]] * int(other["shm_size"][:-1])


def test_workers_images_keep_memory_as_on_a_laptop():
    dockerfile = (ROOT / "deploy" / "docker" / "worker.Dockerfile").read_text()
    assert f" GLIBC_TUNABLES={KEEP_FREED} " in dockerfile.partition("AS worker\n")[2].partition("AS ")[0]


def test_redis_is_set_up_as_in_compose(cpu: Manifests, compose: dict[str, Any]):
    def redis_options(manifests: Manifests) -> Iterator[tuple[str, str]]:
        for line in run_of(manifests, "redis").files["/etc/redis"].texts["redis.conf"].splitlines():
            if line and not line.startswith("#"):
                name, *values = shlex.split(line)
                yield name, " ".join(values)

    ours = dict(redis_options(cpu))
    server, *words = compose["redis"]["command"]
    theirs = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    assert server == "redis-server"
    assert len(theirs) >= 7
    different = {"appendfsync", "maxmemory"}  # here `always`: a node may lose power
    assert {k: v for k, v in theirs.items() if k not in different} == {k: ours[k] for k in theirs.keys() - different}
    size = ours["maxmemory"]
    assert int(size[:-2]) * UNITS[size[-2:]] <= 0.8 * run_of(cpu, "redis").memory_bytes
    pods = cpu.get("StatefulSet", "onbeat-redis")["spec"]
    assert quantity(pods["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]) > quantity("4Gi")
