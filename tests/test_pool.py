"""No message pays twice for fresh memory: buffers come back warm, what lies idle is bounded, what is in use is nobody else's."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from fastmm import Encoder
from fastmm._native.pool import pool_limit, pool_stats

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _empty_pool():
    gc.collect()
    limit = pool_stats()["idle_limit_nbytes"]
    pool_limit(0)
    pool_limit(limit)
    yield
    pool_limit(limit)


def strided(nbytes, value=1):
    """An array whose frame must be a copy of `nbytes`."""
    return np.full((nbytes // 8 // 2, 2), value, np.int64).T


ENCODER = Encoder()


def test_a_buffer_that_comes_back_is_taken_again():
    ENCODER.encode(strided(MIB))
    before = pool_stats()
    for _ in range(10):
        ENCODER.encode(strided(MIB))
    after = pool_stats()
    assert after["misses"] == before["misses"]
    assert after["hits"] >= before["hits"] + 10
    assert after["idle_nbytes"] == before["idle_nbytes"] >= MIB


def test_a_buffer_in_use_is_nobody_elses():
    kept = [ENCODER.encode(strided(MIB, value)) for value in range(20)]
    assert len({frames[1].address for frames in kept}) == 20
    for value, frames in enumerate(kept):
        assert bytes(frames[1]) == strided(MIB, value).tobytes()


def test_what_lies_idle_is_bounded_and_the_rest_goes_back_to_the_system():
    pool_limit(8 * MIB)
    kept = [ENCODER.encode(strided(MIB)) for _ in range(30)]
    del kept
    gc.collect()
    assert 0 < pool_stats()["idle_nbytes"] <= 8 * MIB
    ENCODER.encode(strided(16 * MIB))
    assert pool_stats()["idle_nbytes"] <= 8 * MIB
    pool_limit(MIB)
    assert pool_stats()["idle_nbytes"] <= MIB
    pool_limit(0)
    assert pool_stats()["idle_nbytes"] == 0
    frames = ENCODER.encode(strided(MIB, 7))
    assert bytes(frames[1]) == strided(MIB, 7).tobytes()
    del frames
    assert pool_stats()["idle_nbytes"] == 0


def test_sizes_around_powers_of_two():
    for size in (4096, 4112, 8176, 8192, 8208, MIB - 16, MIB, MIB + 16):
        frames = ENCODER.encode(strided(size, size))
        assert len(frames[1]) == size
        assert bytes(frames[1]) == strided(size, size).tobytes()
        assert frames[1].address % 64 == 0


def test_buffers_of_any_size_taken_and_given_back_in_any_order():
    rng = random.Random(3)
    kept = []
    for step in range(600):
        if kept and rng.random() < 0.5:
            value, size, frames = kept.pop(rng.randrange(len(kept)))
            assert bytes(frames[1]) == strided(size, value).tobytes()
        else:
            size = 16 * rng.randrange(20, 20_000)
            kept.append((step, size, ENCODER.encode(strided(size, step))))
    for value, size, frames in kept:
        assert bytes(frames[1]) == strided(size, value).tobytes()


@pytest.mark.parametrize("wrong", [-1, -(2**40)])
def test_a_limit_is_not_negative(wrong):
    with pytest.raises(ValueError, match="pool_limit"):
        pool_limit(wrong)
    with pytest.raises(TypeError):
        pool_limit("many")


def test_one_large_inline_message_does_not_stay_with_the_encoder():
    encoder = Encoder(threshold=2**62)
    for _ in range(3):
        encoder.encode(np.ones(4 * MIB))  # a main frame of 32 MiB
        with pytest.raises(TypeError):
            encoder.encode([np.ones(4 * MIB), object()])
    pool_limit(0)
    from support.memory import PeakOverStart, resident_nbytes

    before = resident_nbytes()
    del encoder
    gc.collect()
    assert before - resident_nbytes() < 8 * MIB
    del PeakOverStart
