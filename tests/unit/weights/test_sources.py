"""Choice of the source of each pull: a tree, near before far, and no link with more than its share."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.weights.wire import PayloadKey, Peer
from services.trainer.weights import relay_tree as sources_module
from services.trainer.weights.relay_tree import ROOT, Sources, is_ambiguous

TRAINER = "10.0.0.1:50051"
FULL = PayloadKey(1)
DELTA = PayloadKey(1, 0)


def peer(number, host="", zone="", address=None):
    """Make a peer, on its own host unless one is named."""
    address = f"10.0.1.{number}:50052" if address is None else address
    return Peer(worker_id=f"r{number}", address=address, host_id=host or f"host of {number}", zone=zone)


def create_sources(egress=1, fanout=1, num_shards=1):
    place = {"worker_id": "trainer", "host_id": "trainer's host", "zone": "east"}
    return Sources([Peer(address=f"10.0.0.{1 + shard}:50051", **place) for shard in range(num_shards)], egress, fanout)


def located(sources, puller, key=FULL, failed=()):
    return sources.locate(key, puller, set(failed))


def completed(sources, puller):
    """Complete the puller's pull, and return the source that it had."""
    source = located(sources, puller)
    sources.finish(FULL, puller.worker_id, is_complete=True)
    return source


def test_pullers_of_different_hosts_form_a_chain_while_they_pull():
    sources = create_sources()
    pullers = [peer(number) for number in range(4)]
    assert [located(sources, puller) for puller in pullers] == [TRAINER, *(puller.address for puller in pullers[:3])]


def test_egress_and_fanout_are_the_widths_of_the_tree():
    sources = create_sources(egress=2, fanout=3)
    fed = Counter(located(sources, peer(number)) for number in range(2 + 2 * 3 + 6 * 3))
    assert fed.pop(TRAINER) == 2
    assert set(fed.values()) == {3}
    assert len(fed) == 2 + 6


@pytest.mark.parametrize("end", ["complete", "given up", "left"])
def test_place_is_free_when_its_puller_ends_gives_up_or_leaves(end):
    sources, puller = create_sources(), peer(0)
    assert located(sources, puller) == TRAINER
    assert sources._loads(0)[ROOT] == 1
    if end == "left":
        sources.forget(puller.worker_id)
    else:
        sources.finish(FULL, puller.worker_id, end == "complete")
    assert sources._loads(0)[ROOT] == 0
    assert located(sources, peer(1)) == (puller.address if end == "complete" else TRAINER)


def test_when_nobody_has_room_the_least_loaded_takes_one_more():
    sources = create_sources(egress=1)
    assert [located(sources, peer(number, address="")) for number in range(3)] == [TRAINER] * 3


def test_same_host_comes_before_same_zone_before_all_others():
    sources = create_sources(egress=9, fanout=9)
    far, zone, near = peer(0, zone="west"), peer(1, zone="north"), peer(2, host="mine", zone="west")
    for holder in (far, zone, near):
        completed(sources, holder)
    assert located(sources, peer(3, host="mine", zone="north")) == near.address
    assert located(sources, peer(4, zone="north")) == zone.address
    assert located(sources, peer(5, zone="east")) == TRAINER


def test_unknown_hosts_and_zones_are_not_near_to_each_other():
    sources = create_sources(fanout=1)
    unknown = [Peer(worker_id=f"u{number}", address=f"10.0.2.{number}:1") for number in range(3)]
    assert [located(sources, puller) for puller in unknown] == [TRAINER, "10.0.2.0:1", "10.0.2.1:1"]


def test_pullers_on_the_machine_of_their_source_take_no_place():
    sources = create_sources(fanout=1)
    first = peer(0, host="mine")
    located(sources, first)
    assert [located(sources, peer(number, host="mine", address="")) for number in range(1, 6)] == [first.address] * 5
    assert located(sources, peer(6)) == first.address


def test_puller_of_a_delta_serves_the_delta_and_later_the_whole():
    sources = create_sources()
    holder = peer(0, zone="near")
    located(sources, holder, DELTA)
    assert located(sources, peer(1, zone="near"), FULL) == TRAINER
    sources.finish(DELTA, holder.worker_id, is_complete=True)
    assert located(sources, peer(2, zone="near"), FULL) == holder.address


@pytest.mark.parametrize(("first", "then"), [(DELTA, FULL), (FULL, PayloadKey(2, 1))])
@pytest.mark.parametrize("is_done", [True, False])
def test_who_moves_on_has_only_what_it_moves_to(first, then, is_done):
    sources = create_sources(fanout=9)
    mover = peer(0)
    located(sources, mover, first)
    if is_done:
        sources.finish(first, mover.worker_id, is_complete=True)
    located(sources, mover, then)
    assert located(sources, peer(1), DELTA if first == DELTA else FULL) == TRAINER
    assert located(sources, peer(2), then) == mover.address


NEXT = PayloadKey(2, 1)


@pytest.mark.parametrize(("late", "wanted"), [(FULL, NEXT), (FULL, PayloadKey(2)), (DELTA, NEXT), (DELTA, FULL)])
@pytest.mark.parametrize("is_complete", [True, False])
def test_late_finish_frees_no_new_place_and_makes_no_source(late, wanted, is_complete):
    """The puller asks for the next payload before its last word on the one before comes; its copy is written over."""
    sources = create_sources(egress=9, fanout=9)
    puller = peer(0, zone="near")
    located(sources, puller, late)
    assert located(sources, puller, wanted) == TRAINER
    sources.finish(late, puller.worker_id, is_complete)
    assert sources._loads(0)[ROOT] == 1
    for number, key in enumerate({FULL, DELTA, late} - {wanted}, start=1):
        assert located(sources, peer(number, zone="near"), key) == TRAINER
        sources.forget(f"r{number}")
    sources.finish(wanted, puller.worker_id, is_complete=True)
    assert sources._loads(0)[ROOT] == 0


def test_places_are_counted_for_each_shard():
    sources = create_sources(num_shards=2)
    assert [located(sources, peer(number, address=""), PayloadKey(1, None, number)) for number in range(2)] == [
        "10.0.0.1:50051",
        "10.0.0.2:50051",
    ]


def test_source_that_failed_is_avoided_until_it_is_heard_of():
    sources = create_sources(egress=9, fanout=9)
    broken = peer(0, zone="near", host="mine")
    completed(sources, broken)
    assert located(sources, peer(1, zone="near"), failed=[broken.address]) == TRAINER
    assert located(sources, peer(2, zone="near")) != broken.address
    completed(sources, broken)
    assert located(sources, peer(4, zone="near", host="mine")) == broken.address


def test_the_trainer_is_the_last_resort_even_if_it_has_failed():
    sources = create_sources()
    assert located(sources, peer(0), failed=[TRAINER]) == TRAINER


def test_loopback_addresses_are_only_given_to_the_same_host():
    sources = create_sources(egress=9, fanout=9)
    holder = peer(0, host="mine", address="127.0.0.1:5")
    completed(sources, holder)
    assert located(sources, peer(1)) == TRAINER
    assert located(sources, peer(2, host="mine")) == "127.0.0.1:5"


def test_addresses_that_are_of_any_machine_are_recognised():
    assert all(map(is_ambiguous, ("127.0.0.1:5", "127.8.9.1:5", "localhost:5", "[::1]:5", "0.0.0.0:5", "[::]:5")))
    assert not any(map(is_ambiguous, ("10.0.0.1:5", "[fe80::1]:5", "127.example.org:5", "gpu-7:5")))


def test_puller_that_never_returns_loses_its_place_in_time(monkeypatch):
    monkeypatch.setattr(sources_module, "SLOT_S", 0.0)
    sources = create_sources()
    located(sources, peer(0, address=""))
    located(sources, peer(1))
    assert not any(sources._loads(0).values())


# ---- any order of events ---------------------------------------------------------------------------------------------

WORKERS = [
    peer(number, host=f"h{number // 2}" if number < 6 else "", zone=("", "east", "west")[number % 3])
    for number in range(9)
]
KEYS = [PayloadKey(1), PayloadKey(2), PayloadKey(2, 1), PayloadKey(2, 1, 1), PayloadKey(1, None, 1)]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["locate", "locate", "locate", "complete", "give up", "fail", "forget"]),
        st.sampled_from(WORKERS),
        st.sampled_from(KEYS),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(1, 2), st.integers(1, 2))
def test_no_puller_waits_for_itself_and_links_fill_evenly(events, egress, fanout):
    def chain(sources, worker_id, shard):
        """Return the puller's source, the source's source, ... up to the trainer. Fails for a circle."""
        worker_ids = []
        while worker_id != ROOT and (slot := sources._slots.get((worker_id, shard))) is not None:
            worker_id = slot.source
            assert worker_id not in worker_ids, "a circle"
            worker_ids.append(worker_id)
        return worker_ids

    sources = create_sources(egress, fanout, num_shards=2)
    addresses = {worker.address: worker.worker_id for worker in WORKERS}
    last = {}  # where each was sent
    for event, worker, key in events:
        failed = set()
        if event in ("complete", "give up"):
            sources.finish(key, worker.worker_id, event == "complete")
            continue
        if event == "forget":
            sources.forget(worker.worker_id)
            continue
        if event == "fail" and (worker.worker_id, key) in last:
            failed = {last[worker.worker_id, key]}
        sources._slots.pop((worker.worker_id, key.shard), None)  # the places that it held are free now
        before = sources._loads(key.shard)
        source = sources.locate(key, worker, failed)
        last[worker.worker_id, key] = source

        sender = addresses.get(source, ROOT)
        assert sender != worker.worker_id
        assert sender == ROOT or source not in failed
        for shard in range(2):
            for anybody in WORKERS:
                assert anybody.worker_id not in chain(sources, anybody.worker_id, shard)
        assert chain(sources, worker.worker_id, key.shard)[0] == sender
        is_too_much = sources._loads(key.shard)[sender] > (egress if sender == ROOT else fanout)
        assert not is_too_much or before[ROOT] >= egress


def test_worker_without_requests_for_long_is_no_longer_a_source(monkeypatch):
    sources = create_sources()
    silent, living = peer(1, zone="west"), peer(2, zone="west")
    assert completed(sources, silent) == TRAINER
    assert completed(sources, living) == silent.address, "in its zone"
    monkeypatch.setattr(sources_module, "FORGET_S", 0.0)
    assert completed(sources, living) == TRAINER
