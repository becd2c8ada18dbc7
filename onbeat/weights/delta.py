"""A tensor's new bytes given its old ones: lossless, and small when few weights changed, as in one step of RL.

    UNCHANGED   nothing
    RAW         the new bytes
    SPARSE      u64 num_changed, u64 num_gap_bytes, then the streams: gaps, plane 0, ..., plane item_bytes-1
    XOR_ZSTD    the streams: plane 0, ..., plane item_bytes-1 of (old xor new)

Numbers are little-endian. Weights are unsigned integers here, so NaN and -0.0 are bits like any other. Plane j holds
byte j of every item. A stream is u64 stored_bytes, followed by that many bytes: a zstd frame, or the stream itself
where a frame would not be smaller.

SPARSE stores for each changed item how many items are skipped before it, and the wraparound difference of the bit
patterns, zigzag-mapped (-1, 1, -2, 2 become 1, 2, 3, 4): one step of a float's last place is small whatever its sign or
exponent. A gap byte of 255 means "skip 255 and go on". Items 3 (by 1) and 260 (by -1) of a bfloat16 tensor changed:

    gaps 03 | ff 01     plane 0: 02 01     plane 1: 00 00
"""

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from onbeat.contracts.errors import WeightsError

Buffer: TypeAlias = Any  # bytes, memoryview, mmap, an array: contiguous, at any alignment. PEP 688 comes with 3.12
Bytes: TypeAlias = npt.NDArray[np.uint8]
Items: TypeAlias = npt.NDArray[Any]  # unsigned integers of the dtype's width

SPARSE_HEADER = struct.Struct("<QQ")
STREAM_HEADER = struct.Struct("<Q")
HOP = 255  # the gap byte that is followed by another one
MAX_SPARSE_SHARE = 0.2  # share of changed items up to which SPARSE is smaller than XOR_ZSTD and takes less time
# A step changes the low bytes of nearly all float32 weights. XOR_ZSTD would save half of the bytes, but take longer
# than sending them on one machine does.
MAX_XOR_ITEM_BYTES = 2
NUM_SAMPLES = 1024  # items that are compared to estimate the share
BLOCK_BYTES = 1 << 20  # bytes of base and of new at a time, so that temporaries stay in the cache
GAP_BLOCK_BYTES = 1 << 16  # gaps at a time, of one byte each: decoding makes an 8-byte position of each
ZSTD_LEVEL = 1  # the lowest level that entropy-codes; higher ones gain nothing on these streams


class Encoding(IntEnum):
    """The encodings, by their numbers on the wire."""

    UNCHANGED = 1
    RAW = 2
    SPARSE = 3
    XOR_ZSTD = 4


def encode(base: Buffer | None, new: Buffer, item_bytes: int) -> tuple[Encoding, memoryview | bytes]:
    """Encode `new` as a change of `base`, which has the same length. The same input gives the same bytes.

    `item_bytes` (1, 2, 4, 8) is the width of the dtype. Without a base, or where nothing is gained, the result is RAW
    and a view of `new`; without a change it is UNCHANGED and no bytes.
    """
    new_bytes = np.frombuffer(new, np.uint8)
    if base is None:
        return Encoding.RAW, new_bytes.data
    base_bytes = np.frombuffer(base, np.uint8)
    assert len(base_bytes) == len(new_bytes), f"base has {len(base_bytes)} bytes and new {len(new_bytes)}"
    dtype = _unsigned(item_bytes, len(new_bytes))
    if _sampled_share(base_bytes.view(dtype), new_bytes.view(dtype)) <= MAX_SPARSE_SHARE:
        encoding, payload = Encoding.SPARSE, _encode_sparse(base_bytes, new_bytes, dtype)
        if not payload:
            return Encoding.UNCHANGED, b""
    elif item_bytes <= MAX_XOR_ITEM_BYTES:
        encoding, payload = Encoding.XOR_ZSTD, _encode_xor(base_bytes, new_bytes, dtype)
    else:
        return Encoding.RAW, new_bytes.data
    return (encoding, payload) if len(payload) < len(new_bytes) else (Encoding.RAW, new_bytes.data)


def apply(encoding: int, payload: Buffer, target: Buffer, item_bytes: int) -> None:
    """Turn the base in `target` (writable) into the new tensor, in place.

    Raise WeightsError for a payload that is malformed or of another size; the content of `target` is then undefined.
    This writes nothing outside `target`, allocates at most a few times its size whatever the payload claims, and keeps
    no view of it, not even in a traceback: a map can be closed at once.
    """
    new, stored = np.frombuffer(target, np.uint8), np.frombuffer(payload, np.uint8).data
    items = new.view(_unsigned(item_bytes, len(new)))
    assert new.flags.writeable, "the target is read-only"
    try:
        if encoding == Encoding.UNCHANGED:
            _check(len(stored) == 0, f"an unchanged tensor came with {len(stored)} bytes")
        elif encoding == Encoding.RAW:
            _check(len(stored) == len(new), f"{len(stored)} raw bytes came for a tensor of {len(new)}")
            new[:] = np.frombuffer(stored, np.uint8)
        elif encoding == Encoding.SPARSE:
            for positions, steps in _read_sparse(stored, len(items), items.dtype):
                np.add.at(items, positions, steps)
        elif encoding == Encoding.XOR_ZSTD:
            for index, plane in enumerate(_read_streams(stored, [len(items)] * item_bytes)):
                new[index::item_bytes] ^= plane
        else:
            raise WeightsError(f"encoding {encoding} is not known here; upgrade this side")
    finally:
        del new, items  # a traceback keeps this frame


def _sampled_share(base: Items, new: Items) -> float:
    """Return the share of changed items in an evenly spaced sample. The stride is odd, as rows have even lengths."""
    stride = max(1, len(new) // NUM_SAMPLES) | 1
    is_changed = base[::stride] != new[::stride]
    return np.count_nonzero(is_changed) / max(1, len(is_changed))


def _encode_sparse(base: Bytes, new: Bytes, dtype: np.dtype[Any]) -> bytes:
    """Return the SPARSE payload; empty when nothing changed."""
    gaps, differences, last = [], [], -1
    for start in range(0, len(new), BLOCK_BYTES):
        block = slice(start, start + BLOCK_BYTES)
        positions, steps = _changes(base[block], new[block], dtype)
        if len(positions) == 0:
            continue
        positions += start // dtype.itemsize
        gaps.append(_gap_bytes(positions, last))
        differences.append(steps)
        last = int(positions[-1])
    if not gaps:
        return b""
    gap_bytes, zigzag = np.concatenate(gaps), _zigzag(np.concatenate(differences))
    return SPARSE_HEADER.pack(len(zigzag), len(gap_bytes)) + _write_streams([gap_bytes, *_planes(zigzag)])


def _changes(base: Bytes, new: Bytes, dtype: np.dtype[Any]) -> tuple[npt.NDArray[np.int64], Items]:
    """Return the positions of changed items, and new - base there. Compare 8-byte words first: most are equal."""
    word = np.dtype("<u8") if len(new) % 8 == 0 else dtype
    base_words, new_words = base.view(word), new.view(word)
    changed = np.flatnonzero(base_words != new_words)
    base_items, new_items = base_words[changed].view(dtype), new_words[changed].view(dtype)
    inside = np.flatnonzero(base_items != new_items)
    shift = (word.itemsize // dtype.itemsize).bit_length() - 1  # items per word, as a power of two
    positions = (changed[inside >> shift] << shift) + (inside & ((1 << shift) - 1))
    return positions, new_items[inside] - base_items[inside]


def _gap_bytes(positions: npt.NDArray[np.int64], previous: int) -> Bytes:
    """Return the gaps as bytes: the items skipped before each position, the first counted from `previous`."""
    gaps = np.diff(positions, prepend=previous) - 1
    hops = gaps // HOP
    ends = np.cumsum(hops + 1) - 1  # position of each gap's last byte
    stream = np.full(ends[-1] + 1, HOP, np.uint8)
    stream[ends] = gaps - HOP * hops
    return stream


def _read_sparse(
    payload: memoryview, num_items: int, dtype: np.dtype[Any]
) -> Iterator[tuple[npt.NDArray[np.int64], Items]]:
    """Yield blocks of rising positions, all below `num_items`, and what to add there. Raise WeightsError."""
    _check(len(payload) >= SPARSE_HEADER.size, f"a sparse tensor came with only {len(payload)} bytes")
    num_changed, num_gap_bytes = SPARSE_HEADER.unpack_from(payload)
    is_possible = 0 < num_changed <= num_items and num_gap_bytes <= num_changed + num_items // HOP
    _check(is_possible, f"{num_changed} changes in {num_gap_bytes} gap bytes came for a tensor of {num_items} items")
    sizes = [num_gap_bytes] + [num_changed] * dtype.itemsize
    gaps, *planes = _read_streams(payload[SPARSE_HEADER.size :], sizes)
    differences = _unzigzag(_join(planes, dtype))
    num_read = num_passed = 0  # changes, items
    for start in range(0, num_gap_bytes, GAP_BLOCK_BYTES):
        block = gaps[start : start + GAP_BLOCK_BYTES]
        ends = np.flatnonzero(block != HOP)
        skipped = np.cumsum(block, dtype=np.int64)
        positions = skipped[ends] + np.arange(num_passed, num_passed + len(ends))
        steps = differences[num_read : num_read + len(ends)]
        num_read += len(ends)
        num_passed += int(skipped[-1]) + len(ends)
        fits = num_read <= num_changed and num_passed <= num_items
        _check(fits, f"position {num_read} of {num_changed} comes after {num_passed} of {num_items} items")
        yield positions, steps
    _check(num_read == num_changed and gaps[-1] != HOP, f"{num_changed} changes came with {num_read} positions")


def _encode_xor(base: Bytes, new: Bytes, dtype: np.dtype[Any]) -> bytes:
    planes = np.empty((dtype.itemsize, len(new) // dtype.itemsize), np.uint8)
    for start in range(0, len(new), BLOCK_BYTES):
        block = slice(start, start + BLOCK_BYTES)
        xor = (base[block] ^ new[block]).view(dtype)
        first = start // dtype.itemsize
        for plane, part in zip(planes, _planes(xor), strict=True):
            plane[first : first + len(part)] = part
    return _write_streams(planes)


def _write_streams(streams: Iterable[Bytes]) -> bytes:
    compressor, parts = zstandard.ZstdCompressor(level=ZSTD_LEVEL), []
    for stream in streams:
        frame = compressor.compress(stream.data)
        stored = frame if len(frame) < len(stream) else stream.data
        parts += [STREAM_HEADER.pack(len(stored)), stored]
    return b"".join(parts)


def _read_streams(payload: memoryview, sizes: list[int]) -> Iterator[Bytes]:
    """Yield one stream of each size, one at a time. Raise WeightsError for a wrong size or for bytes left over."""
    decompressor, end = zstandard.ZstdDecompressor(), 0
    for size in sizes:
        start = end + STREAM_HEADER.size
        _check(start <= len(payload), f"a stream's header ends at byte {start} of a payload of {len(payload)}")
        (stored_bytes,) = STREAM_HEADER.unpack_from(payload, end)
        end = start + stored_bytes
        _check(end <= len(payload), f"a stream ends at byte {end} of a payload of {len(payload)}")
        stored = payload[start:end]
        stream = stored if stored_bytes == size else _decompress(decompressor, stored, size)
        yield np.frombuffer(stream, np.uint8)
    _check(end == len(payload), f"the streams end at byte {end} of a payload of {len(payload)}")


def _decompress(decompressor: zstandard.ZstdDecompressor, frame: memoryview, size: int) -> bytes:
    """Decompress a frame. Check the size that it claims before memory is allocated; zstd refuses any other one."""
    try:
        claimed = zstandard.get_frame_parameters(frame).content_size
        _check(claimed == size, f"a stream of {size} bytes came as a zstd frame of {claimed}")
        return decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a stream of {size} bytes is not a zstd frame: {error}") from error


def _zigzag(differences: Items) -> Items:
    sign = differences >> (8 * differences.itemsize - 1)
    return (differences << 1) ^ -sign


def _unzigzag(zigzag: Items) -> Items:
    return (zigzag >> 1) ^ -(zigzag & 1)


def _planes(items: Items) -> Iterator[Bytes]:
    """Yield byte 0 of every item, then byte 1, ..."""
    return ((items >> 8 * index).astype(np.uint8) for index in range(items.itemsize))


def _join(planes: list[Bytes], dtype: np.dtype[Any]) -> Items:
    """Return the items that `_planes` took apart."""
    items = np.zeros(len(planes[0]), dtype)
    for plane in reversed(planes[1:]):
        items = (items | plane) << 8
    return items | planes[0]


def _unsigned(item_bytes: int, num_bytes: int) -> np.dtype[Any]:
    assert item_bytes in (1, 2, 4, 8), f"no dtype has items of {item_bytes} bytes"
    assert num_bytes % item_bytes == 0, f"{num_bytes} bytes are no whole number of {item_bytes}-byte items"
    return np.dtype(f"<u{item_bytes}")


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise WeightsError(problem)
