"""The doctor's findings about machines that run out of memory, by the heartbeats of trainers and rollouts."""

from collections.abc import Sequence

from onbeat.contracts.records import Finding, HostMemory, ProcessRecord

GB = 1e9
LOW_SHARE, LOW_BYTES = 0.05, 1e9  # the smaller of the two is little
MAX_FINDINGS = 5  # machines with the least memory
MAX_NAMES = 4


def explain_memory(processes: Sequence[ProcessRecord], now: float) -> list[Finding]:
    """Report each machine, or container, whose living processes have little memory left."""
    hosts: dict[str, tuple[HostMemory, list[str]]] = {}
    for process in processes:
        host = process.host
        if host is not None and process.is_alive(now) and is_low(host):
            least, names = hosts.setdefault(host.name, (host, []))
            names.append(process.id)
            hosts[host.name] = (min(least, host, key=lambda container: container.available_bytes), names)
    worst = sorted(hosts.values(), key=lambda host_and_names: host_and_names[0].available_bytes)[:MAX_FINDINGS]
    return [Finding(sentence=describe(host, names), who=names[0], is_problem=True) for host, names in worst]


def is_low(host: HostMemory) -> bool:
    return host.available_bytes < min(LOW_BYTES, LOW_SHARE * host.total_bytes)


def describe(host: HostMemory, names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES]) + ", ..." * (len(names) > MAX_NAMES)
    return (
        f"{host.name} has {host.available_bytes / GB:.1f} of {host.total_bytes / GB:.1f} GB of memory left, so {shown} "
        "may become very slow or be killed: end other programs there, or lower what the job takes, such as "
        "training.max_tokens_per_micro_batch; `onbeat plan memory` predicts it"
    )
