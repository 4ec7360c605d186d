"""Ownership is plain: memory that several leaves lie in is cast once or not at all, and a failure casts nothing."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from support.payloads import assert_untouched, bits, through_float32, values
from support.requests import feature, leaf, request, same_bytes, sent

from fastmm import (
    EncodeError,
    Encoder,
    FastmmError,
    MmBatchedField,
    MmFieldElem,
    SamplingParams,
    cast,
    encode_request,
)

torch = pytest.importorskip("torch")

TARGETS = ["bfloat16", "float16", "float32"]

# --- memory that several leaves lie in ------------------------------------------------------------------------------------


def test_aliases_are_cast_once_and_all_leaves_follow():
    tensor = values()
    encoder = Encoder(dtype="bfloat16")
    leaves = [tensor, tensor, tensor.view(10, 100), tensor.detach(), [tensor.reshape(2, 500)]]
    made = request(*leaves)
    address = tensor.data_ptr()
    frames = encoder.encode(made)
    assert len(frames) == 2
    assert encoder.counters["nbytes_cast"] == 4000
    expected = values().to(torch.bfloat16)
    for index, was in enumerate(leaves):
        now = leaf(made, index)
        now, was = (now[0], was[0]) if isinstance(now, list) else (now, was)
        assert (now.dtype, now.shape, now.data_ptr()) == (torch.bfloat16, was.shape, address)
        assert bits(now) == bits(expected)
    assert same_bytes(encoder.encode(made)) == same_bytes(frames)


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("threshold", [0, 2**62])
def test_aliases_of_every_kind_end_in_the_right_values(dedup, threshold):
    tensor = values()
    shared_elem = MmFieldElem(data=tensor, field=MmBatchedField())
    made = request(tensor, tensor, tensor.numpy(), prompt_embeds=tensor)
    made.mm_features += [made.mm_features[0], feature(tensor)]
    made.mm_features[1].data["again"] = shared_elem
    made.mm_features[2].data["again"] = shared_elem
    frames = encode_request(made, dtype="bfloat16", dedup=dedup, threshold=threshold)
    expected = bits(values().to(torch.bfloat16))
    for index in range(5):
        assert sent(frames, index) == ("bfloat16", (1000,), expected)
    assert sent(frames, 2, "again")[2] == expected
    assert made.prompt_embeds.dtype == leaf(made, 4).dtype == torch.bfloat16
    assert shared_elem.data.dtype == torch.bfloat16
    assert bits(made.prompt_embeds) == bits(leaf(made, 1)) == expected
    assert leaf(made, 2).tobytes() == expected
    if dedup and not threshold:
        assert len(frames) == 2
    again = encode_request(made, dtype="bfloat16", dedup=dedup, threshold=threshold)
    assert same_bytes(again) == same_bytes(frames)


def test_the_views_of_one_batch_are_each_cast_in_place():
    batch = values(4000).reshape(40, 100)
    rows = [batch[:10], batch[10:20], batch[20:40]]
    made = request(*rows)
    encoder = Encoder(dtype="bfloat16")
    frames = encoder.encode(made)
    expected = values(4000).reshape(40, 100).to(torch.bfloat16)
    for index, row in enumerate(rows):
        assert frames[1 + index].address == row.data_ptr() == leaf(made, index).data_ptr()
    assert sent(frames, 2)[2] == bits(expected[20:40])
    assert encoder.counters["nbytes_viewed"] == 8000


OVERLAPS = {
    "halves that overlap": lambda t: [t[:600], t[400:]],
    "whole and part": lambda t: [t, t[100:200]],
    "part and whole": lambda t: [t[100:200], t],
    "a chain": lambda t: [t[:300], t[200:500], t[400:700], t[800:]],
    "one inside another, and a third": lambda t: [t[:900], t[100:200], t[850:]],
    "transposed and plain": lambda t: [t.view(20, 50).t(), t.view(20, 50)],
    "expanded and plain": lambda t: [t[:1].expand(500), t],
    "every second and plain": lambda t: [t[::2], t],
    "interleaved": lambda t: [t[::2], t[1::2]],
    "int view": lambda t: [t.view(torch.int32), t],
    "int view last": lambda t: [t, t.view(torch.int32)],
    "int view of a part": lambda t: [t, t[10:20].view(torch.uint8)],
    "numpy reversed and plain": lambda t: [t.numpy()[::-1], t],
    "other dtype": lambda t: [t, t.view(torch.float64)],
    "bfloat16 already": lambda t: [t, t.view(torch.bfloat16)],
    "small int view": lambda t: [t, t[999:].view(torch.uint8)],
    "a view of the same start": lambda t: [t[:500], t],
}


@pytest.mark.parametrize("threshold", [0, 256, 2**62])
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("name", OVERLAPS)
def test_memory_that_overlaps_another_leafs_is_never_written_to(name, dedup, threshold):
    base = values()
    leaves = OVERLAPS[name](base)
    expected = []
    for view in leaves:
        view = torch.as_tensor(view.copy() if isinstance(view, np.ndarray) else view).clone(
            memory_format=torch.contiguous_format
        )
        expected.append(
            bits(through_float32(view, "bfloat16") if view.is_floating_point() and view.dtype != torch.bfloat16 else view)
        )
    made = request(*leaves)
    frames = encode_request(made, dtype="bfloat16", dedup=dedup, threshold=threshold)
    for index, data in enumerate(expected):
        assert sent(frames, index)[2] == data, index
    alone = {"a chain": [3]}.get(name, [])
    for index, view in enumerate(leaves):
        if index not in alone:
            assert leaf(made, index) is view
    untouched = 800 if name == "a chain" else 1000
    assert_untouched(base[:untouched], values()[:untouched])
    again = encode_request(made, dtype="bfloat16", dedup=dedup, threshold=threshold)
    assert same_bytes(again) == same_bytes(frames)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_empty_leaf_overlaps_nothing(position):
    """`batch[2:2]` lies where `batch[2:]` starts, and is no reason to leave that one alone."""
    batch = values()
    leaves = [batch[:500], batch[500:]]
    leaves.insert(position, [batch[:0], batch[500:500], batch[1000:]][position])
    made = request(*leaves)
    encoder = Encoder(dtype="bfloat16")
    frames = encoder.encode(made)
    for index, was in enumerate(leaves):
        assert leaf(made, index).dtype == torch.bfloat16
        if was.numel():
            assert leaf(made, index).data_ptr() == was.data_ptr()
    assert encoder.counters["nbytes_copied"] == 0
    assert b"".join(bytes(frame) for frame in frames[1:]) == bits(values().to(torch.bfloat16))
    array = values().numpy()
    made = request(array[2:2], array[2:])
    encode_request(made, dtype="float16")
    assert leaf(made, 1).dtype == np.float16


def test_overlap_with_a_tensor_that_is_no_payload():
    tensor = values()
    made = request(tensor)
    made.sampling_params = SamplingParams(extra_args={"a": tensor[500:]})
    frames = encode_request(made, dtype="bfloat16")
    assert_untouched(tensor, values())
    assert bytes(frames[2]) == bits(values()[500:])


def test_a_leaf_in_a_tuple_stays_for_nothing_can_be_put_back():
    tensor = values()
    made = request((tensor, [tensor]), [tensor])
    frames = encode_request(made, dtype="bfloat16")
    assert_untouched(tensor, values())
    assert leaf(made)[0] is tensor
    assert leaf(made, 1)[0] is tensor
    assert bytes(frames[1]) == bits(values().to(torch.bfloat16))
    other = values(seed=5)
    made = request([(values(), other), other])
    encode_request(made, dtype="bfloat16")
    assert_untouched(other, values(seed=5))


def test_a_leaf_that_a_hook_made_is_cast_and_nothing_is_put_anywhere():
    class Lazy:
        def __init__(self):
            self.tensor = values()

    lazy = Lazy()
    made = request(lazy, [lazy])
    frames = Encoder(dtype="bfloat16", hook=lambda value: value.tensor).encode(made)
    assert leaf(made) is lazy
    assert bytes(frames[1]) == bits(values().to(torch.bfloat16))
    assert_untouched(lazy.tensor, values())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_other_classes_of_the_same_name_hold_payloads_too(slots, frozen):
    """vLLM's own elements are dataclasses; a frozen one takes its new leaf all the same."""
    cls = dataclasses.make_dataclass("MultiModalFieldElem", ["data", "field"], slots=slots, frozen=frozen)
    elem = cls(values(), MmBatchedField())
    frames = encode_request([elem], dtype="bfloat16")
    assert elem.data.dtype == torch.bfloat16
    assert bytes(frames[1]) == bits(elem.data) == bits(values().to(torch.bfloat16))


def test_an_attribute_that_cannot_be_set_is_found_out_before_anything_is_cast():
    class MultiModalFieldElem:
        pass

    @dataclasses.dataclass
    class Stubborn(MultiModalFieldElem):
        data: object

        @property
        def data(self):
            return self.__dict__["hidden"]

        @data.setter
        def data(self, value):
            if "hidden" in self.__dict__:
                raise RuntimeError("no")
            self.__dict__["hidden"] = value

    stubborn = Stubborn(values())
    first = values(seed=1)
    made = request(first)
    made.trace_headers = [stubborn]
    try:
        encode_request(made, dtype="bfloat16")
    except FastmmError:
        assert leaf(made) is first
        assert_untouched(first, values(seed=1))
    else:
        assert leaf(made).dtype == torch.bfloat16
    assert_untouched(stubborn.data, values())


# --- all or nothing -------------------------------------------------------------------------------------------------------

BAD = {
    "object": lambda made: setattr(made, "session_id", object()),
    "late leaf": lambda made: made.mm_features.append(feature(np.array([object()]))),
    "fp8": lambda made: made.mm_features.append(feature(torch.ones(10).to(torch.float8_e5m2))),
    "surrogate": lambda made: setattr(made, "external_req_id", "\ud800"),
    "integer": lambda made: setattr(made, "priority", 2**70),
    "sparse": lambda made: setattr(made, "prompt_embeds", torch.ones(3).to_sparse()),
    "slice": lambda made: setattr(made, "kv_hints", [slice(1.5)]),
}


@pytest.mark.parametrize("what", BAD)
def test_a_walk_that_fails_late_leaves_every_tensor_and_the_tree_as_they_were(what):
    first, second = values(), values(seed=1).numpy()
    made = request(first, [second, values(seed=2)], prompt_embeds=values(seed=3))
    BAD[what](made)
    nested = list(leaf(made, 1))
    references = [sys.getrefcount(x) for x in (first, second, *nested)]
    for _ in range(3):
        with pytest.raises(FastmmError):
            encode_request(made, dtype="bfloat16")
    assert leaf(made) is first
    assert leaf(made, 1)[0] is second
    assert leaf(made, 1)[1] is nested[1]
    assert_untouched(first, values())
    assert second.tobytes() == values(seed=1).numpy().tobytes()
    assert [sys.getrefcount(x) for x in (first, second, *nested)] == references


def test_limits_are_found_out_before_anything_is_cast():
    for options in ({"max_frames": 1}, {"max_payload_nbytes": 3000}, {"max_depth": 6}):
        first = values()
        made = request(first, values(seed=1), [[[[values()]]]])
        with pytest.raises(FastmmError):
            encode_request(made, dtype="bfloat16", **options)
        assert leaf(made) is first
        assert_untouched(first, values())


def test_a_payload_that_another_thread_is_casting_is_an_error(monkeypatch):
    """Two threads encode one request; whoever comes second gets a clear error, or the finished cast; never half of it."""
    import threading

    expected = None
    seen = {"error": 0, "fine": 0}
    for _ in range(30):
        tensor = torch.full((2_000_000,), 1.5)
        made = request(tensor)
        outcomes = []
        barrier = threading.Barrier(2)

        def go(made=made, outcomes=outcomes, barrier=barrier):
            barrier.wait()
            try:
                outcomes.append(bytes(encode_request(made, dtype="bfloat16")[1]))
            except EncodeError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=go) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = expected or bits(torch.full((2_000_000,), 1.5, dtype=torch.bfloat16))
        for outcome in outcomes:
            if isinstance(outcome, EncodeError):
                assert "another thread" in str(outcome)
                seen["error"] += 1
            else:
                assert outcome == expected
                seen["fine"] += 1
        assert leaf(made).dtype == torch.bfloat16
        assert bits(leaf(made)) == expected
    assert seen["fine"] >= 30


def test_cast_of_a_leaf_before_the_encoder_sees_it():
    tensor = values()
    made = request(cast(tensor, "bfloat16", inplace=True))
    assert bytes(encode_request(made, dtype="bfloat16")[1]) == bits(values().to(torch.bfloat16))
