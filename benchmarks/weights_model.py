"""The tables of docs/weights.md: measurements, and by a formula how long weights would take at other sizes.

Rates, shares and latencies are from the results of delta_codec, weights_pull and weights_relay. The last table is
computed, at sizes that no machine here has.

    B bytes of the weights (2 a parameter), d of what travels (B, or a delta), N rollouts, each on its own machine

    link   L = line rate * measured share of it that arrives
    star       N * d / min(L, send)                     the trainer sends everything
    chain      d / min(L, relay) + (N - 1) * (m / L + h)    a message more for each hop, and a delay h
    both       at least the work at the end, in one thread, while it is received: for a delta B / apply + B / checksum
               from the trainer (star), B / apply + B / hash from a relay (chain)

    send       a bare stream, one core
    relay      receives, verifies and sends: 1 / (1 / pull - 1 / checksum + 1 / hash + 1 / send); the measured `pull`
               came from the trainer and was checked with checksums, but the bytes of a relay are hashed
    m          bytes of a message: see `onbeat/weights/server.py`
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from harness import RESULTS, command_line, start

from onbeat.weights.server import CHUNK_BYTES, CHUNKS_A_PAYLOAD, MIN_CHUNK_BYTES

BYTES_A_PARAMETER = 2
MODELS = {"7B": 7e9, "235B": 235e9}  # parameters
LINKS_GBIT = (10, 100)
NUM_ROLLOUTS = (8, 64, 512)
SHARES = (0.01, 0.04)  # shares of the weights that change


@dataclass(frozen=True)
class Measured:
    """The measured rates (bytes a second, of one core), shares and seconds."""

    send: float
    pull: float  # seconds of a pull from the trainer
    checksum: float
    hash: float
    apply: dict[float, float]  # seconds by the share of the weights that change
    encode: dict[float, float]
    delta_share: dict[float, float]  # shares of the bytes
    line_share: float  # share of the line rate, for one puller's bytes
    hop_s: float  # above the time of a message on the line

    @property
    def relay(self) -> float:
        return 1 / (1 / self.pull - 1 / self.checksum + 1 / self.hash + 1 / self.send)


def load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing; run benchmarks/{name}.py first")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def measured() -> Measured:
    kinds = load("weights_pull")["kinds"]
    deltas = {delta["changed"]: delta for delta in load("delta_codec")["deltas"]}
    link = full_links()[0]
    line = link["rate_mbit_per_s"] * 1e6 / 8
    return Measured(
        send=kinds["bare"]["gb_per_s"] * 1e9,
        pull=kinds["full"]["gb_per_s"] * 1e9,
        checksum=kinds["checksum"]["gb_per_s"] * 1e9,
        hash=kinds["hash"]["gb_per_s"] * 1e9,
        apply={share: deltas[share]["apply_gb_per_s"] * 1e9 for share in SHARES},
        encode={share: deltas[share]["encode_gb_per_s"] * 1e9 for share in SHARES},
        delta_share={share: deltas[share]["share_of_raw_bytes"] for share in SHARES},
        line_share=link["full_bytes"] / link["full"]["alone"]["median_s"] / line,
        hop_s=max(0.0, link["full"]["hop_s"] - message_bytes(link["full_bytes"]) / line),
    )


def full_links() -> list[dict[str, Any]]:
    """Return the links over which full copies were pulled, the fastest first."""
    links = [link for link in load("weights_relay")["links"] if "full" in link]
    return sorted(links, key=lambda link: -link["rate_mbit_per_s"])


# ---- the formula -----------------------------------------------------------------------------------------------------


def message_bytes(payload_bytes: float) -> float:
    return min(CHUNK_BYTES, max(MIN_CHUNK_BYTES, payload_bytes / CHUNKS_A_PAYLOAD))


def star_s(by: Measured, payload_bytes: float, num_rollouts: int, line: float, work_s: float) -> float:
    return max(num_rollouts * payload_bytes / min(line * by.line_share, by.send), work_s)


def chain_s(by: Measured, payload_bytes: float, num_rollouts: int, line: float, work_s: float) -> float:
    link = line * by.line_share
    hop_s = message_bytes(payload_bytes) / link + by.hop_s
    return max(payload_bytes / min(link, by.relay), work_s) + (num_rollouts - 1) * hop_s


def full_work_s(by: Measured, full_bytes: float) -> float:
    return full_bytes / by.pull


def delta_work_s(by: Measured, full_bytes: float, share: float, check: float) -> float:
    """Return the seconds to apply and check a delta. `check`: the rate of checksums if the trainer sent it, of hashes
    if a relay did."""
    return full_bytes / by.apply[share] + full_bytes / check


# ---- the tables ------------------------------------------------------------------------------------------------------


def print_table(heads: list[str], rows: Iterable[list[str]]) -> None:
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def show_pulls() -> None:
    kinds, rows = load("weights_pull")["kinds"], []
    for name, kind in kinds.items():
        received = f"{kind['received_bytes'] / 1e6:.1f} MB" if "received_bytes" in kind else ""
        spread = f"{kind['min_s'] * 1e3:.0f} - {kind['max_s'] * 1e3:.0f} ms"
        cells = [name, received, f"{kind['median_s'] * 1e3:.0f} ms", spread, f"{kind['gb_per_s']:.2f}"]
        if not name.startswith("apply"):
            rows.append([*cells, f"{kinds['bare']['median_s'] / kind['median_s']:.2f}"])
    print_table(["pull", "received", "median", "fastest - slowest", "GB/s", "of bare speed"], rows)


def show_relays() -> None:
    kinds, rows = ["alone", "tree", "star", "killed", "cut"], []
    for link in load("weights_relay")["links"]:
        for way in (way for way in ("full", "delta") if way in link):
            cells = [f"{link['rate_mbit_per_s']} Mbit/s", f"{way}, {link[f'{way}_bytes'] / 1e6:.1f} MB"]
            cells += [f"{link[way][kind]['median_s']:.2f} s" if kind in link[way] else "" for kind in kinds]
            rows.append(cells + [f"{link[way][kind]['to_alone']:.2f}" for kind in ("tree", "star")])
    print_table(["link", "weights", *kinds, "tree/alone", "star/alone"], rows)


def show_parameters(by: Measured) -> None:
    rates = {"send": by.send, "pull": by.pull, "relay (computed)": by.relay, "checksum": by.checksum, "hash": by.hash}
    rates |= {f"apply, {share:.0%} changed": by.apply[share] for share in SHARES}
    rates |= {f"encode, {share:.0%} changed": by.encode[share] for share in SHARES}
    rows = [[name, f"{rate / 1e9:.2f} GB/s"] for name, rate in rates.items()]
    rows += [[f"bytes of a delta, {share:.0%} changed", f"{by.delta_share[share]:.2%}"] for share in SHARES]
    rows.append(["share of the line rate that arrives", f"{by.line_share:.0%}"])
    rows.append(["h, delay of a hop", f"{by.hop_s * 1e3:.0f} ms"])
    print_table(["parameter", "value"], rows)


def show_check(by: Measured) -> None:
    """Print the formula beside the measurements of full copies."""
    num_rollouts, rows = load("weights_relay")["num_rollouts"], []
    for link in full_links():
        size, line = link["full_bytes"], link["rate_mbit_per_s"] * 1e6 / 8
        work_s = full_work_s(by, size)
        cells = [chain_s(by, size, num_rollouts, line, work_s), link["full"]["tree"]["median_s"]]
        cells += [star_s(by, size, num_rollouts, line, work_s), link["full"]["star"]["median_s"]]
        rows.append([f"{link['rate_mbit_per_s']} Mbit/s", *(f"{cell:.1f} s" for cell in cells)])
    print_table(["link", "chain, formula", "chain, measured", "star, formula", "star, measured"], rows)


def show_table(by: Measured) -> None:
    ways, rows = ["full", *(f"delta, {share:.0%}" for share in SHARES)], []
    for model, num_parameters in MODELS.items():
        size = num_parameters * BYTES_A_PARAMETER
        payloads = [(size, full_work_s(by, size), full_work_s(by, size))]
        for share in SHARES:
            star_work_s, chain_work_s = (delta_work_s(by, size, share, check) for check in (by.checksum, by.hash))
            payloads.append((size * by.delta_share[share], star_work_s, chain_work_s))
        for gbit, num_rollouts in product(LINKS_GBIT, NUM_ROLLOUTS):
            cells = [
                short(way(by, payload, num_rollouts, gbit * 1e9 / 8, work_s))
                for payload, *works_s in payloads
                for way, work_s in zip((star_s, chain_s), works_s, strict=True)
            ]
            rows.append([model, f"{gbit} Gbit/s", str(num_rollouts), *cells])
    heads = [f"{way}: {kind}" for way in ways for kind in ("star", "chain")]
    print_table(["model", "link", "rollouts", *heads], rows)


def short(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 300 else f"{seconds:.1f} s"


def main() -> None:
    by = measured()
    show_pulls()
    show_relays()
    show_parameters(by)
    show_check(by)
    show_table(by)


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
