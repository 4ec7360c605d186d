"""Promise 7, every kernel: the rule, to the bit, on every instruction set, at every length and alignment, in its bounds."""

import functools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import cast_rule

from fastmm._native.cast import _cast_buffer, available_isas
from fastmm.errors import EncodeError, SchemaError

ISAS = available_isas()
NARROW = ["bfloat16", "float16"]
PAIRS = [(s, t) for s in ("float32", "float64", "float16", "bfloat16") for t in ("bfloat16", "float16", "float32") if s != t]
GROWS = {(s, "float32") for s in NARROW}
CANARY = 0xA5
MARGIN = 64


@pytest.fixture(params=ISAS)
def isa(request):
    return request.param


def item_nbytes(name):
    return np.dtype(cast_rule.FORMATS[name][0]).itemsize


def run(bits, source, target, isa, *, src_shift=0, dst_shift=0, inplace=False, swapped=False):
    """One cast in a room with canaries on both sides; returns the bits and checks the canaries and the source."""
    src_nbytes, dst_nbytes = bits.nbytes, bits.size * item_nbytes(target)
    src_room = np.full(MARGIN + src_shift + src_nbytes + MARGIN, CANARY, np.uint8)
    src = src_room[MARGIN + src_shift :][:src_nbytes]
    src[:] = np.frombuffer((bits.byteswap() if swapped else bits).tobytes(), np.uint8)
    if inplace:
        dst_room, dst = src_room, src[:dst_nbytes]
        before, after = MARGIN + src_shift, MARGIN + src_shift + src_nbytes
    else:
        dst_room = np.full(MARGIN + dst_shift + dst_nbytes + MARGIN, CANARY, np.uint8)
        dst = dst_room[MARGIN + dst_shift :][:dst_nbytes]
        before, after = MARGIN + dst_shift, MARGIN + dst_shift + dst_nbytes
    source_bytes = src.tobytes()
    _cast_buffer(src, dst, source, target, isa=isa, swapped=swapped)
    assert (dst_room[:before] == CANARY).all()
    assert (dst_room[after:] == CANARY).all()
    if not inplace:
        assert src.tobytes() == source_bytes
    return np.frombuffer(dst.tobytes(), cast_rule.FORMATS[target][0])


def same(got, want):
    differs = np.flatnonzero(got != want)
    assert not differs.size, (
        f"{differs.size} differ, first at {differs[0]}: {got[differs[0]]:#x}, expected {want[differs[0]]:#x}"
    )


def test_scalar_kernels_are_always_there():
    assert ISAS[-1] == "scalar"


# Every row of the contract, and CASES.md row 7: 65519, 65520, 65536.
SPECIALS = [
    # float32 bits, bfloat16, float16
    (0x00000000, 0x0000, 0x0000),
    (0x80000000, 0x8000, 0x8000),
    (0x477FEF00, 0x4780, 0x7BFF),  # 65519 -> 65504
    (0x477FF000, 0x4780, 0x7C00),  # 65520 -> infinity
    (0x47800000, 0x4780, 0x7C00),  # 65536 -> infinity
    (0xC77FEFFF, 0xC780, 0xFBFF),  # just inside, negative
    (0xC77FF000, 0xC780, 0xFC00),
    (0x7F7F7FFF, 0x7F7F, 0x7C00),  # rounds to the largest bfloat16
    (0x7F7F8000, 0x7F80, 0x7C00),  # a tie that goes to infinity
    (0x7F800000, 0x7F80, 0x7C00),
    (0xFF800000, 0xFF80, 0xFC00),
    (0x3F808000, 0x3F80, 0x3C04),  # bfloat16 tie, to even: down
    (0x3F818000, 0x3F82, 0x3C0C),  # bfloat16 tie, to even: up
    (0x3F801000, 0x3F80, 0x3C00),  # float16 tie, down
    (0x3F803000, 0x3F80, 0x3C02),  # float16 tie, up
    (0x38800000, 0x3880, 0x0400),  # the least normal float16
    (0x387FC000, 0x3880, 0x03FF),  # the largest subnormal
    (0x387FE000, 0x3880, 0x0400),  # a tie between the two
    (0x33800000, 0x3380, 0x0001),  # the least subnormal
    (0x33000000, 0x3300, 0x0000),  # half of it: a tie with zero
    (0x33000001, 0x3300, 0x0001),
    (0xB3000001, 0xB300, 0x8001),
    (0x00000001, 0x0000, 0x0000),  # float32 subnormals
    (0x00008000, 0x0000, 0x0000),
    (0x00008001, 0x0001, 0x0000),
    (0x00018000, 0x0002, 0x0000),
    (0x00400000, 0x0040, 0x0000),
    (0x807FFFFF, 0x8080, 0x8000),
    (0x7FC00000, 0x7FC0, 0x7E00),
    (0xFFC00000, 0xFFC0, 0xFE00),
    (0x7F800001, 0x7FC0, 0x7E00),  # signalling NaNs come out quiet
    (0xFF802000, 0xFFC0, 0xFE01),
    (0x7FFFFFFF, 0x7FFF, 0x7FFF),
    (0xFFABCDEF, 0xFFEB, 0xFF5E),  # the payload bits that fit
]


@pytest.mark.parametrize("repeat", [1, 40])  # the tail alone, and every lane of the vectors
def test_special_values(isa, repeat):
    table = np.repeat(np.array(SPECIALS, np.uint64), repeat, axis=0)
    bits = table[:, 0].astype(np.uint32)
    for target, column in (("bfloat16", 1), ("float16", 2)):
        same(run(bits, "float32", target, isa), table[:, column].astype(np.uint16))
        same(cast_rule.narrow(bits, "float32", target), table[:, column].astype(np.uint16))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_length_in_place_and_not_with_canaries(isa, source, target):
    for nelem in range(131):
        bits = cast_rule.samples(source, nelem, seed=nelem)
        want = cast_rule.expected(bits, source, target)
        same(run(bits, source, target, isa), want)
        if (source, target) not in GROWS:
            same(run(bits, source, target, isa, inplace=True), want)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_alignment(isa, source, target):
    for src_shift in range(0, 64, 3):
        for dst_shift in (0, 1, 2, 31, 62, 63):
            nelem = 97 + src_shift
            bits = cast_rule.samples(source, nelem, seed=src_shift)
            want = cast_rule.expected(bits, source, target)
            same(run(bits, source, target, isa, src_shift=src_shift, dst_shift=dst_shift), want)
            if (source, target) not in GROWS:
                same(run(bits, source, target, isa, src_shift=src_shift, inplace=True), want)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_other_byte_order(isa, source, target):
    for nelem in (0, 1, 7, 1023, 1024, 1025, 4099):
        bits = cast_rule.samples(source, nelem, seed=nelem)
        want = cast_rule.expected(bits, source, target)
        same(run(bits, source, target, isa, swapped=True), want)
        if (source, target) not in GROWS:
            same(run(bits, source, target, isa, swapped=True, inplace=True), want)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_samples_of_every_pair(isa, source, target):
    bits = cast_rule.samples(source, 300_001, seed=7)
    want = cast_rule.expected(bits, source, target)
    same(run(bits, source, target, isa), want)
    if (source, target) not in GROWS:
        same(run(bits, source, target, isa, inplace=True), want)


@pytest.mark.parametrize("source", NARROW)
def test_all_65536_values_of_a_16_bit_source(isa, source):
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for target in ({"bfloat16", "float16"} - {source}) | {"float32"}:
        same(run(bits, source, target, isa), cast_rule.expected(bits, source, target))


@functools.cache
def large(target):
    bits = cast_rule.samples("float32", (16 << 20) // 4 + 77, seed=1)
    return bits, cast_rule.narrow(bits, "float32", target)


@pytest.mark.parametrize("target", NARROW)
@pytest.mark.parametrize("dst_shift", [0, 1, 62])  # 1: no whole elements lead to a line's start
def test_a_destination_written_past_the_cache(isa, target, dst_shift):
    """Above FMM_CAST_STREAM_MIN_NBYTES other kernels run."""
    bits, want = large(target)
    same(run(bits, "float32", target, isa, dst_shift=dst_shift), want)


BITS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([row[0] for row in SPECIALS]),
    st.floats(width=32).map(lambda value: int(np.float32(value).view(np.uint32))),
)


@given(values=st.lists(BITS, max_size=200), src_shift=st.integers(0, 65), dst_shift=st.integers(0, 65))
@example(values=[0x7F800001] * 32 + [0x3F808000] * 32, src_shift=1, dst_shift=1)
def test_any_values_at_any_place(values, src_shift, dst_shift):
    bits = np.array(values, np.uint32)
    for target in NARROW:
        want = cast_rule.narrow(bits, "float32", target)
        for isa in ISAS:
            same(run(bits, "float32", target, isa, src_shift=src_shift, dst_shift=dst_shift), want)
            same(run(bits, "float32", target, isa, src_shift=src_shift, inplace=True), want)


@given(st.lists(st.integers(0, 2**64 - 1) | st.floats().map(lambda v: int(np.float64(v).view(np.uint64))), max_size=60))
def test_any_float64(values):
    bits = np.array(values, np.uint64)
    for isa in ISAS:
        same(run(bits, "float64", "float32", isa), cast_rule.narrow(bits, "float64", "float32"))


@pytest.mark.parametrize("position", [0, 15, 16, 31, 32, 63, 64, 127, 128])
def test_a_nan_changes_nothing_but_itself(isa, position):
    """The kernels take another path when a block holds a NaN."""
    bits = cast_rule.samples("float32", 129, seed=3) & np.uint32(0xBFFFFFFF)  # no exponent of all ones
    clean = run(bits, "float32", "bfloat16", isa).copy()
    bits[position] = 0xFF800123
    dirty = run(bits, "float32", "bfloat16", isa)
    assert dirty[position] == 0xFFC0
    same(np.delete(dirty, position), np.delete(clean, position))


# --- peers ---------------------------------------------------------------------------------------------------------------


def against(got, peer, target):
    """Equal bits, NaN against NaN: the peers have other rules for the payload."""
    got_nan, peer_nan = cast_rule.is_nan(got, target), cast_rule.is_nan(peer, target)
    same(got_nan, peer_nan)
    same(got[~got_nan], peer[~peer_nan])


def peer_of_numpy(values, target):
    return values.astype(np.float16).view(np.uint16) if target == "float16" else None


def peer_of_ml_dtypes(values, target):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return values.astype(ml_dtypes.bfloat16 if target == "bfloat16" else np.float16).view(np.uint16)


def peer_of_torch(values, target):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(values).to(getattr(torch, target)).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("peer", [peer_of_numpy, peer_of_ml_dtypes, peer_of_torch])
@pytest.mark.parametrize("target", NARROW)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast", "ignore:invalid value encountered in cast")
def test_equal_to_its_peers(isa, target, peer):
    bits = np.concatenate([cast_rule.samples("float32", 1 << 20), np.array([row[0] for row in SPECIALS], np.uint32)])
    theirs = peer(bits.view(np.float32), target)
    if theirs is not None:
        against(run(bits, "float32", target, isa), theirs, target)


# --- all inputs ------------------------------------------------------------------------------------------------------------


def sweep(chunk_bits, target):
    """One chunk of float32 inputs, in every order of things: each instruction set, in place and not, rule and peers."""
    want = cast_rule.narrow(chunk_bits, "float32", target)
    out = np.empty(chunk_bits.size, np.uint16)
    for isa in ISAS:
        out.fill(0xA5A5)
        _cast_buffer(chunk_bits, out, "float32", target, isa=isa)
        same(out, want)
        over = chunk_bits.copy()
        _cast_buffer(over, over, "float32", target, isa=isa)
        same(over.view(np.uint16)[: over.size], want)
    with np.errstate(all="ignore"):
        for peer in (peer_of_numpy, peer_of_torch):
            theirs = peer(chunk_bits.view(np.float32), target)
            if theirs is not None:
                against(want, theirs, target)


@pytest.mark.parametrize("target", NARROW)
def test_a_sample_of_all_inputs(target):
    """Every upper half of the bits with lower halves at, and next to, every tie; then a stride that is coprime to 2^32."""
    upper = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        sweep(upper | np.uint32(lower), target)
    sweep((np.arange(1 << 20, dtype=np.uint64) * 4097 * 65537 % 2**32).astype(np.uint32), target)


CHUNK = 1 << 24
PIECE = 1 << 18  # so that the reference's many temporaries stay in the cache


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", NARROW)
def test_all_inputs(target):
    """All 2^32 float32 inputs, in 2^24 chunks cut into pieces, two at a time: numpy and torch let go of the GIL."""
    from concurrent.futures import ThreadPoolExecutor

    def chunk(start):
        for piece in range(start, start + CHUNK, PIECE):
            sweep(np.arange(piece, piece + PIECE, dtype=np.uint64).astype(np.uint32), target)
        return CHUNK

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(chunk, range(0, 2**32, CHUNK))) == 2**32


# --- refusals of the entry point --------------------------------------------------------------------------------------------


def test_partial_overlap_is_refused_and_nothing_written():
    room = np.arange(64, dtype=np.float32)
    before = room.tobytes()
    raw = room.view(np.uint8)
    for dst in (raw[2:130], raw[64:192], raw[4:132]):
        with pytest.raises(EncodeError, match="partly overlaps"):
            _cast_buffer(raw[:256], dst, "float32", "bfloat16")
    assert room.tobytes() == before
    _cast_buffer(raw[:128], raw[128:192], "float32", "bfloat16")  # neighbours do not overlap


def test_growing_in_place_is_refused():
    room = np.zeros(64, np.uint8)
    with pytest.raises(EncodeError, match="do not grow"):
        _cast_buffer(room[:32], room, "float16", "float32")


@pytest.mark.parametrize("pair", [("int32", "bfloat16"), ("float32", "float64"), ("float32", "float8_e5m2"), ("bool", "bool")])
def test_a_pair_without_a_kernel_is_refused(pair):
    with pytest.raises(SchemaError, match="expected a pair of floating types"):
        _cast_buffer(np.zeros(16, np.uint8), np.zeros(64, np.uint8), *pair)
