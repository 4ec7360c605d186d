"""``ProcessorPool(dtype=...)``: floating features are in the engine's type when they leave the worker."""

from __future__ import annotations

import numpy as np
import pytest

import fastmm
from fastmm import FastmmError, WireTensor
from fastmm.processors import Processed, ProcessedItem, ProcessorPool, Work, to_request
from fastmm.processors.casting import cast_result, wire_dtype

torch = pytest.importorskip("torch")
LONG = 120.0


class Floats:
    schema = None

    def process(self, work, tokenizer):
        values = torch.arange(200_000, dtype=torch.float32).reshape(200, 1000) / 7
        item = ProcessedItem(modality="image", features={"pixel_values": values}, hash="ab", spans=[(1, 1)])
        return Processed(prompt_token_ids=[0, 7], items=[item])


def result(features, model_data=None) -> Processed:
    item = ProcessedItem(modality="image", features=features, hash="", spans=[(0, 0)], model_data=model_data or {})
    return Processed(prompt_token_ids=[0], items=[item, item])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_floating_tensor_ends_in_the_type_and_rounds_as_the_encoder_does(dtype):
    values = torch.randn(50, 7, dtype=torch.float64).to(dtype)
    before = values.clone()
    cast = cast_result(result({"a": values, "b": [values, values[:3]]}, {"c": values}), "bfloat16").items[0]
    expected = values.to(torch.float32).to(torch.bfloat16)
    for found in (cast.features["a"], cast.features["b"][0], cast.model_data["c"]):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
    assert torch.equal(values, before)  # nothing is written to


def test_other_tensors_and_numbers_stay_the_very_same():
    features = {"a": torch.arange(3), "b": np.array([True]), "c": np.arange(3, dtype=np.uint8)}
    model_data = {"n": 3, "x": 0.5, "l": [1, [2.5]], "s": np.array(["a"])}
    cast = cast_result(result(features, model_data), "bfloat16").items[0]
    assert all(cast.features[key] is value for key, value in features.items())
    assert cast.model_data == model_data


def test_numpy_and_wire_tensors_are_cast_too():
    cast = cast_result(result({"a": np.ones(3), "b": WireTensor("<f4", (2,), np.float32([1, 2]))}), "float16").items[0]
    assert cast.features["a"].dtype == np.float16
    assert cast.features["b"].dtype == "float16"


def test_a_tensor_that_is_there_twice_is_cast_once():
    values = torch.ones(10)
    cast = cast_result(result({"a": values}), "bfloat16")
    assert cast.items[0].features["a"] is cast.items[1].features["a"]


def test_what_is_no_result_of_ours_stays():
    other = object()
    assert cast_result(other, "bfloat16") is other


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bfloat16", "bfloat16"),
        (torch.bfloat16, "bfloat16"),
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        (None, None),
    ],
)
def test_types_are_taken_in_every_spelling(dtype, name):
    assert wire_dtype(dtype) == name


@pytest.mark.parametrize("dtype", ["int8", "bf16", 3, torch.float64])
def test_other_types_are_an_error_at_once(dtype):
    with pytest.raises(FastmmError, match="bfloat16"):
        ProcessorPool(Floats(), dtype=dtype)


@pytest.mark.parametrize("executor", [None, "processes"])
def test_an_encoder_has_nothing_to_cast_and_copies_nothing(executor):
    """From a process, too: memory that is mapped from a segment is never cast in place."""
    work = Work(request_id="a", images=[np.zeros((4, 4, 3), np.uint8)])
    with ProcessorPool(Floats, executor=executor, workers=1, dtype="bfloat16") as pool:
        processed = pool.submit(work).result(LONG)
    values = processed.items[0].features["pixel_values"]
    frames = fastmm.encode_request(to_request(processed, "a", fastmm.SamplingParams()), dtype="bfloat16")
    (frame,) = frames[1:]
    assert frame.address == values.data_ptr()
    expected = Floats().process(work, None).items[0].features["pixel_values"].to(torch.bfloat16)
    assert torch.equal(values, expected)
