"""One batch into one feature per item: what an item gets, for every kind of tensor and of field."""

from __future__ import annotations

import numpy as np
import pytest
from support.items import EMBED, KINDS, OTHER, address_of, arguments, array_of, prompt_of, qwen, tensor, torch_or_skip

import fastmm
from fastmm import FlatSizes, MmBatchedField, MmFlatField, MmSharedField, PlaceholderRange, WireTensor, build_features


def leaves(features: list[fastmm.MmFeatureSpec], key: str) -> list:
    return [feature.data[key].data for feature in features]


# --- leaves -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_batched_item_is_its_row_without_the_axis(kind):
    batch = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    features = build_features(**arguments(tensors={"x": tensor(kind, batch)}, batched={"x"}))
    for leaf, row in zip(leaves(features, "x"), batch):
        assert tuple(leaf.shape) == (2, 4)
        assert np.array_equal(array_of(leaf), row)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_one_dimensional_batch_have_no_dimension(kind):
    features = build_features(**arguments(tensors={"x": tensor(kind, np.array([5, 6, 7]))}, batched={"x"}))
    assert [tuple(leaf.shape) for leaf in leaves(features, "x")] == [()] * 3
    assert [int(array_of(leaf)) for leaf in leaves(features, "x")] == [5, 6, 7]
    assert all(type(leaf) is type(leaves(features, "x")[0]) and hasattr(leaf, "shape") for leaf in leaves(features, "x"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[4, 1, 3], [0, 8, 0], [8, 0, 0], [0, 0, 0]])
def test_a_flat_item_is_its_part_of_the_first_axis(kind, sizes):
    given = qwen(kind, sizes)
    features = build_features(**given)
    joined = np.concatenate([array_of(leaf) for leaf in leaves(features, "pixel_values")])
    assert np.array_equal(joined, array_of(given["tensors"]["pixel_values"]))
    assert [leaf.shape[0] for leaf in leaves(features, "pixel_values")] == sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 2, -1])
def test_a_flat_item_may_be_cut_along_another_axis(kind, dim):
    batch = np.arange(2 * 8 * 8, dtype=np.int32).reshape(2, 8, 8)
    features = build_features(**arguments(tensors={"x": tensor(kind, batch)}, flat={"x": FlatSizes([3, 1, 4], dim)}))
    assert np.array_equal(np.concatenate([array_of(leaf) for leaf in leaves(features, "x")], axis=dim), batch)
    field = features[1].data["x"].field
    axis = dim % 3
    assert field == MmFlatField(slices=[(slice(None),) * axis + (slice(3, 4),)], dim=axis)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_tensor_is_one_leaf_object_for_all(kind):
    shared = tensor(kind, np.arange(5, dtype=np.float32))
    features = build_features(**arguments(tensors={"x": shared}))
    assert all(leaf is shared for leaf in leaves(features, "x"))
    assert len({id(feature.data["x"].field) for feature in features}) == 1
    assert features[0].data["x"].field == MmSharedField(batch_size=3)


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_lie_in_the_batch_and_keep_its_memory(kind):
    given = qwen(kind, [2, 3, 1])
    batch, grid = given["tensors"]["pixel_values"], given["tensors"]["image_grid_thw"]
    start, rows = address_of(batch), address_of(grid)
    expected = array_of(batch).copy()
    features = build_features(**given)
    assert [address_of(leaf) - start for leaf in leaves(features, "pixel_values")] == [0, 2 * 24, 5 * 24]
    assert [address_of(leaf) - rows for leaf in leaves(features, "image_grid_thw")] == [0, 24, 48]
    del given, batch, grid
    assert np.array_equal(np.concatenate([array_of(leaf) for leaf in leaves(features, "pixel_values")]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_are_of_the_kind_of_the_batch(kind):
    given = qwen(kind, [2, 3, 1])
    features = build_features(**given)
    for key, batch in given["tensors"].items():
        for leaf in leaves(features, key):
            assert type(leaf) is type(batch)
            assert leaf.dtype == batch.dtype


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("dtype", [">f4", "<f8", ">i2", "?", "<U3", "<c8"])
def test_numpy_leaves_are_views_with_the_byte_order_and_the_flag_of_the_batch(dtype, writable):
    batch = np.arange(12).reshape(6, 2).astype(dtype)
    batch.flags.writeable = writable
    for flat in (None, {"x": [1, 4, 1]}):
        source = batch if flat else batch[:3]
        features = build_features(**arguments(tensors={"x": source}, flat=flat, batched=() if flat else {"x"}))
        for leaf in leaves(features, "x"):
            assert leaf.dtype == batch.dtype
            assert leaf.flags.writeable is writable
            assert np.shares_memory(leaf, batch)


@pytest.mark.parametrize("make", [
    lambda a: a[::2], lambda a: a[:, ::2], lambda a: a.T, lambda a: a[::-1], lambda a: np.broadcast_to(a[:1], a.shape),
    lambda a: np.asfortranarray(a), lambda a: a.view(np.uint8)[:, 1:-3].view(np.float32)[:, :2] if a.shape[1] > 2 else a,
])  # fmt: skip
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_batch_with_gaps_is_cut_as_its_producer_would(kind, make, dim):
    batch = make(np.arange(64, dtype=np.float32).reshape(8, 8))
    if kind == "torch":
        if any(stride < 0 for stride in batch.strides) or not batch.flags.writeable or batch.ctypes.data % 4:
            pytest.skip("torch has no such tensor")
        batch = tensor("torch", batch)
    extent = batch.shape[dim]
    sizes = [1, extent - 1]
    features = build_features(**arguments(2, tensors={"x": batch}, flat={"x": FlatSizes(sizes, dim)}))
    found = [array_of(leaf) for leaf in leaves(features, "x")]
    assert np.array_equal(np.concatenate(found, axis=dim), array_of(batch))
    assert all(np.shares_memory(leaf, array_of(batch)) for leaf in found)
    features = build_features(**arguments(batch.shape[0], tensors={"x": batch}, batched={"x"}))
    assert np.array_equal(np.stack([array_of(leaf) for leaf in leaves(features, "x")]), array_of(batch))


def test_every_dtype_of_torch_can_be_cut():
    torch = torch_or_skip()
    for name in fastmm.dtypes.DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        batch = torch.arange(3 * 16, dtype=torch.uint8).reshape(3, 16).view(dtype)
        features = build_features(**arguments(tensors={"x": batch, "y": batch}, batched={"x"}, flat={"y": [2, 0, 1]}))
        assert [leaf.dtype for leaf in leaves(features, "x")] == [dtype] * 3
        assert [leaf.data_ptr() - batch.data_ptr() for leaf in leaves(features, "x")] == [0, 16, 32]
        assert [leaf.shape for leaf in leaves(features, "y")] == [
            (2, *batch.shape[1:]),
            (0, *batch.shape[1:]),
            (1, *batch.shape[1:]),
        ]


def test_a_tensor_with_a_gradient_gives_leaves_without_one():
    torch = torch_or_skip()
    batch = torch.nn.Parameter(torch.arange(6, dtype=torch.float32).reshape(3, 2))
    features = build_features(**arguments(tensors={"x": batch, "y": batch}, batched={"x"}, flat={"y": [1, 1, 1]}))
    for key in "xy":
        for leaf in leaves(features, key):
            assert type(leaf) is torch.Tensor
            assert not leaf.requires_grad
            assert leaf.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_no_patches_at_all_is_fine(kind):
    batch = tensor(kind, np.empty((0, 4), np.float32))
    features = build_features(**arguments(tensors={"x": batch}, flat={"x": [0, 0, 0]}))
    assert [tuple(leaf.shape) for leaf in leaves(features, "x")] == [(0, 4)] * 3
    batch = tensor(kind, np.empty((3, 0), np.float32))
    features = build_features(**arguments(tensors={"x": batch}, batched={"x"}))
    assert [tuple(leaf.shape) for leaf in leaves(features, "x")] == [(0,)] * 3


def test_a_wire_tensor_is_cut_into_wire_tensors_over_its_buffer():
    data = bytearray(range(24))
    for name in ("bfloat16", "float8_e4m3fn", "<f4", ">i2"):
        width = fastmm.dtypes.item_nbytes(name)
        batch = WireTensor(name, (6, 4 // width), data)
        features = build_features(**arguments(tensors={"x": batch}, flat={"x": [3, 2, 1]}))
        assert [bytes(leaf.data) for leaf in leaves(features, "x")] == [bytes(data[:12]), bytes(data[12:20]), bytes(data[20:])]
        assert all(leaf.dtype == name and leaf.data.obj is data for leaf in leaves(features, "x"))


class OnlyDlpack:
    """A producer with `__dlpack__` and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_another_producer_of_dlpack_is_cut_into_numpy_views():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for batch in (array, array[:, ::2], array.T[:3]):
        tensors = {"x": OnlyDlpack(batch), "y": OnlyDlpack(batch), "z": OnlyDlpack(batch)}
        flat = {"y": [1, 0, 2], "z": FlatSizes([batch.shape[1] - 1, 1, 0], 1)}
        features = build_features(**arguments(tensors=tensors, batched={"x"}, flat=flat))
        assert np.array_equal(np.stack(leaves(features, "x")), batch)
        assert np.array_equal(np.concatenate(leaves(features, "y")), batch)
        assert np.array_equal(np.concatenate(leaves(features, "z"), axis=1), batch)
        assert all(np.shares_memory(leaf, array) for key in "xyz" for leaf in leaves(features, key) if leaf.size)


@pytest.mark.parametrize("kind", KINDS)
def test_items_of_a_list_are_the_tensors_themselves(kind):
    ragged = [tensor(kind, np.full((i + 1, 2), i, np.float32)) for i in range(3)]
    features = build_features(**arguments(tensors={"x": ragged}, batched={"x"}))
    assert all(leaf is given for leaf, given in zip(leaves(features, "x"), ragged))
    features = build_features(**arguments(2, tensors={"x": ragged}, flat={"x": [2, 1]}))
    assert [[id(leaf) for leaf in leaf_list] for leaf_list in leaves(features, "x")] == [
        [id(ragged[0]), id(ragged[1])],
        [id(ragged[2])],
    ]


def test_lists_may_hold_numbers_and_lists():
    features = build_features(**arguments(tensors={"x": [1, 2.5, [True, np.float64(3)]]}, batched={"x"}))
    assert leaves(features, "x") == [1, 2.5, [True, 3.0]]


def test_a_number_is_shared():
    features = build_features(**arguments(tensors={"x": 3, "y": np.float32(0.5)}))
    assert [(feature.data["x"].data, feature.data["y"].data) for feature in features] == [(3, 0.5)] * 3


# --- fields -------------------------------------------------------------------------------------------------------------


def test_an_item_names_its_own_slice_only():
    features = build_features(**qwen("numpy", [2, 3, 1]))
    assert [feature.data["pixel_values"].field for feature in features] == [
        MmFlatField(slices=[slice(0, 2)]),
        MmFlatField(slices=[slice(2, 5)]),
        MmFlatField(slices=[slice(5, 6)]),
    ]


def test_full_slices_are_one_field_object():
    features = build_features(**qwen("numpy", [2, 3, 1], full_slices=True))
    fields = [feature.data["pixel_values"].field for feature in features]
    assert fields[0] == MmFlatField(slices=[slice(0, 2), slice(2, 5), slice(5, 6)])
    assert fields[0] is fields[1] is fields[2]


def test_slices_hold_plain_ints_whatever_the_sizes_came_as():
    for sizes in (np.array([2, 3, 1], np.uint8), [np.int64(2), 3, 1], tensor("wire", np.array([2, 3, 1], np.int16))):
        features = build_features(**arguments(tensors={"x": np.zeros(6)}, flat={"x": sizes}))
        for feature in features:
            (part,) = feature.data["x"].field.slices
            assert type(part.start) is int
            assert type(part.stop) is int


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8"])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_may_be_of_any_integer_dtype(kind, dtype):
    sizes = np.array([2, 3, 1], dtype)
    if kind == "wire":
        sizes = WireTensor(sizes.dtype.str, (3,), sizes.tobytes())
    elif kind == "torch":
        if dtype.startswith(">"):
            pytest.skip("torch has native byte order only")
        sizes = tensor("torch", sizes)
    given = qwen("numpy", [2, 3, 1])
    given["tensors"]["patches_per_image"] = sizes
    features = build_features(**given)
    assert [leaf.shape[0] for leaf in leaves(features, "pixel_values")] == [2, 3, 1]


@pytest.mark.parametrize("sizes", [[2, 3, 1], (2, 3, 1), FlatSizes([2, 3, 1]), FlatSizes("n"), "n", np.array([2, 3, 1])])
def test_sizes_may_be_a_key_or_the_numbers(sizes):
    tensors = {"x": np.arange(6), "n": np.array([2, 3, 1])}
    features = build_features(**arguments(tensors=tensors, flat={"x": sizes}))
    assert [len(leaf) for leaf in leaves(features, "x")] == [2, 3, 1]


def test_strided_sizes_are_read_right():
    sizes = np.array([2, 9, 3, 9, 1, 9])[::2]
    features = build_features(**arguments(tensors={"x": np.arange(6)}, flat={"x": sizes}))
    assert [len(leaf) for leaf in leaves(features, "x")] == [2, 3, 1]


def test_keep_on_cpu_holds_for_every_kind_of_field():
    given = qwen("numpy", [2, 3, 1], keep_on_cpu={"pixel_values", "image_grid_thw", "patches_per_image"})
    for full in (True, False):
        data = build_features(**given, full_slices=full)[1].data
        assert [type(elem.field) for elem in data.values()] == [MmFlatField, MmBatchedField, MmSharedField]
        assert all(elem.field.keep_on_cpu is True for elem in data.values())
    given["keep_on_cpu"] = {"image_grid_thw"}
    data = build_features(**given)[1].data
    assert [elem.field.keep_on_cpu for elem in data.values()] == [False, True, False]


@pytest.mark.parametrize("kept", ["ace", "bdf", "", "abcdef"])
def test_keys_of_one_batch_may_differ_in_keep_on_cpu(kept):
    tensors = {key: np.zeros((3, 3)) for key in "abcdef"}
    flat = {"c": "n", "d": "n", "e": FlatSizes("n", 1), "f": FlatSizes("n", 1)}
    given = arguments(tensors=tensors | {"n": np.ones(3, int)}, batched={"a", "b"}, flat=flat, keep_on_cpu=set(kept))
    for full in (True, False):
        data = build_features(**given, full_slices=full)[0].data
        assert {key: elem.field.keep_on_cpu for key, elem in data.items() if key != "n"} == {
            key: key in kept for key in "abcdef"
        }
        assert [data[key].field.dim for key in "cdef"] == [0, 0, 1, 1]


def test_batched_wins_over_flat():
    features = build_features(**arguments(tensors={"x": np.zeros((3, 2))}, batched={"x"}, flat={"x": [1, 1, 1]}))
    assert [leaf.shape for leaf in leaves(features, "x")] == [(2,)] * 3
    assert type(features[0].data["x"].field) is MmBatchedField


# --- names --------------------------------------------------------------------------------------------------------------


def test_a_video_renames_the_keys_of_an_image_wherever_they_are_named():
    given = qwen("numpy", [2, 3, 1], modality="video", keep_on_cpu={"image_grid_thw"})
    data = build_features(**given)[0].data
    assert list(data) == ["pixel_values_videos", "video_grid_thw", "patches_per_image"]
    assert [type(elem.field) for elem in data.values()] == [MmFlatField, MmBatchedField, MmSharedField]
    assert data["video_grid_thw"].field.keep_on_cpu


def test_keys_may_be_named_as_they_will_be_called():
    given = qwen("numpy", [2, 3, 1], modality="video", batched={"video_grid_thw"})
    given["flat"] = {"pixel_values_videos": "patches_per_image"}
    data = build_features(**given)[0].data
    assert [type(elem.field) for elem in data.values()] == [MmFlatField, MmBatchedField, MmSharedField]


def test_rename_overrides():
    data = build_features(**qwen("numpy", [2, 3, 1], modality="video", rename={"patches_per_image": "counts"}))[0].data
    assert list(data) == ["pixel_values", "image_grid_thw", "counts"]
    assert type(data["pixel_values"].field) is MmFlatField
    data = build_features(**qwen("numpy", [2, 3, 1], modality="video", rename={}))[0].data
    assert list(data) == ["pixel_values", "image_grid_thw", "patches_per_image"]


@pytest.mark.parametrize("modality", ["image", "audio", "vision_chunk", "anything else"])
def test_a_modality_is_any_name(modality):
    features = build_features(**qwen("numpy", [2, 3, 1], modality=modality))
    assert [feature.modality for feature in features] == [modality] * 3
    assert list(features[0].data) == ["pixel_values", "image_grid_thw", "patches_per_image"]


# --- positions ----------------------------------------------------------------------------------------------------------


def test_features_come_in_the_order_of_their_offsets():
    given = qwen("numpy", [2, 3, 1], identifiers=["a", "b", "c"])
    places = given["placeholders"]
    given["placeholders"] = [places[2], places[0], places[1]]
    features = build_features(**given)
    assert [feature.mm_position.offset for feature in features] == [place[0] for place in places]
    assert [feature.identifier for feature in features] == ["b", "c", "a"]
    assert [feature.mm_hash for feature in features] == ["hash-1", "hash-2", "hash-0"]
    assert [leaf.shape[0] for leaf in leaves(features, "pixel_values")] == [3, 1, 2]


def test_identifier_and_hash_default_to_the_hash():
    features = build_features(**qwen("numpy", [1, 1]))
    assert [(feature.identifier, feature.mm_hash) for feature in features] == [("hash-0", "hash-0"), ("hash-1", "hash-1")]


class Place:
    """As vLLM's PlaceholderRange looks from outside."""

    def __init__(self, offset, length, is_embed=None):
        self.offset, self.length, self.is_embed = offset, length, is_embed


@pytest.mark.parametrize("make", [tuple, list, np.array, lambda pair: PlaceholderRange(*pair), lambda pair: Place(*pair)])
def test_a_placeholder_may_be_a_pair_or_a_range(make):
    given = qwen("numpy", [1, 1])
    expected = [PlaceholderRange(*place) for place in given["placeholders"]]
    given["placeholders"] = [make(place) for place in given["placeholders"]]
    features = build_features(**given)
    assert [feature.mm_position for feature in features] == expected
    assert all(type(feature.mm_position.offset) is int for feature in features)


def prompts(kind: str, ids: list[int]):
    if kind == "list":
        return ids
    if kind == "tuple":
        return tuple(ids)
    return tensor(kind, np.array(ids, np.int32 if kind == "torch" else np.int64))


@pytest.mark.parametrize("kind", ["list", "tuple", *KINDS])
@pytest.mark.parametrize("embed", [EMBED, {EMBED, 99}, np.int64(EMBED), [99, EMBED]])
def test_the_mask_is_true_where_the_prompt_holds_the_token(kind, embed):
    ids, places = prompt_of([3, 5])
    ids[places[1][0] + 1] = OTHER
    ids[places[1][0] + 4] = OTHER
    features = build_features(
        **arguments(2, tensors={"x": np.zeros(2)}, batched={"x"}, prompt_token_ids=prompts(kind, ids), placeholders=places),
        embed_token_id=embed,
    )
    assert features[0].mm_position.is_embed is None  # all of them
    mask = features[1].mm_position.is_embed
    assert type(mask) is np.ndarray
    assert mask.dtype == bool
    assert mask.tolist() == [True, False, True, True, False]


def test_several_tokens_may_take_an_embedding():
    ids, places = prompt_of([4])
    ids[places[0][0]], ids[places[0][0] + 1] = 98, OTHER
    given = arguments(1, tensors={"x": np.zeros(1)}, batched={"x"}, prompt_token_ids=ids, placeholders=places)
    (feature,) = build_features(**given, embed_token_id={EMBED, 98})
    assert feature.mm_position.is_embed.tolist() == [True, False, True, True]


@pytest.mark.parametrize("nested", [False, True])
def test_masks_are_torch_tensors_where_torch_tensors_came(nested):
    torch = torch_or_skip()
    ids, places = prompt_of([4])
    ids[places[0][0]] = OTHER
    batch = torch.zeros(1)
    given = arguments(1, tensors={"x": [batch] if nested else batch}, batched={"x"}, prompt_token_ids=ids, placeholders=places)
    (feature,) = build_features(**given, embed_token_id=EMBED)
    mask = feature.mm_position.is_embed
    assert mask.dtype == torch.bool
    assert mask.tolist() == [False, True, True, True]


def test_token_ids_of_any_size_are_told_apart():
    huge = 2**62 + EMBED
    ids = [huge, EMBED, 2**70, -EMBED, 0]
    given = arguments(1, tensors={"x": np.zeros(1)}, batched={"x"}, prompt_token_ids=ids, placeholders=[(0, 5)])
    (feature,) = build_features(**given, embed_token_id=huge)
    assert feature.mm_position.is_embed.tolist() == [True, False, False, False, False]


def test_a_mask_that_came_with_the_placeholder_is_kept():
    mask = np.array([True, False, True, True])
    given = qwen("numpy", [1, 1])
    offset = given["placeholders"][0][0]
    given["placeholders"][0] = PlaceholderRange(offset, 4, mask)
    given["placeholders"][1] = PlaceholderRange(given["placeholders"][1][0], 4, np.ones(4, bool))
    features = build_features(**given)
    assert features[0].mm_position.is_embed is mask
    assert features[1].mm_position.is_embed is None


def test_a_mask_with_gaps_is_read_right():
    mask = np.array([True, False, False, True, True, False, False, True])[::2]
    given = qwen("numpy", [1])
    given["placeholders"] = [PlaceholderRange(0, 4, mask)]
    assert build_features(**given)[0].mm_position.is_embed is mask
    given["placeholders"] = [PlaceholderRange(0, 2, mask[::2][:1].repeat(2))]
    assert build_features(**given)[0].mm_position.is_embed is None


def test_without_token_ids_positions_are_taken_as_they_are():
    given = qwen("numpy", [1, 1], prompt_token_ids=None)
    assert len(build_features(**given)) == 2


# --- none, and cached -----------------------------------------------------------------------------------------------------


def test_nothing_carried_gives_nothing():
    assert build_features(tensors={}, placeholders=[], hashes=[], prompt_token_ids=[1, 2]) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [{1}, [0, 2], np.array([0, 1, 2])])
def test_cached_items_carry_no_data_and_keep_hash_and_position(kind, cached):
    given = qwen(kind, [2, 3, 1])
    whole = build_features(**given)
    features = build_features(**given, cached=cached)
    for i, (feature, full) in enumerate(zip(features, whole)):
        assert (feature.mm_hash, feature.identifier, feature.mm_position) == (full.mm_hash, full.identifier, full.mm_position)
        if i in cached:
            assert feature.data is None
        else:
            assert feature.data == full.data


def test_cached_counts_items_in_the_order_given():
    given = qwen("numpy", [2, 3, 1])
    given["placeholders"] = given["placeholders"][::-1]
    features = build_features(**given, cached={0})
    assert [feature.data is None for feature in features] == [False, False, True]
    assert features[2].mm_hash == "hash-0"


def test_where_all_are_cached_there_need_be_no_tensors():
    features = build_features(**arguments(), cached=range(3))
    assert [feature.data for feature in features] == [None] * 3
