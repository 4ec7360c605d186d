"""validate_processed: bytes and finiteness; and that whatever passes becomes a request that travels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processed import F32, check, first, item, refused, result

from fastmm.codec import decode_request, encode_request
from fastmm.errors import LimitError, ProcessorError
from fastmm.processors import Budgets, Field, Processed, Work, to_request
from fastmm.schema import WireTensor

# --- bytes and finiteness ---------------------------------------------------------------------------------------------


def test_exactly_at_the_output_budget_passes_and_one_less_does_not():
    total = 3 * F32.nbytes
    check(result(), budgets=Budgets(max_output_nbytes=total))
    refused(result(), "items[2]", f"{total - 1} bytes", budgets=Budgets(max_output_nbytes=total - 1))
    check(result(), budgets=Budgets(max_output_nbytes=None))


def test_a_view_counts_by_what_it_shows():
    wide = np.broadcast_to(np.float32(1), (1 << 20,))
    refused(first(features={"x": wide}), "items[0]", budgets=Budgets(max_output_nbytes=1 << 20))


BAD = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("at", [0, 70_000, -1])
def test_finiteness_is_an_option(dtype, bad, at):
    array = np.ones(140_000, dtype)
    check(first(features={"x": array}), finite=True)
    array[at] = bad
    check(first(features={"x": array}))
    refused(first(features={"x": array}), "items[0].features['x']", "infinity or a NaN", finite=True)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_finiteness_of_torch_tensors(name, bad):
    torch = pytest.importorskip("torch")
    tensor = torch.ones(70_000, dtype=getattr(torch, name))
    check(first(features={"x": tensor}), finite=True)
    tensor[-1] = bad
    refused(first(features={"x": tensor}), "items[0].features['x']", finite=True)
    words = tensor.view(torch.uint8).numpy()
    refused(first(features={"x": WireTensor(name, (70_000,), words)}), "items[0].features['x']", finite=True)


def test_numbers_so_large_that_their_sum_is_infinite_are_finite():
    largest = np.full(1000, np.finfo(np.float32).max, np.float32)
    check(first(features={"x": largest}), finite=True)
    torch = pytest.importorskip("torch")
    check(first(features={"x": torch.from_numpy(largest)}), finite=True)
    check(first(features={"x": torch.full((1000,), 3e38, dtype=torch.bfloat16)}), finite=True)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    check(first(features={"x": np.full(1000, 3e38, ml_dtypes.bfloat16)}), finite=True)


def test_infinities_of_both_signs_do_not_cancel():
    refused(first(features={"x": np.array([np.inf, -np.inf], np.float32)}), "items[0].features['x']", finite=True)


@pytest.mark.parametrize(
    "value", [np.array([1 << 62]), np.array([True]), np.zeros((0, 3), np.float32), np.array([255], np.uint8)]
)
def test_integers_and_empty_tensors_are_finite(value):
    check(first(features={"x": value}), finite=True)


def test_numbers_of_model_data_are_looked_at_too():
    refused(first(model_data={"n": [1.0, float("nan")]}), "items[0].model_data['n'][1]", finite=True)


@given(st.lists(st.floats(width=32), min_size=1, max_size=9))
def test_finiteness_agrees_with_numpy(numbers):
    array = np.array(numbers, np.float32)
    try:
        check(first(features={"x": array}), finite=True)
        found = True
    except ProcessorError:
        found = False
    assert found == bool(np.isfinite(array).all())


ANY = (
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(-3, 15), max_size=3)
    | st.tuples(st.integers(-2, 14), st.integers(-2, 14))
)


@given(
    ids=st.lists(st.integers(-2, 20) | ANY, max_size=14) | ANY,
    spans=st.lists(ANY, max_size=3) | ANY,
    features=st.dictionaries(ANY.filter(lambda key: not isinstance(key, list)), ANY, max_size=2) | ANY,
    digest=ANY,
)
def test_whatever_an_external_processor_returns_is_passed_or_refused_with_a_path(ids, spans, features, digest):
    work = Work(request_id="r", images=[b"x"])
    try:
        check(Processed(prompt_token_ids=ids, items=[item(spans=spans, features=features, hash=digest)]), work)
    except (ProcessorError, LimitError) as error:
        assert error.path


# --- what passes becomes a request ------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
ARRAYS = st.builds(
    lambda shape, dtype, kind: {
        "plain": lambda: np.ones(shape, dtype),
        "transposed": lambda: np.ones(shape[::-1], dtype).T,
        "read-only": lambda: np.broadcast_to(np.ones((), dtype), shape),
        "wire": lambda: WireTensor(np.dtype(dtype).str, shape, np.ones(shape, dtype)),
    }[kind](),
    SHAPES,
    st.sampled_from(["float32", "int64", "float16", "uint8", "bool", "float64"]),
    st.sampled_from(["plain", "transposed", "read-only", "wire"]),
)
NESTED = st.recursive(ARRAYS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
NUMBERS = st.recursive(
    st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.booleans() | ARRAYS,
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=4,
)
LAYOUTS = st.builds(Field, st.sampled_from(["batched", "flat", "shared"]), st.integers(-3, 3), st.booleans())
ITEMS = st.builds(
    lambda features, fields, model_data, width, gap: {
        "features": features,
        "fields": {key: field for key, field in fields.items() if key in features},
        "model_data": model_data,
        "spans": (width, gap),
    },
    st.dictionaries(st.sampled_from("xyz"), NESTED, max_size=3),
    st.dictionaries(st.sampled_from("xyz"), LAYOUTS, max_size=3),
    st.dictionaries(st.sampled_from("uvw"), NUMBERS, max_size=2),
    st.integers(1, 3),
    st.integers(0, 2),
)


@given(st.lists(ITEMS, max_size=3), st.sampled_from([None, "bfloat16", "float16"]))
def test_whatever_passes_becomes_a_request_that_travels(found, dtype):
    items, at = [], 0
    for one in found:
        width, gap = one["spans"]
        spans = [(at, at + width - 1)] + ([(at + width + gap, at + width + gap)] if gap else [])
        items.append(item(**{**one, "spans": spans, "hash": f"h{at}"}))
        at = spans[-1][1] + 1
    made = Processed(prompt_token_ids=list(range(at + 1)), items=items)
    try:
        check(made, Work(request_id="r", images=[b"x"] * len(items)))
    except (ProcessorError, LimitError):
        return
    request = to_request(made, "r")
    again = decode_request(encode_request(request, dtype=dtype), tensors="wire")
    assert [feature.mm_hash for feature in again.mm_features or ()] == [one.hash for one in items]
    for feature, one in zip(again.mm_features or (), items):
        assert set(feature.data) == set(one.features) | set(one.model_data)
