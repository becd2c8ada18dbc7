"""A delta turns the base into the new tensor bit by bit, is never larger than it, and a broken one does no harm."""

import contextlib
import mmap
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.contracts.errors import WeightsError
from onbeat.weights import delta
from onbeat.weights.delta import Encoding, apply, encode

GUARD = b"\xa5" * 64
U64 = struct.Struct("<Q").pack


def tensor(num_items: int, item_bytes: int, seed: int = 0) -> np.ndarray:
    """Draw a tensor of equally likely bit patterns: NaN, infinities and -0.0 of any float dtype among them."""
    return np.random.default_rng(seed).integers(0, 1 << 8 * item_bytes, num_items, f"<u{item_bytes}", endpoint=False)


def changed(base: np.ndarray, share: float, kind: str, seed: int = 1) -> np.ndarray:
    """Return `base`, about `share` of its items one or two units in the last place off, or with random bits."""
    generator = np.random.default_rng(seed)
    random_bits = tensor(len(base), base.itemsize, seed)
    steps = generator.choice(np.array([-2, -1, 1, 2]), len(base)).astype(base.dtype)
    return np.where(generator.random(len(base)) < share, base + steps if kind == "ulp" else random_bits, base)


def apply_guarded(encoding: int, payload: bytes, base: np.ndarray) -> bytes:
    """Apply a delta to `base` and return the result; fail when a byte around the target was written."""
    memory = bytearray(GUARD + base.tobytes() + GUARD)
    with memoryview(memory) as view:
        try:
            apply(encoding, payload, view[len(GUARD) : len(memory) - len(GUARD)], base.itemsize)
        finally:
            assert memory.startswith(GUARD)
            assert memory.endswith(GUARD)
    return bytes(memory[len(GUARD) : len(memory) - len(GUARD)])


def sparse_payload(num_changed: int, gaps: bytes, planes: list[bytes]) -> bytes:
    return U64(num_changed) + U64(len(gaps)) + b"".join(U64(len(stream)) + stream for stream in [gaps, *planes])


@settings(max_examples=300, deadline=None)
@given(
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    num_items=st.one_of(st.integers(0, 40), st.integers(41, 6000)),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.25, 0.6, 1.0]),
    kind=st.sampled_from(["ulp", "bits"]),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_apply_after_encode_gives_the_new_bits(item_bytes, num_items, share, kind, offset, seed):
    def at_offset(array: np.ndarray, offset: int) -> memoryview:
        """Return the array's bytes, `offset` bytes into a buffer: not aligned to the items where it is odd."""
        return memoryview(bytearray(b"\0" * offset + array.tobytes()))[offset:]

    base = tensor(num_items, item_bytes, seed)
    new = changed(base, share, kind, seed + 1)
    encoding, payload = encode(at_offset(base, offset), at_offset(new, (3 * offset) % 8), item_bytes)
    assert len(payload) <= new.nbytes  # RAW has no header
    assert encode(base, new, item_bytes) == (encoding, payload)
    target = at_offset(base, offset)
    apply(encoding, payload, target, item_bytes)
    assert target.tobytes() == new.tobytes()
    assert apply_guarded(encoding, payload, base) == new.tobytes()


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.05, 1.0])
def test_tensors_of_many_blocks_survive(item_bytes, share):
    num_items = 3 * delta.BLOCK_BYTES // item_bytes + 13  # the last block has no whole 8-byte words
    base = tensor(num_items, item_bytes)
    new = changed(base, share, "ulp")
    if share:
        new[-1] += 1
    chosen, payload = encode(base, new, item_bytes)
    assert chosen == expected_encoding(share, item_bytes)
    assert apply_guarded(chosen, payload, base) == new.tobytes()


def expected_encoding(share, item_bytes):
    """Changes of a few items are sparse; of all items, those of up to two bytes are compressed."""
    if not share:
        return Encoding.UNCHANGED
    return Encoding.SPARSE if share < 0.1 else Encoding.XOR_ZSTD if item_bytes <= 2 else Encoding.RAW


def test_a_gap_longer_than_a_block_survives():
    base = tensor(255 * 3 * delta.GAP_BLOCK_BYTES, 1)  # the one gap takes three blocks of hops
    new = base.copy()
    new[[0, -1]] += 1
    encoding, payload = encode(base, new, 1)
    assert encoding == Encoding.SPARSE
    assert len(payload) < 200
    assert apply_guarded(encoding, payload, base) == new.tobytes()


def test_gaps_around_the_hop_survive():
    base = tensor(4000, 2)
    new = base.copy()
    new[np.cumsum([1, 254, 255, 256, 257, 510, 511, 512, 1])] ^= 0x8001
    encoding, payload = encode(base, new, 2)
    assert encoding == Encoding.SPARSE
    assert apply_guarded(encoding, payload, base) == new.tobytes()


def test_the_sparse_bytes_are_those_of_the_documented_example():
    base = np.full(300, 0x3F80, "<u2")  # 1.0 in bfloat16
    new = base.copy()
    new[3] += 1
    new[260] -= 1
    expected = (
        "0200000000000000 0300000000000000"  # 2 changes, 3 gap bytes
        "0300000000000000 03 ff 01"  # skip 3 items; skip 255 and 1
        "0200000000000000 02 01"  # low bytes of zigzag(1), zigzag(-1)
        "0200000000000000 00 00"  # the high bytes of the two items
    )
    assert encode(base, new, 2) == (Encoding.SPARSE, bytes.fromhex(expected))


def test_delta_of_one_percent_of_weights_takes_one_percent():
    base = tensor(1_000_000, 2)
    encoding, payload = encode(base, changed(base, 0.01, "ulp"), 2)
    assert encoding == Encoding.SPARSE
    assert len(payload) < 0.01 * base.nbytes


def test_without_a_base_the_new_bytes_are_viewed_and_not_copied():
    new = tensor(1000, 4)
    encoding, payload = encode(None, new, 4)
    assert encoding == Encoding.RAW
    assert np.shares_memory(np.frombuffer(payload, np.uint8), new)
    assert apply_guarded(encoding, payload, np.zeros_like(new)) == new.tobytes()


@settings(max_examples=300, deadline=None)
@given(
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    share=st.sampled_from([0.02, 0.1, 1.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_flipped_bit_is_refused_or_changes_bytes_in_the_target(item_bytes, share, seed, data):
    base = tensor(700, item_bytes, seed)
    encoding, payload = encode(base, changed(base, share, "ulp", seed + 1), item_bytes)
    broken = bytearray(payload)
    if broken:
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    claimed = data.draw(st.sampled_from([encoding, *Encoding]))
    with contextlib.suppress(WeightsError):
        assert len(apply_guarded(claimed, broken, base)) == base.nbytes


@settings(max_examples=200, deadline=None)
@given(encoding=st.sampled_from(list(Encoding)), payload=st.binary(max_size=120), num_items=st.integers(0, 20))
def test_noise_is_refused_or_stays_inside_the_target(encoding, payload, num_items):
    base = tensor(num_items, 2)
    with contextlib.suppress(WeightsError):
        assert len(apply_guarded(encoding, payload, base)) == base.nbytes


@pytest.mark.parametrize("share", [0.02, 1.0])
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_every_truncation_and_every_extension_is_refused(item_bytes, share):
    base = tensor(500, item_bytes)
    encoding, payload = encode(base, changed(base, share, "ulp"), item_bytes)
    assert encoding == expected_encoding(share, item_bytes)
    for length in range(len(payload)):
        with pytest.raises(WeightsError):
            apply_guarded(encoding, payload[:length], base)
    with pytest.raises(WeightsError):
        apply_guarded(encoding, bytes(payload) + b"\0", base)


@pytest.mark.parametrize(
    ("num_items", "payload", "problem"),
    [
        (10, sparse_payload(1, b"\x0a", [b"\x02"]), "after 11 of 10 items"),
        (10, sparse_payload(2, b"\x04\x05", [b"\x02\x02"]), "after 11 of 10 items"),
        (10, sparse_payload(1, b"\x01\x01", [b"\x02"]), "1 changes in 2 gap bytes"),
        (10, sparse_payload(2, b"\xff\x01", [b"\x02\x02"]), "after 257 of 10 items"),
        (10, sparse_payload(1, b"\xff", [b"\x02"]), "after 255 of 10 items"),
        (10, sparse_payload(0, b"", [b""]), "0 changes in 0 gap bytes"),
        (10, sparse_payload(11, b"\0" * 11, [b"\x02" * 11]), "11 changes"),
        (10, sparse_payload(2**64 - 1, b"\x01", [b"\x02"]), "18446744073709551615 changes"),
        (10, sparse_payload(1, b"\x01", [b"\x02", b"\x00"]), "the streams end at byte"),
        (10, sparse_payload(1, b"\x01", []), "header ends at byte"),
        (10, sparse_payload(2, b"\x01\x01", [b"\x02"]), "not a zstd frame"),
        (600, sparse_payload(1, b"\x01\x01", [b"\x02"]), "position 2 of 1 "),
        (600, sparse_payload(1, b"\x01\xff", [b"\x02"]), "1 changes came with 1 positions"),
        (600, sparse_payload(2, b"\x01\xff", [b"\x02\x02"]), "2 changes came with 1 positions"),
    ],
)
def test_sparse_sizes_and_gaps_that_do_not_add_up_are_refused(num_items, payload, problem):
    with pytest.raises(WeightsError, match=problem):
        apply_guarded(Encoding.SPARSE, payload, tensor(num_items, 1))


FRAME = zstandard.ZstdCompressor().compress(bytes(100))


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (b"not a frame", "is not a zstd frame"),
        (FRAME[:-1], "is not a zstd frame"),
        (FRAME + b"x", "is not a zstd frame"),
        (FRAME + FRAME, "is not a zstd frame"),
        (zstandard.ZstdCompressor().compress(bytes(99)), "came as a zstd frame of 99"),
        (struct.pack("<II", 0x184D2A50, 100) + bytes(100), "is not a zstd frame"),  # a frame to be skipped
    ],
)
def test_a_stream_that_is_not_one_frame_of_its_size_is_refused(frame, problem):
    with pytest.raises(WeightsError, match=problem):
        apply_guarded(Encoding.XOR_ZSTD, U64(len(frame)) + frame, tensor(100, 1))


@pytest.mark.parametrize(
    ("encoding", "payload", "problem"),
    [
        (Encoding.UNCHANGED, b"x", "unchanged tensor came with 1 bytes"),
        (Encoding.RAW, b"123", "3 raw bytes came for a tensor of 4"),
        (Encoding.XOR_ZSTD, U64(2) + b"12" + U64(2) + b"3", "a stream ends at byte 20 of a payload of 19"),
        (0, b"", "encoding 0 is not known"),
        (5, b"", "encoding 5 is not known"),
    ],
)
def test_what_does_not_fit_the_tensor_is_refused(encoding, payload, problem):
    with pytest.raises(WeightsError, match=problem):
        apply_guarded(encoding, payload, tensor(2, 2))


@pytest.mark.parametrize("claims_its_size", [True, False])
def test_a_decompression_bomb_is_refused_before_it_grows(claims_its_size):
    bomb = zstandard.ZstdCompressor(level=1, write_content_size=claims_its_size).compress(bytes(1 << 26))
    base = tensor(1 << 16, 1)
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match="of 65536 bytes"):
            apply_guarded(Encoding.XOR_ZSTD, U64(len(bomb)) + bomb, base)
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()


def test_a_map_can_be_closed_while_the_error_is_handled(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(20))
    for encoding in (*Encoding, 9):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as weights, pytest.raises(WeightsError) as caught:
            apply(encoding, sparse_payload(1, b"\xfe", [b"\x02"]), weights, 1)
        assert caught.tb is not None  # the frames are alive, and yet leaving `with` closed the map
