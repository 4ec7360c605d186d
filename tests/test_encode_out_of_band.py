"""Out-of-band tensors: what a consumer is offered, what it may answer, and what it may not break."""

from __future__ import annotations

import collections

import msgpack
import numpy as np
import pytest
from support.crashes import CRASHES
from support.memory import in_fresh_process
from support.requests import request, resolve, same_bytes, unpacked

from fastmm import EncodeError, Encoder, FastmmError, SchemaError

torch = pytest.importorskip("torch")


class Thing:
    """Unknown to the wire."""


class Consumer:
    def __init__(self, answer=None):
        self.answer, self.seen, self.messages = answer, [], 0

    def new_message(self):
        self.messages += 1

    def __call__(self, tensor):
        self.seen.append(tensor)
        return self.answer(len(self.seen)) if callable(self.answer) else self.answer


def test_a_consumer_is_offered_every_tensor_that_would_get_a_frame_and_no_array():
    large, small, array = torch.arange(1000.0), torch.ones(3), np.ones(1000)
    consumer = Consumer(lambda n: {"n": n})
    encoder = Encoder(oob_tensor_consumer=consumer)
    frames = encoder.encode(request(large, small, array, [large, torch.ones(100, 100).t()]))
    assert [id(t) for t in consumer.seen[:2]] == [id(large)] * 2
    assert consumer.seen[2].shape == (100, 100)
    leaves = [item["data"]["pixel_values"]["data"] for item in unpacked(frames)[2]]
    assert leaves[0] == ["float32", [1000], {"n": 1}]
    assert leaves[1][2] == msgpack.ExtType(3, small.numpy().tobytes())
    assert leaves[2] == ["float64", [1000], 1]
    assert leaves[3] == [["float32", [1000], {"n": 2}], ["float32", [100, 100], {"n": 3}]]
    assert len(frames) == 2
    encoder.encode([1])
    assert consumer.messages == 2


def test_a_consumer_that_says_none_leaves_the_tensor_to_its_frame():
    consumer = Consumer(None)
    leaves = [torch.arange(1000.0), torch.ones(100, 100).t()]
    frames = Encoder(oob_tensor_consumer=consumer).encode(request(*leaves))
    assert same_bytes(frames) == same_bytes(Encoder().encode(request(*leaves)))
    assert len(consumer.seen) == 2


@pytest.mark.parametrize("answer", [5, "x", [1], (), True, b"", collections.UserDict(a=1), 0])
def test_a_consumer_must_answer_with_a_dict_or_none(answer):
    with pytest.raises(SchemaError, match="consumer") as info:
        Encoder(oob_tensor_consumer=Consumer(answer)).encode(request(torch.ones(1000)))
    assert info.value.path == "$.mm_features[0].data['pixel_values'].data"


def test_the_dict_of_a_consumer_is_written_by_the_same_rules():
    answer = {"sender": "s", "id": 2**40, "nested": {"a": [1, None, b"x"]}}
    frames = Encoder(oob_tensor_consumer=Consumer(answer)).encode([torch.ones(1000)])
    assert unpacked(frames)[0][2] == answer
    with pytest.raises(SchemaError, match="Thing"):
        Encoder(oob_tensor_consumer=Consumer({"a": Thing()})).encode([torch.ones(1000)])


def test_a_consumer_that_raises_is_one_error_with_its_path():
    def fail(_):
        raise OSError("no room in the ring")

    encoder = Encoder(oob_tensor_consumer=Consumer(fail))
    with pytest.raises(EncodeError, match="OSError") as info:
        encoder.encode({"a": torch.ones(1000)})
    assert info.value.path == "$['a']"
    assert isinstance(info.value.__cause__, OSError)
    assert encoder.encode([1]) == [b"\x91\x01"]

    class Broken(Consumer):
        def new_message(self):
            raise OSError

    broken = Encoder(oob_tensor_consumer=Broken())
    for _ in range(3):
        with pytest.raises(EncodeError, match="new_message"):
            broken.encode([1])


def test_with_a_dtype_the_consumer_gets_the_cast_tensor_and_the_callers_is_untouched():
    tensor = torch.arange(1000.0)
    consumer = Consumer(lambda n: {"n": n})
    frames = Encoder(oob_tensor_consumer=consumer, dtype="bfloat16").encode(request(tensor))
    assert unpacked(frames)[2][0]["data"]["pixel_values"]["data"] == ["bfloat16", [1000], {"n": 1}]
    assert consumer.seen[0].dtype == torch.bfloat16
    assert torch.equal(consumer.seen[0], torch.arange(1000.0).to(torch.bfloat16))
    assert torch.equal(tensor, torch.arange(1000.0))


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_consumer_that_changes_the_tensors_size_is_an_error_or_a_whole_message(size):
    class Resizing(Consumer):
        def __call__(self, tensor):
            tensor.resize_(size)

    try:
        frames = Encoder(oob_tensor_consumer=Resizing()).encode([torch.ones(1000)])
    except FastmmError:
        return
    _, shape, data = resolve(unpacked(frames)[0], frames)
    assert shape[0] * 4 == len(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "data", torch.ones(1000, dtype=torch.int32)),
        lambda t: setattr(t, "data", torch.ones(500, dtype=torch.float64)),
        lambda t: setattr(t, "data", torch.ones(10, 100)),
        lambda t: t.resize_(10, 100),
        lambda t: t.t_() if t.dim() == 2 else t.unsqueeze_(0),
    ],
)
def test_a_consumer_that_changes_the_tensors_kind_is_an_error_or_a_message_that_says_so(change):
    class Changing(Consumer):
        def __call__(self, tensor):
            change(tensor)

    tensor = torch.arange(1000.0)
    try:
        frames = Encoder(oob_tensor_consumer=Changing()).encode([tensor])
    except FastmmError:
        return
    name, shape, data = resolve(unpacked(frames)[0], frames)
    assert (name, shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    assert data == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_consumer_that_takes_the_tree_apart_ends_in_no_crash():
    in_fresh_process(
        CRASHES
        + """
import torch
class Consumer:
    def new_message(self): pass
    def __call__(self, tensor):
        d.clear(); tensor.set_(); del tensor; churn()
        return None
for dtype in (None, "bfloat16"):
    d = [torch.ones(100000), nest(), torch.ones(1000)]
    try: Encoder(oob_tensor_consumer=Consumer(), dtype=dtype).encode(d)
    except fastmm.FastmmError: pass
    d = [fastmm.MmFieldElem(data=torch.ones(100000), field=fastmm.MmBatchedField())]
    try: Encoder(oob_tensor_consumer=Consumer(), dtype=dtype).encode(d)
    except fastmm.FastmmError: pass
"""
    )
