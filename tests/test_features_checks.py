"""Nothing wrong gets through build_features: each fault is one FastmmError that says where, what was expected, what came."""

from __future__ import annotations

import numpy as np
import pytest
from support.items import EMBED, KINDS, OTHER, arguments, prompt_of, qwen, tensor, torch_or_skip

from fastmm import FastmmError, FlatSizes, LimitError, PlaceholderRange, SchemaError, WireTensor, build_features
from fastmm.errors import SchemaValueError

MAX = 2**63 - 1


def fault(given, *words, kind=SchemaError):
    """The error of a call; it holds each of the words and no content."""
    with pytest.raises(FastmmError) as caught:
        build_features(**given)
    assert isinstance(caught.value, kind), type(caught.value)
    text = str(caught.value)
    for word in words:
        assert str(word) in text, (word, text)
    assert "expected" in text
    assert "got" in text
    assert str(EMBED) not in text
    return caught.value


# --- sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[MAX, MAX, 2], [MAX, 1, 2], [-1, 4, 3], [2, 3, 0], [2, 3, 2], [0, 0, 0], [6, -6, 6]])
def test_sizes_that_do_not_add_up_are_an_error_that_names_the_sizes_tensor(kind, sizes):
    given = qwen(kind, [2, 3, 1])
    given["tensors"]["patches_per_image"] = tensor(kind, np.array(sizes, np.int64))
    error = fault(given, "patches_per_image", "pixel_values", kind=SchemaValueError)
    if min(sizes) < 0:
        assert f"item {sizes.index(min(sizes))}" in str(error)
    else:
        assert "6" in str(error)  # expected
        assert str(sum(sizes)) in str(error)  # got


@pytest.mark.parametrize("sizes", [[2**64 - 1, 2**64 - 1, 8], [2**63, 2**63, 6], [2**64 - 2, 2, 6]])
def test_unsigned_sizes_beyond_63_bits_do_not_wrap(sizes):
    given = qwen("numpy", [2, 3, 1])
    given["tensors"]["patches_per_image"] = np.array(sizes, np.uint64)
    fault(given, "patches_per_image", str(sum(sizes)), kind=SchemaValueError)


def test_sizes_given_as_numbers_are_checked_as_well():
    for sizes in ([MAX, MAX, 2], [-1, 4, 3], [2, 3], [1, 2, 3, 0], [2**80, 3, 1]):
        fault(qwen("numpy", [2, 3, 1], flat={"pixel_values": sizes}), "flat['pixel_values']", kind=SchemaValueError)


def test_numbers_too_long_to_be_written_out_are_an_error_too():
    long = 10**5000
    fault(qwen("numpy", [1, 1], flat={"pixel_values": [long, 1]}), "'pixel_values'", "bits")
    fault(qwen("numpy", [1, 1], flat={"pixel_values": [-long, 1]}), "item 0", "bits")
    fault(qwen("numpy", [1, 1], flat={"pixel_values": FlatSizes([1, 1], long)}), "dim", "bits")
    fault(qwen("numpy", [1, 1], cached={long}), "cached", "bits")
    fault(qwen("numpy", [1, 1], max_payload_nbytes=-long), "max_payload_nbytes", "bits")
    fault(qwen("numpy", [1, 1], placeholders=[(0, 1), (long, 1)]), "[1]", "bits")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.float64])
def test_sizes_of_floats_or_bools_are_an_error(kind, dtype):
    given = qwen(kind, [1, 1, 1])
    given["tensors"]["patches_per_image"] = tensor(kind, np.ones(3, dtype))
    fault(given, "patches_per_image", "integers", np.dtype(dtype).name)


@pytest.mark.parametrize("sizes", [[1.0, 1, 1], [True, 1, 1], ["1", 1, 1], [None, 1, 1]])
def test_a_size_that_is_no_whole_number_is_an_error(sizes):
    fault(
        qwen("numpy", [1, 1, 1], flat={"pixel_values": sizes}),
        "item 0",
        "None" if sizes[0] is None else type(sizes[0]).__name__,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (3, 1), (1, 3), (2,), (4,), (0,)])
def test_sizes_have_one_entry_per_item(kind, shape):
    given = qwen(kind, [1, 1, 1])
    given["tensors"]["patches_per_image"] = tensor(kind, np.ones(shape, np.int64))
    fault(given, "patches_per_image", "3" if len(shape) == 1 else "1-D")


@pytest.mark.parametrize("sizes", ["absent", None, 3, {}, object(), np.array(["1"]), np.zeros(3, object)])
def test_sizes_that_are_no_sizes_are_an_error(sizes):
    fault(qwen("numpy", [1, 1, 1], flat={"pixel_values": sizes}), "pixel_values")


@pytest.mark.parametrize("dim", [2, -3, 1.0, True, None, "0"])
def test_a_dim_that_is_not_there_is_an_error(dim):
    fault(qwen("numpy", [1, 1, 1], flat={"pixel_values": FlatSizes("patches_per_image", dim)}), "pixel_values", "dim")


def test_a_list_is_cut_along_its_length_only():
    tensors = {"x": [np.zeros(2)] * 3}
    fault(arguments(tensors=tensors, flat={"x": FlatSizes([1, 1, 1], 1)}), "'x'", "dim")
    fault(arguments(tensors=tensors, flat={"x": [1, 1, 2]}), "'x'", "4", kind=SchemaValueError)


# --- batches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 2, 4])
def test_a_batched_tensor_has_a_row_per_item(kind, rows):
    fault(arguments(tensors={"x": tensor(kind, np.zeros((rows, 2)))}, batched={"x"}), "'x'", "3 items", rows)
    fault(arguments(tensors={"x": [tensor(kind, np.zeros(2))] * rows}, batched={"x"}), "'x'", "3 items", rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_axes_cannot_be_cut(kind):
    scalar = tensor(kind, np.array(1.0))
    fault(arguments(tensors={"x": scalar}, batched={"x"}), "'x'", "()")
    fault(arguments(tensors={"x": scalar}, flat={"x": [1, 0, 0]}), "'x'")
    fault(arguments(tensors={"x": 3}, batched={"x"}), "'x'", "int")
    fault(arguments(tensors={"x": 3}, flat={"x": [1, 0, 0]}), "'x'", "int")


@pytest.mark.parametrize(
    "value", [None, "text", b"bytes", {}, object(), np.zeros(3, object), np.zeros(3, "M8[s]"), np.zeros(3, "V4")]
)
def test_what_is_no_tensor_is_an_error_that_names_the_key(value):
    for given, path in ((value, "tensors['x']"), ([1, [2, value]], "tensors['x'][1][1]")):
        error = fault(arguments(tensors={"x": given, "y": np.zeros(3)}, batched={"y"}))
        assert error.path == path


def test_lists_nested_too_deep_are_a_limit():
    value = []
    for _ in range(500):
        value = [value]
    fault(arguments(tensors={"x": value}), "'x'", "nested", kind=LimitError)
    value.append(value)
    fault(arguments(tensors={"x": value}), "'x'", "nested", kind=LimitError)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what is new and what is old
def test_tensors_that_cannot_travel_are_an_error():
    torch = torch_or_skip()
    dense = torch.zeros(3, 2)
    for value in (
        dense.to_sparse(),
        torch.zeros(3, 2, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8),
        torch._neg_view(dense),
        torch.conj(torch.zeros(3, 2, dtype=torch.complex64)),
    ):
        fault(arguments(tensors={"x": value}, batched={"x"}), "'x'")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": memoryview(bytes(5))}, ("6", "5")),
        ({"shape": (2**40, 2**40)}, ("63 bits",)),
        ({"shape": (-1,)}, ("-1",)),
        ({"shape": (2**63,)}, (">= 0",)),
        ({"dtype": "float99"}, ("float99",)),
        ({"dtype": "|O8"}, ("O8",)),
    ],
)
def test_a_wire_tensor_that_was_changed_after_its_checks_is_checked_again(change, words):
    batch = WireTensor("float16", (3,), bytes(6))
    for name, value in change.items():
        setattr(batch, name, value)
    fault(arguments(tensors={"x": batch}, batched={"x"}), "'x'", *words)


def test_a_wire_tensor_may_hold_any_buffer_of_the_right_size():
    batch = WireTensor("float32", (3, 2), bytes(24))
    batch.data = memoryview(np.arange(6, dtype=np.float32).reshape(2, 3))
    features = build_features(**arguments(tensors={"x": batch}, batched={"x"}))
    assert [feature.data["x"].data.numpy().tolist() for feature in features] == [[0, 1], [2, 3], [4, 5]]


# --- keys ---------------------------------------------------------------------------------------------------------------


def test_a_key_without_a_tensor_is_an_error():
    fault(qwen("numpy", [1, 1], batched={"image_grid_thw", "absent"}), "batched", "'absent'", "'image_grid_thw'")
    fault(qwen("numpy", [1, 1], keep_on_cpu={"absent"}), "keep_on_cpu", "'absent'")
    fault(qwen("numpy", [1, 1], flat={"absent": [1, 1]}), "flat", "'absent'")
    fault(qwen("numpy", [1, 1], flat={"pixel_values": FlatSizes("absent")}), "flat['pixel_values']", "'absent'")
    fault(arguments(cached={0, 1, 2}, batched={"absent"}), "batched", "'absent'")
    fault(arguments(cached={0, 1, 2}, flat={"absent": [1, 1, 1]}), "flat", "'absent'")


def test_keys_that_are_one_after_renaming_are_an_error():
    given = qwen("numpy", [1, 1], modality="video")
    given["tensors"]["pixel_values_videos"] = np.zeros(2)
    fault(given, "'pixel_values'", "'pixel_values_videos'", kind=SchemaValueError)
    fault(qwen("numpy", [1, 1], rename={"pixel_values": "image_grid_thw"}), "'pixel_values'", "'image_grid_thw'")
    fault(qwen("numpy", [1, 1], modality="video", flat={"pixel_values": [1, 1], "pixel_values_videos": [2, 0]}), "flat", "once")


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": [1]}, {"tensors": None}, {"tensors": {1: np.zeros(2)}}, {"batched": "image_grid_thw"}, {"batched": 3},
        {"batched": {1}}, {"keep_on_cpu": None}, {"flat": ["pixel_values"]}, {"flat": {1: [1, 1]}}, {"rename": [1]},
        {"rename": {"pixel_values": 3}}, {"modality": ""}, {"modality": None}, {"cached": 3}, {"cached": "0"},
        {"cached": {0.0}}, {"cached": {True}}, {"cached": np.array(0)}, {"batched": np.array(1)},
        {"max_payload_nbytes": -1}, {"max_payload_nbytes": 1.5}, {"max_payload_nbytes": True},
    ],
)  # fmt: skip
def test_an_argument_of_another_type_is_an_error_that_names_it(change):
    (name,) = change
    assert fault(qwen("numpy", [1, 1], **change)).path.startswith(name)


# --- counts -------------------------------------------------------------------------------------------------------------


def test_tensors_or_hashes_without_placeholders_are_an_error():
    nothing = {"tensors": {}, "placeholders": [], "hashes": [], "prompt_token_ids": [1]}
    fault(nothing | {"tensors": {"x": np.zeros(0)}}, "placeholders", "'x'")
    fault(nothing | {"hashes": ["a"]}, "hashes", "0", "1")
    fault(nothing | {"identifiers": ["a"]}, "identifiers", "0", "1")
    fault(nothing | {"cached": {0}}, "cached", "0")


def test_placeholders_without_tensors_are_an_error():
    fault(arguments(), "tensors", "3 items")
    fault(arguments(cached={0, 2}), "tensors", "1 items")


@pytest.mark.parametrize("name", ["hashes", "identifiers"])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_counts_agree(name, n):
    fault(qwen("numpy", [1, 1], **{name: ["a"] * n}), name, "2", n, kind=SchemaValueError)


@pytest.mark.parametrize("name", ["hashes", "identifiers"])
@pytest.mark.parametrize("value", [None, 3, b"ab", ""])
def test_a_hash_is_a_string_with_something_in_it(name, value):
    assert fault(qwen("numpy", [1, 1], **{name: ["a", value]})).path == f"{name}[1]"


def test_a_list_of_hashes_is_no_string():
    for name in ("hashes", "identifiers", "placeholders"):
        fault(qwen("numpy", [1, 1], **{name: "ab"}), name, "str")
    fault(qwen("numpy", [1, 1], hashes=None), "hashes", "None")


@pytest.mark.parametrize("index", [-1, 2, 2**70])
def test_a_cached_item_is_one_of_the_items(index):
    fault(qwen("numpy", [1, 1], cached={index}), "cached", "2 items", index)


# --- positions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placeholders", "words"),
    [
        ([(0, 2), (5, 0)], ("[1]", "length > 0", "length 0")),
        ([(0, 2), (5, -1)], ("[1]", "-1")),
        ([(-1, 2), (5, 1)], ("[0]", "-1")),
        ([(0, 4), (3, 2)], ("[1]", "overlap", "[0]")),
        ([(3, 2), (0, 4)], ("[0]", "overlap", "[1]")),
        ([(4, 2), (4, 2)], ("[1]", "overlap", "[0]")),
        ([(4, 2), (0, 10)], ("[0]", "overlap", "[1]")),
        ([(0, 1), (12, 2)], ("[1]", "13", "offset 12")),
        ([(0, 1), (13, 1)], ("[1]", "13")),
        ([(0, 1), (MAX, MAX)], ("[1]", "13")),
        ([(0, 1), (1, MAX)], ("[1]", "13")),
        ([(0, 1), (2**64, 1)], ("[1]", "64 bits")),
        ([(0, 1), (1, 2**64)], ("[1]", "64 bits")),
        ([(0, 1), (1.0, 1)], ("[1]", "float")),
        ([(0, 1), (1, True)], ("[1]", "bool")),
        ([(0, 1), (1, 1, 1)], ("[1]", "tuple")),
        ([(0, 1), 5], ("[1]", "int")),
        ([(0, 1), None], ("[1]", "NoneType")),
        ([(0, 1), "ab"], ("[1]", "str")),
        ([(0, 1), PlaceholderRange(2, "3")], ("[1]", "str")),
    ],
)
@pytest.mark.parametrize("embed", [None, EMBED])
def test_a_placeholder_that_does_not_fit_is_an_error_that_names_the_item(placeholders, words, embed):
    given = qwen("numpy", [1, 1], prompt_token_ids=[EMBED] * 13, placeholders=placeholders, embed_token_id=embed)
    fault(given, "placeholders", *words)


def test_bounds_are_checked_without_token_ids_too():
    given = qwen("numpy", [1, 1], prompt_token_ids=None)
    fault(given | {"placeholders": [(0, 1), (MAX, 1)]}, "[1]")
    fault(given | {"placeholders": [(0, 4), (3, 2)]}, "overlap")


def test_a_placeholder_without_the_token_is_an_error():
    ids, places = prompt_of([3, 3])
    ids[places[1][0] : places[1][0] + 3] = [OTHER] * 3
    given = qwen("numpy", [1, 1], prompt_token_ids=ids, placeholders=places, embed_token_id=EMBED)
    fault(given, "placeholders[1]", "embed_token_id", "3", "none", kind=SchemaValueError)


@pytest.mark.parametrize("embed", [1.5, True, "5", [], set(), [None], [-1], 2**63, [True], {"a": 1}])
def test_a_token_to_look_for_is_a_token(embed):
    fault(qwen("numpy", [1, 1], embed_token_id=embed), "embed_token_id")


def test_a_mask_needs_token_ids():
    fault(qwen("numpy", [1, 1], prompt_token_ids=None, embed_token_id=EMBED), "prompt_token_ids", "None")


@pytest.mark.parametrize("ids", [3, "text", b"ids", np.zeros((4, 4), np.int64), np.zeros(40), np.zeros((), np.int64), object()])
def test_token_ids_are_a_row_of_integers(ids):
    assert fault(qwen("numpy", [1, 1], prompt_token_ids=ids)).path == "prompt_token_ids"


@pytest.mark.parametrize("token", [1.5, None, "7", True])
def test_a_token_id_that_is_no_integer_is_an_error(token):
    given = qwen("numpy", [1, 1], embed_token_id=EMBED)
    given["prompt_token_ids"][given["placeholders"][1][0] + 1] = token
    fault(given, "placeholders[1]", type(token).__name__)


@pytest.mark.parametrize(
    "mask", [np.ones(3, bool), np.ones((4, 1), bool), np.ones(4, np.int64), np.zeros(4, bool), "mask", [True] * 4]
)
def test_a_mask_that_came_with_the_placeholder_is_checked(mask):
    given = qwen("numpy", [1, 1])
    given["placeholders"][1] = PlaceholderRange(given["placeholders"][1][0], 4, mask)
    assert fault(given).path == "placeholders[1].is_embed"


def test_a_mask_and_a_token_to_make_one_from_are_an_error():
    given = qwen("numpy", [1, 1], embed_token_id=EMBED)
    given["placeholders"][1] = PlaceholderRange(given["placeholders"][1][0], 4, np.ones(4, bool))
    fault(given, "placeholders[1]", "both")


# --- limits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_bytes_are_a_limit_with_both_numbers(kind):
    given = qwen(kind, [2, 3, 1])
    total = 6 * 6 * 4 + 3 * 3 * 8 + 3 * 8
    assert len(build_features(**given, max_payload_nbytes=total)) == 3
    fault(given | {"max_payload_nbytes": total - 1}, total, total - 1, kind=LimitError)


def test_tensors_in_lists_count():
    given = arguments(tensors={"x": [np.zeros(4), [np.zeros(2)], 3]}, batched={"x"})
    assert len(build_features(**given, max_payload_nbytes=48)) == 3
    fault(given | {"max_payload_nbytes": 47}, 48, 47, kind=LimitError)


def test_the_limit_comes_before_any_work():
    class Untouchable(list):
        def __iter__(self):
            raise AssertionError("the placeholders were read")

    huge = np.broadcast_to(np.float32(1), (1 << 20, 1 << 20))
    fault(arguments(tensors={"x": huge}, placeholders=Untouchable()), 1 << 42, 1 << 30, kind=LimitError)


def test_the_default_limit_is_a_gibibyte_and_none_is_no_limit():
    huge = np.broadcast_to(np.uint8(1), (3, 1 << 30))
    fault(arguments(tensors={"x": huge}, batched={"x"}), 3 << 30, 1 << 30, kind=LimitError)
    assert len(build_features(**arguments(tensors={"x": huge}, batched={"x"}), max_payload_nbytes=None)) == 3


# --- afterwards -----------------------------------------------------------------------------------------------------------


def test_a_failed_call_leaves_the_arguments_as_they_were():
    given = qwen("numpy", [2, 3, 1], modality="video", placeholders=[(0, 4), (4, 4), (6, 1)])
    before = {name: (list(value) if not isinstance(value, str) else value) for name, value in given.items()}
    content = {key: value.copy() for key, value in given["tensors"].items()}
    fault(given, "overlap")
    assert {name: (list(value) if not isinstance(value, str) else value) for name, value in given.items()} == before
    assert all(np.array_equal(value, given["tensors"][key]) for key, value in content.items())


def test_a_good_call_leaves_the_arguments_as_they_were():
    given = qwen("numpy", [2, 3], placeholders=[(5, 4), (0, 4)], hashes=["a", "b"])
    given["prompt_token_ids"] = [OTHER] * 20
    build_features(**given)
    assert given["placeholders"] == [(5, 4), (0, 4)]
    assert given["hashes"] == ["a", "b"]
    assert list(given["tensors"]) == ["pixel_values", "image_grid_thw", "patches_per_image"]


def test_errors_hold_no_payload_and_no_ids():
    secret = 8675309
    given = qwen("numpy", [1, 1], prompt_token_ids=[secret] * 20, placeholders=[(0, 4), (4, 4)], embed_token_id=secret + 1)
    assert str(secret) not in str(fault(given))
    given = arguments(tensors={"x": [np.full(2, secret), f"{secret}"]}, batched={"x"})
    assert str(secret) not in str(fault(given))
