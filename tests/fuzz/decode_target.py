"""Fuzz target: frames changed at random give a message or a `DecodeError`, and nothing the sanitizers would report.

An input is a list of frames in a small container (`pack_frames`), so that what libFuzzer keeps as a corpus is whole messages.
The mutator works on both levels: bytes of the main frame, and the list of frames.
"""

import json
import random
import struct
import sys
from pathlib import Path

import atheris
import numpy as np

from fastmm._native.decoder import Decoder
from fastmm.errors import DecodeError
from fastmm.schema import EngineCoreOutputs, EngineCoreRequest, WireTensor

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "frames.json"
TYPES = [EngineCoreRequest, EngineCoreOutputs, None, list[str]]
OPTIONS = [
    {"tensors": "numpy"},
    {"tensors": "wire", "token_ids": "array"},
    {
        "tensors": "numpy",
        "copy": True,
        "token_ids": "array",
        "oob_tensor_provider": lambda dtype, shape, meta: np.zeros(shape, dtype),
    },
]
# One decoder of each kind for the whole run: nothing may stay behind from a bad message.
DECODERS = [[Decoder(kind, max_elements=1 << 16, **options) for options in OPTIONS] for kind in TYPES]
TOKENS = [
    *(bytes([lead]) for lead in (0xC0, 0xC1, 0xC2, 0x80, 0x90, 0x91, 0x93, 0xA0, 0xFF, 0x00, 0x01, 0x02, 0x7F)),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x03", b"\xdc\x00\x16"),
    *(
        b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
        b"\xce\x00\x02\x50\x67",
        b"\xcb\x7f\xf8" + bytes(6),
    ),
    *(
        b"\xc7\x00\x03",
        b"\xd4\x03\x00",
        b"\xd6\x01abcd",
        b"\xa3<f4",
        b"\xa3>i8",
        b"\xa3|b1",
        b"\xa3<U2",
        b"\xa8bfloat16",
        b"\xa7float32",
    ),
    *(b"\xa4data", b"\xa5field", b"\xa4flat", b"\xa7batched", b"\xa6shared", b"\xa6slices", b"\xa8is_embed", b"\x91" * 70),
]


def pack_frames(kind: int, frames: list[bytes]) -> bytes:
    sizes = struct.pack(f"<BB{len(frames)}I", kind, len(frames), *map(len, frames))
    return sizes + b"".join(frames)


def unpack_frames(data: bytes) -> tuple[int, list[bytes]]:
    """The container, or, where it is none, all of it as a main frame."""
    if len(data) >= 2 and data[1] <= 32 and len(data) >= 2 + 4 * data[1]:
        kind, count = data[:2]
        at = 2 + 4 * count
        frames = []
        for size in struct.unpack_from(f"<{count}I", data, 2):
            frames.append(data[at : at + size])
            at += size
        return kind % len(TYPES), frames
    return 0, [data]


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    stream = random.Random(seed)
    kind, frames = unpack_frames(data)
    if stream.random() < 0.02:
        kind = stream.randrange(len(TYPES))
    if not frames or stream.random() < 0.1:
        what = stream.randrange(4)
        index = stream.randrange(len(frames) + 1)
        if what == 0:
            frames.insert(index, bytes(stream.choice((0, 1, 4, 24, 256))))
        elif index < len(frames) and what == 1:
            del frames[index]
        elif index < len(frames) and what == 2:
            frames.append(frames[index])
        elif index < len(frames):
            frames[index] = atheris.Mutate(frames[index], len(frames[index]) + 8) if frames[index] else b"x"
    else:
        main = bytearray(frames[0])
        for _ in range(stream.choice((1, 1, 1, 2, 3))):
            if main and stream.random() < 0.4:
                main = bytearray(atheris.Mutate(bytes(main), len(main) + 16))
            start = stream.randrange(len(main) + 1)
            what = stream.randrange(4)
            if what == 0:
                token = stream.choice(TOKENS)
                main[start : start + stream.choice((0, 1, len(token)))] = token
            elif what == 1:
                end = start + stream.choice((1, 2, 8, 40))
                main[stream.randrange(len(main) + 1) : start] = main[start:end]
            elif what == 2 and main:
                main[start % len(main)] = stream.choice(
                    (main[start % len(main)] ^ (1 << stream.randrange(8)), stream.randrange(256))
                )
            else:
                del main[start : start + stream.choice((1, 1, 2, 5))]
        frames[0] = bytes(main)
    return pack_frames(kind, frames)[:max_size]


def touch(value) -> int:
    """Reads every byte of every tensor: memory that is not there is for the sanitizer to find."""
    if isinstance(value, np.ndarray):
        return sum(value.tobytes())
    if isinstance(value, WireTensor):
        return sum(bytes(value.data))
    if isinstance(value, dict):
        return sum(touch(key) + touch(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set)):
        return sum(map(touch, value))
    if hasattr(value, "__slots__") and not isinstance(value, type):
        return sum(touch(getattr(value, name)) for name in value.__slots__)
    repr(value)
    return 0


def target(data: bytes) -> None:
    kind, frames = unpack_frames(data)
    for decoder in DECODERS[kind]:
        # Buffers of their very size: a byte too many is seen.
        held = [np.frombuffer(frame, np.uint8).copy() for frame in frames]
        try:
            message = decoder.decode(held)
        except DecodeError as error:
            str(error)
            continue
        held.reverse()
        while held:  # the tensors keep what they need
            held.pop()
        touch(message)


def seeds(folder: Path) -> None:
    """Writes the golden messages that are kept whole as a corpus."""
    for name, case in json.loads(GOLDEN.read_text())["cases"].items():
        frames = [bytes.fromhex(frame) for frame in case["frames"] if isinstance(frame, str)]
        if len(frames) == len(case["frames"]) and len(frames) <= 32:
            kind = {"outputs": 1, "utility": 2, "abort": 3}.get(name.split("-")[0], 0)
            (folder / name).write_bytes(pack_frames(kind, frames))


def main() -> None:
    if sys.argv[1:2] == ["--seeds"]:
        seeds(Path(sys.argv[2]))
        return
    atheris.Setup(sys.argv, target, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
