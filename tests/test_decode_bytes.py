"""Any bytes at all: a message, or one `DecodeError`; never another exception, never a crash."""

import os
import random
import subprocess
import sys

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import raw
from support.compare import assert_same
from support.families import fastmm_family
from support.golden_cases import CASES
from support.reference import reference_encode

from fastmm._native.cast import available_isas
from fastmm._native.decoder import Decoder
from fastmm.errors import DecodeError, TruncatedError
from fastmm.schema import EngineCoreOutputs, EngineCoreRequest

FRAMES = {case.name: reference_encode(case.build(fastmm_family("wire")), case.threshold) for case in CASES}
FRAMES = {name: [bytes(frame) for frame in frames] for name, frames in FRAMES.items()}
TYPES = {"outputs": EngineCoreOutputs, "abort": list[str], "utility": None}
# One decoder of each kind for all: a bad message must leave nothing behind.
DECODERS = {
    kind: [Decoder(kind, tensors=tensors, token_ids=ids) for tensors, ids in (("numpy", "list"), ("wire", "array"))]
    for kind in (EngineCoreRequest, EngineCoreOutputs, list[str], None)
}
CUT = ["everything", "flat-5", "flat-dim-1", "sampling-all", "pooling-all", "lora", "outputs-full", "outputs-stats", "text-id-widths",
       "abort", "utility", "is-embed", "ext-sizes"]  # fmt: skip
MUTATED = ["everything", "flat-5", "flat-dim-1", "outputs-full-at-0", "outputs-stats", "shared", "is-embed", "nested-tensors"]


def decoders_of(name):
    return DECODERS[TYPES.get(name.split("-")[0], EngineCoreRequest)]


def survives(decoder, frames):
    """Decodes or refuses; anything else fails the test."""
    try:
        decoder.decode(frames)
    except DecodeError as error:
        assert error.frame is not None or not frames
        return error
    return None


@pytest.mark.parametrize("name", CUT)
def test_a_message_cut_anywhere_is_truncated(name):
    main, *aux = FRAMES[name]
    for decoder in decoders_of(name):
        decoder.decode([main, *aux])
        for end in range(len(main)):
            with pytest.raises(DecodeError) as caught:
                decoder.decode([main[:end], *aux])
            assert isinstance(caught.value, TruncatedError), (end, caught.value)
            assert caught.value.offset <= end
        for index, frame in enumerate(aux, 1):
            if frame:
                with pytest.raises(DecodeError) as caught:
                    decoder.decode([main, *aux[: index - 1], frame[:-1], *aux[index:]])
                assert caught.value.frame == index
                assert survives(decoder, [main, *aux[: index - 1], *aux[index:]])


@pytest.mark.parametrize("name", MUTATED)
def test_any_one_byte_changed_is_a_message_or_a_decode_error(name):
    main, *aux = FRAMES[name]
    values = range(256) if len(main) < 400 else [*(1 << bit for bit in range(8)), 0x7F, 0xFF, 0xC1 ^ 0xA0, 0x30]
    outcomes = set()
    for decoder in decoders_of(name):
        changed = bytearray(main)
        for position, byte in enumerate(main):
            for value in values:
                changed[position] = byte ^ value
                outcomes.add(survives(decoder, [bytes(changed), *aux]) is None)
            changed[position] = byte
        decoder.decode([main, *aux])
    assert outcomes == {True, False}


@pytest.mark.parametrize("name", MUTATED)
def test_bytes_put_in_taken_out_or_doubled(name):
    main, *aux = FRAMES[name]
    stream = random.Random(name)
    for decoder in decoders_of(name):
        for _ in range(2000):
            changed = bytearray(main)
            for _ in range(stream.choice((1, 1, 1, 2, 5))):
                start = stream.randrange(len(changed))
                end = min(len(changed), start + stream.choice((1, 1, 2, 4, 16)))
                what = stream.randrange(3)
                if what == 0:
                    del changed[start:end]
                elif what == 1:
                    changed[start:start] = changed[start:end]
                else:
                    changed[start:end] = stream.choice((b"\x93", b"\xdd\xff\xff\xff\xff", b"\xc7\x00\x03", b"\xc0", b"\xcf" + b"\xff" * 8,
                                                        b"\x91" * 70, b"\xde\xff\xff", b"\xa3<f4", b"\xa9bfloat16"))  # fmt: skip
                if not changed:
                    break
            survives(decoder, [bytes(changed), *aux])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(list(DECODERS)))
def test_noise_is_a_message_or_a_decode_error(noise, kind):
    for decoder in DECODERS[kind]:
        survives(decoder, noise)
        survives(decoder, [b"\xdc\x00\x16" + noise, noise])


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
keys = st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.none() | st.binary(max_size=4)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(keys, inner, max_size=6), max_leaves=30
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees)
@example([0] * 70_000)
@example({str(i): i for i in range(70_000)})
@example("é" * 70_000)
def test_plain_trees_are_read_as_msgpack_and_msgspec_read_them(tree):
    packed = msgpack.packb(tree)
    got = Decoder(None).decode(packed)
    assert_same(got, msgpack.unpackb(packed, strict_map_key=False))
    assert_same(got, msgspec.msgpack.decode(packed))


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_single_floats_are_widened_exactly(values):
    assert_same(Decoder(list[float]).decode(msgpack.packb(values, use_single_float=True)), values)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_what_msgspec_refuses_is_refused_and_what_it_takes_is_the_same(noise):
    error = value = None
    try:
        value = msgspec.msgpack.decode(noise, ext_hook=lambda code, data: bytes(data))
    except Exception as caught:
        error = caught
    try:
        got = Decoder(None).decode(noise)
    except DecodeError:
        return  # stricter: ext codes, keys that are arrays
    assert error is None
    if value == value:  # a NaN in it
        assert got == value


ids = st.lists(st.integers(0, 151_643) | st.just(151_655) | st.integers(-(2**63), 2**63 - 1), max_size=300)


@settings(max_examples=300, deadline=None)
@given(ids, st.integers(0, 40))
def test_ids_are_read_as_msgspec_reads_them(values, repeat):
    values = values + values[-1:] * repeat * 10 + values[:5]
    frames = raw.request(prompt_token_ids=values)
    assert DECODERS[EngineCoreRequest][0].decode(frames).prompt_token_ids == values
    array = DECODERS[EngineCoreRequest][1].decode(frames).prompt_token_ids
    assert array.dtype == np.int64
    assert array.tolist() == values


IDS_OF_EVERY_KIND = """
import hashlib, random
from support import raw
from fastmm._native.decoder import Decoder
stream, digest = random.Random(5), hashlib.sha256()
array, as_list = Decoder(token_ids="array"), Decoder()
for length in [*range(131), 500, 513, 3000]:
    for spread in (100, 300, 70_000, 151_643, 2**33):
        ids = [stream.randrange(spread) for _ in range(length)]
        run = stream.randrange(length + 1)
        ids[run : run + length // 2] = [stream.choice((7, 200, 40_000, 151_655, 2**40))] * len(ids[run : run + length // 2])
        main = raw.request(prompt_token_ids=ids)[0]
        offset = stream.randrange(64)
        frame = memoryview(bytes(offset) + main)[offset:]
        got = array.decode(frame).prompt_token_ids
        assert got.tolist() == as_list.decode(frame).prompt_token_ids == ids, (length, spread)
        digest.update(got)
print(digest.hexdigest())
"""


def with_isa(isa, code):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"FASTMM_ISA": isa},
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_instruction_set_reads_the_same_ids():
    digests = set()
    for isa in available_isas():
        done = with_isa(isa, IDS_OF_EVERY_KIND)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("isa", ["sse9", "\udcff"])  # the latter: a byte that is no UTF-8
def test_a_wrong_isa_is_an_error_of_the_first_decode_of_ids_not_of_the_import(isa):
    code = """
import fastmm
from fastmm._native.decoder import Decoder
for token_ids in "list", "array":
    try:
        Decoder(list[int], token_ids=token_ids).decode(bytes([0x92, 1, 2]))
    except fastmm.CompatError as error:
        print(error)
"""
    done = with_isa(isa, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FASTMM_ISA") == 2
