"""validate_processed: what cannot reach the scheduler, each refused with its item and field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.processed import F32, WORK, check, first, good, item, refused, result

from fastmm.errors import ProcessorError, SchemaError
from fastmm.processors import Field, Processed, Work
from fastmm.schema import PlaceholderRange, WireTensor


def test_a_good_result_passes():
    check(result())
    check(result(tuple(good()), ids=tuple(range(12))))
    check(Processed(prompt_token_ids=[1]), Work(request_id="r"))


@pytest.mark.parametrize("what", [None, {}, [], (1, 2), "x", lambda: None])
def test_what_is_no_result_is_refused(what):
    refused(what, "processed")


# --- the prompt's ids -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint8)])
def test_ids_come_as_a_list_a_tuple_or_a_tensor(kind):
    check(result(ids=kind(list(range(12)))))


def test_ids_come_as_a_torch_tensor():
    torch = pytest.importorskip("torch")
    check(result(ids=torch.arange(12)))
    refused(result(ids=torch.arange(12).float()), "prompt_token_ids")
    refused(result(ids=torch.arange(12) - 1), "prompt_token_ids[0]")


@pytest.mark.parametrize("bad", [True, 1.0, "1", None, np.float32(1), np.bool_(1), [1]])
def test_an_id_that_is_no_int_is_named(bad):
    refused(result(ids=[0, 1, bad, *range(9)]), "prompt_token_ids[2]", "expected an int")


@pytest.mark.parametrize("bad", [-1, 1 << 31, 1 << 63, 1 << 64, -(1 << 70), pytest.param(10**5000, id="huge")])
def test_an_id_outside_int32_is_named(bad):
    refused(result(ids=[0, 1, bad, *range(9)]), "prompt_token_ids[2]", "2^31 - 1")


def test_the_largest_id_passes():
    check(result(ids=[(1 << 31) - 1, *range(11), np.int64(5)]))


@pytest.mark.parametrize(
    "bad", [[], (), np.zeros(0, np.int64), None, "abc", b"abc", 3, {1: 2}, np.zeros((2, 2), np.int64), np.zeros(12, np.float32)]
)
def test_no_ids_and_what_are_no_ids_are_refused(bad):
    refused(Processed(prompt_token_ids=bad, items=good()), "prompt_token_ids")


# --- the number and modality of items ---------------------------------------------------------------------------------


def test_too_few_items_are_refused_with_both_numbers():
    refused(result(good()[:2]), "items", "3 media of the request, got 2")


def test_too_many_items_are_refused_with_both_numbers():
    refused(result([*good(), item(at=10)]), "items", "expected 3 items, as many as there are media, got 4")
    refused(Processed(prompt_token_ids=[1, 2], items=[item()]), "items", work=Work(request_id="r"))


@pytest.mark.parametrize("modality", ["video", "audio", "Image", "point_cloud"])
def test_an_items_modality_is_that_of_its_media(modality):
    refused(result([item(), item(modality, at=4), good()[2]]), "items[1].modality", "expected 'image'")


@pytest.mark.parametrize("modality", ["", None, 3, b"image"])
def test_a_modality_is_a_name(modality):
    refused(first(modality=modality), "items[0].modality")


def test_extensions_may_make_more_items():
    more = result([*good(), item("point_cloud", at=10)])
    check(more, replace(WORK, extensions={"multimodal_points": {}}))
    refused(more, "items", work=replace(WORK, extensions={"multimodal_points": [None], "multimodal_x": None}))
    refused(more, "items", work=replace(WORK, extensions={}))


@pytest.mark.parametrize("items", [None, "ab", {}, 3])
def test_items_are_a_list_of_items(items):
    refused(Processed(prompt_token_ids=[1], items=items), "items")


def test_an_item_of_another_type_is_named():
    refused(result([good()[0], {"modality": "image"}, good()[2]]), "items[1]", "ProcessedItem, got a dict")


@pytest.mark.parametrize("bad", ["", None, 3, b"h"])
def test_a_hash_is_a_string(bad):
    refused(first(hash=bad), "items[0].hash")


# --- features ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16", "float64", "uint8", "bool", "int32", "<f4", "complex64"])
def test_types_that_the_wire_knows_pass(dtype):
    check(first(features={"x": np.zeros((2, 3), dtype)}))


def test_raw_words_that_do_not_say_what_they_are_are_refused():
    words = np.zeros(6, np.uint16)
    refused(first(features={"x": words}), "items[0].features['x']", 'WireTensor("bfloat16"')
    refused(first(model_data={"n": [words]}), "items[0].model_data['n'][0]", 'WireTensor("bfloat16"')
    check(first(features={"x": WireTensor("uint16", (6,), words)}))  # numbers, and it says so
    torch = pytest.importorskip("torch")
    refused(first(features={"x": torch.from_numpy(words)}), "items[0].features['x']")


@pytest.mark.parametrize(
    "value", [np.zeros(3, ">f4"), np.zeros(3, ">i8"), WireTensor(">f4", (3,), bytes(12)), WireTensor(">u2", (3,), bytes(6))]
)
def test_numbers_of_another_byte_order_are_refused(value):
    refused(first(features={"x": value}), "items[0].features['x']", "byte order")
    refused(first(model_data={"n": [value]}), "items[0].model_data['n'][0]", "byte order")


def test_items_that_the_engine_concatenates_must_fit():
    fields = {"x": Field("flat")}

    def pair(one: Any, other: Any, how: Any = fields) -> Processed:
        return result([item(features={"x": one}, fields=how), item(at=4, features={"x": other}, fields=how), good()[2]])

    check(pair(np.zeros((2, 3)), np.zeros((5, 3))))
    check(pair(np.zeros((2, 3), "<f4"), WireTensor("float32", (1, 3), bytes(12))))
    for other in (np.zeros((2, 4)), np.zeros((2, 3, 1)), np.zeros((2, 3), np.float32)):
        refused(pair(np.zeros((2, 3)), other), "items[1].features['x']", "items[0]")
    last = {"x": Field("flat", dim=-1)}
    check(pair(np.zeros((2, 3)), np.zeros((2, 9)), last))
    refused(pair(np.zeros((2, 3)), np.zeros(3), last), "items[1].features['x']")
    shared = {"x": Field("shared")}
    check(pair(np.zeros(3), np.zeros(3), shared))
    refused(pair(np.zeros(3), np.ones(3), shared), "items[1].features['x']", "shared")


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb"])
def test_names_that_no_wire_carries_are_refused(name):
    refused(first(hash=name), "items[0].hash")
    refused(first(modality=name), "items[0].modality")
    refused(first(features={name: F32}), "items[0].features")
    refused(first(model_data={name: 1}), "items[0].model_data")
    with pytest.raises(SchemaError):
        Work(request_id=name)


def test_numbers_wider_than_the_wire_are_refused():
    refused(first(model_data={"n": np.longdouble(1)}), "items[0].model_data['n']")
    refused(first(features={"x": np.zeros(2, np.longdouble)}), "items[0].features['x']")


def test_ids_in_a_tensor_without_numbers_are_refused():
    torch = pytest.importorskip("torch")
    for bad in (
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.int64, device="meta"),
        torch.zeros(3).to_sparse(),
    ):
        refused(result(ids=bad), "prompt_token_ids")


def test_raw_words_marked_as_bfloat16_pass():
    words = np.zeros(6, np.uint16)
    check(first(features={"x": WireTensor("bfloat16", (2, 3), words)}))
    torch = pytest.importorskip("torch")
    check(first(features={"x": torch.zeros(2, 3, dtype=torch.bfloat16)}))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    check(first(features={"x": np.zeros((2, 3), ml_dtypes.bfloat16)}))


@pytest.mark.parametrize(
    "bad",
    [
        np.array([object()]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, [("a", "i4")]),
        np.array(["a"]),
        np.array([b"a"]),
        None,
        "text",
        b"bytes",
        {"a": F32},
        {1, 2},
        object(),
        3,
        1.5,
        True,
        np.float32(3),
    ],
)
def test_what_is_no_tensor_of_the_wire_is_refused_by_item_and_field(bad):
    refused(first(features={"fine": F32, "x": bad}), "items[0].features['x']")


def test_torch_tensors_that_cannot_travel_are_refused():
    torch = pytest.importorskip("torch")
    for bad in (
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
    ):
        refused(first(features={"x": bad}), "items[0].features['x']")


class Lying(WireTensor):
    """A WireTensor whose attributes were set after its checks, as another process's might be."""

    def __init__(self, dtype: Any, shape: Any, data: Any) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data


def wire(dtype: Any, shape: Any, data: Any) -> WireTensor:
    tensor = WireTensor("uint8", (1,), b"\0")
    tensor.dtype, tensor.shape, tensor.data = dtype, shape, data
    return tensor


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (2, 3), 23),
        ("float32", (2, 3), 25),
        ("float32", (), 3),
        ("bfloat16", (2, 3), 24),
        ("float32", (0,), 4),
        ("float32", (1 << 31, 1 << 31, 4), 0),
        ("float32", (1 << 32, 1 << 32), 0),
        ("float32", (1 << 62, 4), 0),
        ("float32", (0, 1 << 62, 1 << 62), 0),
        ("uint8", (-1,), 1),
        ("uint8", (-1, -1), 1),
        ("uint8", (True,), 1),
        ("uint8", (1.0,), 1),
        ("uint8", ("1",), 1),
        ("uint8", None, 1),
        ("float33", (1,), 4),
        (None, (1,), 4),
        ("O", (1,), 8),
    ],
)
@pytest.mark.parametrize("make", [wire, Lying])
def test_the_product_of_a_shape_is_the_number_of_elements_without_overflow(dtype, shape, nbytes, make):
    refused(first(features={"x": make(dtype, shape, memoryview(bytes(nbytes)))}), "items[0].features['x']")


def test_lists_of_tensors_are_walked():
    check(first(features={"x": [F32, [F32, 3, 2.5]]}))
    refused(first(features={"x": [F32, [F32, "no"]]}), "items[0].features['x'][1][1]")
    refused(first(features={"x": [[F32], None]}), "items[0].features['x'][1]")


def test_lists_in_lists_end():
    deep: Any = F32
    for _ in range(100_000):
        deep = [deep]
    refused(first(features={"x": deep}), "items[0].features['x']", "64 lists")
    own: list[Any] = []
    own.append(own)
    refused(first(features={"x": own}), "items[0].features['x']", "64 lists")


@pytest.mark.parametrize("bad", [None, [], "x", 3, F32])
def test_features_fields_and_model_data_are_mappings(bad):
    for name in ("features", "fields", "model_data"):
        refused(first(**{name: bad}), f"items[0].{name}")


@pytest.mark.parametrize("key", [1, None, "", b"x", ("a",)])
def test_keys_are_names(key):
    refused(first(features={key: F32}), "items[0].features")
    refused(first(model_data={key: 1}), "items[0].model_data")


def test_an_item_without_any_feature_is_refused():
    refused(first(features={}), "items[0].features")
    check(first(features={}, model_data={"n": 3}))


@pytest.mark.parametrize(
    "good_value", [1, -5, 2.5, True, [1, [2.5, False]], F32, [F32], np.int64(3), np.float32(1), (1 << 63) - 1, -(1 << 63)]
)
def test_model_data_are_numbers_tensors_and_lists_of_them(good_value):
    check(first(model_data={"n": good_value}))


@pytest.mark.parametrize(
    "bad",
    [
        "text",
        None,
        {"a": 1},
        b"x",
        object(),
        1 << 63,
        -(1 << 63) - 1,
        [1, "x"],
        [[None]],
        np.array(["a"]),
        np.datetime64(1, "s"),
        1j,
    ],
)
def test_model_data_of_other_types_are_refused_by_item_and_field(bad):
    path = {"[1, 'x']": "[1]", "[[None]]": "[0][0]"}.get(repr(bad), "")
    refused(first(model_data={"n": bad}), f"items[0].model_data['n']{path}")


def test_a_key_is_a_feature_or_model_data_and_not_both():
    refused(first(model_data={"x": 1}), "items[0].model_data['x']")


def test_fields_are_of_keys_that_are_there_and_a_flat_one_has_its_axis():
    check(first(fields={"x": Field("flat", dim=1)}))
    check(first(fields={"x": Field("flat", dim=-2)}))
    refused(first(fields={"y": Field()}), "items[0].fields['y']", "'x'")
    refused(first(fields={"x": "flat"}), "items[0].fields['x']")
    for dim in (2, -3, 1.0, True, None):
        refused(first(fields={"x": Field("flat", dim=dim)}), "items[0].fields['x']")
    refused(first(features={"x": [F32]}, fields={"x": Field("flat")}), "items[0].fields['x']")
    refused(first(features={"x": np.zeros((), np.float32)}, fields={"x": Field("flat")}), "items[0].fields['x']")


# --- spans and placeholders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [[(0, 0)], [(0, 1), (3, 3)], ((0, 3),), [[0, 1], [2, 3]], [(np.int64(0), np.int32(1))]])
def test_spans_in_order_pass_and_both_ends_count(spans):
    check(first(spans=spans))


def test_a_span_may_end_with_the_prompt_and_not_after_it():
    ends = good()[2]
    check(result([*good()[:2], replace(ends, spans=[(11, 11)])]))
    refused(result([*good()[:2], replace(ends, spans=[(11, 12)])]), "items[2].spans", "inside the 12 ids")
    refused(result([*good()[:2], replace(ends, spans=[(12, 12)])]), "items[2].spans")
    refused(result([*good()[:2], replace(ends, spans=[(8, 10**5000)])]), "items[2].spans")


@pytest.mark.parametrize(
    ("spans", "where"),
    [
        ([], ""),
        ("ab", ""),
        ({(0, 1)}, ""),
        ([(1, 0)], "[0]"),
        ([(0, 1), (3, 2)], "[1]"),
        ([(0, 1), (1, 2)], "[1]"),
        ([(2, 3), (0, 1)], "[1]"),
        ([(0, 1), (0, 1)], "[1]"),
        ([(-1, 1)], "[0]"),
        ([(0, 1, 2)], "[0]"),
        ([(0,)], "[0]"),
        ([0, 1], "[0]"),
        ([(0, 1.0)], "[0]"),
        ([(0, True)], "[0]"),
        ([("0", "1")], "[0]"),
        ([None], "[0]"),
    ],
)
def test_empty_unordered_overlapping_and_other_spans_are_refused(spans, where):
    refused(first(spans=spans), f"items[0].spans{where}")


@pytest.mark.parametrize("placeholder", [(0, 2), [0, 4], PlaceholderRange(0, 3), (np.int64(0), np.int64(1))])
def test_a_placeholder_says_the_same(placeholder):
    check(first(spans=None, placeholder=placeholder))


@pytest.mark.parametrize(
    "bad",
    [(0, 0), (0, -1), (-1, 2), (0,), (0, 1, 2), 3, "ab", (0.0, 2), (0, True), PlaceholderRange(0, 0), PlaceholderRange(-1, 2)],
)
def test_an_empty_or_another_placeholder_is_refused(bad):
    refused(first(spans=None, placeholder=bad), "items[0].placeholder")


def test_a_placeholder_past_the_prompt_is_refused():
    refused(result([*good()[:2], replace(good()[2], spans=None, placeholder=(11, 2))]), "items[2].placeholder")


@pytest.mark.parametrize("mask", [np.array([True, False]), WireTensor("bool", (2,), b"\1\0"), WireTensor("|b1", (2,), b"\0\1")])
def test_a_mask_says_which_positions_take_an_embedding(mask):
    check(first(spans=None, placeholder=PlaceholderRange(0, 2, mask)))


@pytest.mark.parametrize(
    "mask",
    [
        np.array([True]),
        np.array([[True, False]]),
        np.array([1, 0]),
        np.array([1, 0], np.uint8),
        np.array([False, False]),
        [True, False],
        b"\1\0",
        "no",
        WireTensor("uint8", (2,), b"\1\0"),
        WireTensor("bool", (2,), b"\0\0"),
    ],
)
def test_another_mask_is_refused(mask):
    refused(first(spans=None, placeholder=PlaceholderRange(0, 2, mask)), "items[0].placeholder.is_embed")


def test_masks_of_torch_are_looked_at_too():
    torch = pytest.importorskip("torch")
    check(first(spans=None, placeholder=PlaceholderRange(0, 2, torch.tensor([False, True]))))
    for mask in (torch.tensor([False, False]), torch.tensor([1, 0]), torch.tensor([True])):
        refused(first(spans=None, placeholder=PlaceholderRange(0, 2, mask)), "items[0].placeholder.is_embed")


def test_either_spans_or_a_placeholder():
    refused(first(spans=None), "items[0]", "neither")
    refused(first(placeholder=(0, 1)), "items[0]", "both")


@pytest.mark.parametrize("spans", [[(4, 4)], [(5, 6)], [(3, 4)], [(0, 1), (5, 5)], [(0, 9)]])
def test_items_do_not_overlap_each_other(spans):
    with pytest.raises(ProcessorError, match="overlap|after items"):
        check(first(spans=spans))


def test_items_of_a_modality_are_in_the_prompts_order():
    refused(result([item(at=4), item(at=0), good()[2]]), "items[1].spans", "after items[0]")


def test_items_of_different_modalities_may_be_in_any_order():
    check(result([item(at=4), item(at=6), item("audio", at=0)]))
