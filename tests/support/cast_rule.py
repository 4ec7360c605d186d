"""The numeric rule of the casts once more, in numpy integer arithmetic, written from the rule and not from the C code.

A number is significand x 2^power. Rounding moves the significand to the target's step with a shift and looks at what fell
out: more than half, or exactly half of an odd quotient, rounds up.
"""

import numpy as np

# name -> (unsigned type of the bits, exponent bits, mantissa bits, signed type wide enough for the arithmetic)
FORMATS = {
    "bfloat16": (np.uint16, 8, 7, np.int32),
    "float16": (np.uint16, 5, 10, np.int32),
    "float32": (np.uint32, 8, 23, np.int32),
    "float64": (np.uint64, 11, 52, np.int64),
}


def narrow(bits, source, target):
    """The bits of `target` for the bits of a wider `source`, by the rule."""
    source_type, source_exponent_bits, source_mantissa_bits, work = FORMATS[source]
    target_type, target_exponent_bits, target_mantissa_bits, _ = FORMATS[target]
    assert bits.dtype == source_type
    width = source_exponent_bits + source_mantissa_bits
    sign = (bits >> source_type(width)).astype(target_type) << target_type(target_exponent_bits + target_mantissa_bits)
    mantissa = (bits & source_type((1 << source_mantissa_bits) - 1)).astype(work)
    exponent = ((bits >> source_type(source_mantissa_bits)) & source_type((1 << source_exponent_bits) - 1)).astype(work)
    special = exponent == (1 << source_exponent_bits) - 1

    significand = np.where(exponent > 0, mantissa | work(1 << source_mantissa_bits), mantissa)
    exponent = np.maximum(exponent, 1) - work((1 << (source_exponent_bits - 1)) - 1)  # of the leading bit, if there is one
    bias = (1 << (target_exponent_bits - 1)) - 1
    step = np.maximum(exponent - work(target_mantissa_bits), work(1 - bias - target_mantissa_bits))
    shift = np.minimum(step - (exponent - work(source_mantissa_bits)), work(source_mantissa_bits + 2))

    quotient = significand >> shift
    remainder = significand - (quotient << shift)
    half = work(1) << (shift - work(1))
    quotient += (remainder > half) | ((remainder == half) & ((quotient & 1) == 1))

    carried = quotient == (2 << target_mantissa_bits)
    quotient = np.where(carried, quotient >> 1, quotient)
    biased = step + carried + work(target_mantissa_bits + bias)
    normal = quotient >= (1 << target_mantissa_bits)
    infinity = ((1 << target_exponent_bits) - 1) << target_mantissa_bits
    magnitude = np.where(
        normal, (biased << work(target_mantissa_bits)) + (quotient & ((1 << target_mantissa_bits) - 1)), quotient
    )
    magnitude = np.where(normal & (biased >= (1 << target_exponent_bits) - 1), infinity, magnitude)

    payload = mantissa >> work(source_mantissa_bits - target_mantissa_bits)
    quiet = 1 << (target_mantissa_bits - 1)
    magnitude = np.where(special, np.where(mantissa == 0, infinity, infinity | quiet | payload), magnitude)
    return magnitude.astype(target_type) | sign


def widen(bits, source):
    """The bits of float32 for float16 or bfloat16: exact, a NaN quieted, its payload moved to the leading bits."""
    _, exponent_bits, mantissa_bits, _ = FORMATS[source]
    wide = bits.astype(np.uint32)
    sign = (wide >> 15) << 31
    mantissa = wide & ((1 << mantissa_bits) - 1)
    exponent = (wide >> mantissa_bits) & ((1 << exponent_bits) - 1)
    power = np.maximum(exponent.astype(np.float64), 1) - ((1 << (exponent_bits - 1)) - 1) - mantissa_bits
    significand = np.where(exponent > 0, mantissa | (1 << mantissa_bits), mantissa).astype(np.float64)
    with np.errstate(over="ignore"):  # the lanes of infinities and NaNs, replaced below
        finite = (significand * np.exp2(power)).astype(np.float32).view(np.uint32)
    special = np.where(mantissa == 0, 0x7F800000, 0x7FC00000 | (mantissa << (23 - mantissa_bits)))
    return np.where(exponent == (1 << exponent_bits) - 1, special, finite).astype(np.uint32) | sign


def expected(bits, source, target):
    """Any pair that `cast` takes: 16-bit sources and float64 go through float32."""
    if source == target:
        return bits
    if source != "float32":
        bits = narrow(bits, source, "float32") if source == "float64" else widen(bits, source)
    return bits if target == "float32" else narrow(bits, "float32", target)


def is_nan(bits, name):
    unsigned, exponent_bits, mantissa_bits, _ = FORMATS[name]
    magnitude = bits & unsigned((1 << (exponent_bits + mantissa_bits)) - 1)
    return magnitude > unsigned(((1 << exponent_bits) - 1) << mantissa_bits)


def samples(name, nelem, seed=0):
    """Bits worth having: uniform ones, every exponent with mantissas near ties, all special values."""
    unsigned, exponent_bits, mantissa_bits, _ = FORMATS[name]
    random = np.random.default_rng(seed)
    width = 1 + exponent_bits + mantissa_bits
    bits = random.integers(0, 1 << width, nelem, dtype=np.uint64)
    # Half of them end in zeros, give or take a little: they lie at ties of every target.
    zeros = random.integers(0, mantissa_bits + 2, nelem, dtype=np.uint64)
    near = ((bits >> zeros) << zeros) + random.integers(-2, 3, nelem).astype(np.uint64)
    bits = np.where(random.random(nelem) < 0.5, near, bits) & np.uint64((1 << width) - 1 if width < 64 else ~0 & (2**64 - 1))
    return bits.astype(unsigned)
