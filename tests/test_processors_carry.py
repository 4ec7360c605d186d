"""Work and results cross to another process by shared memory: every kind comes back as it was, and the payload is not copied."""

from __future__ import annotations

import copy
import errno
import gc
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmm import FastmmError, PlaceholderRange, WireTensor
from fastmm.errors import EncodeError, ProcessorError, SharedMemoryError
from fastmm.processors import Field, Media, Processed, ProcessedItem, Work
from fastmm.processors.carry import Carrier, Parcel
from fastmm.schema import same_value

torch = pytest.importorskip("torch")


@pytest.fixture
def carrier(tmp_path):
    """All of its trees travel by segment; none may be left."""
    yield Carrier(directory=str(tmp_path), inline_nbytes=0)
    assert os.listdir(tmp_path) == []


def there_and_back(carrier: Carrier, value):
    return carrier.unpack(carrier.pack(value))


def processed(rows: int = 100) -> Processed:
    return Processed(
        prompt_token_ids=list(range(500)),
        items=[
            ProcessedItem(
                modality="image",
                features={"pixel_values": torch.randn(rows, 1176), "image_grid_thw": torch.tensor([1, 2, 3])},
                hash="a" * 64,
                spans=[(4, 9), (12, 12)],
                fields={"pixel_values": Field("flat"), "image_grid_thw": Field(keep_on_cpu=True)},
                model_data={"second_per_grid": 0.5, "n": 3, "flag": True, "deep": [[1, 2], [3]]},
            ),
            ProcessedItem(
                modality="audio",
                features={"input_features": [np.ones((3, 4), np.float32), WireTensor("bfloat16", (2, 3), bytes(12))]},
                hash="b",
                placeholder=PlaceholderRange(20, 3, torch.tensor([True, False, True])),
            ),
        ],
    )


def assert_same(a, b, path="$"):
    """Deep equality in which the kind of everything counts."""
    assert type(a) is type(b), path
    if hasattr(a, "__dataclass_fields__"):
        for name in a.__dataclass_fields__:
            assert_same(getattr(a, name), getattr(b, name), f"{path}.{name}")
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (left, right) in enumerate(zip(a, b)):
            assert_same(left, right, f"{path}[{i}]")
    else:
        assert same_value(a, b), path


def test_a_result_comes_back_as_it_was(carrier):
    result = processed()
    assert_same(there_and_back(carrier, result), result)


def test_a_work_comes_back_as_it_was(carrier):
    work = Work(
        request_id="r",
        text="describe <image> ü",
        prompt_token_ids=[1, 2, 2**40, -1],
        images=["https://example.org/a.png", Media("image", "data:image/png;base64,AAAA")],
        videos=[b"short"],
        audios=[np.zeros(16000, np.float32)],
        prefetched=[b"x" * 100],
        extensions={"multimodal_x": {"a": [None, True, 1, 2.5, "s", [], {}]}},
        hashes=["0xff", 3, None],
    )
    assert_same(there_and_back(carrier, work), work)


TENSORS = [
    torch.randn(3, 4),
    torch.randn(3, 4).to(torch.bfloat16),
    torch.randn(30, 40).t(),
    torch.zeros(0, 5),
    torch.tensor(3.5),
    torch.arange(6).expand(2, 6),
    torch.tensor([True, False]),
    np.zeros((0, 3), np.int64),
    np.arange(12, dtype=">f4").reshape(3, 4),
    np.array(2.5),
    np.arange(1000, dtype=np.uint16)[::3],
    np.float32(1.5),
    np.int64(2**62),
    np.bool_(True),
    WireTensor("bfloat16", (2, 2), b"12345678"),
    WireTensor("<f4", (), b"1234"),
]


@pytest.mark.parametrize(
    "tensor", TENSORS, ids=lambda t: f"{type(t).__name__}-{getattr(t, 'dtype', '')}-{getattr(t, 'shape', ())}"
)
def test_tensors_of_every_kind_stay_of_that_kind(carrier, tensor):
    back = there_and_back(carrier, {"a": tensor})["a"]
    assert_same(back, np.ascontiguousarray(tensor) if isinstance(tensor, np.ndarray) and tensor.ndim else tensor)


def test_types_that_numpy_lacks_come_back_as_ml_dtypes(carrier):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(5000).astype(ml_dtypes.bfloat16)
    assert_same(there_and_back(carrier, array), array)


def test_bits_of_bfloat16_are_kept(carrier):
    words = np.arange(65536, dtype=np.uint16)  # every one there is, NaN payloads included
    tensor = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    back = there_and_back(carrier, [tensor])[0]
    assert (back.view(torch.int16).numpy().view(np.uint16) == words).all()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("nbytes", [0, 100, 5000])
def test_bytes_cross_large_ones_as_a_view_that_cannot_be_written(carrier, kind, nbytes):
    data = os.urandom(nbytes)
    back = there_and_back(carrier, [kind(data)])[0]
    assert bytes(back) == data
    if nbytes >= 4096:
        assert isinstance(back, memoryview)
        assert back.readonly


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(st.characters(categories=["L", "N", "Cs"]), max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(plain)
def test_plain_trees_come_back_as_they_were(value):
    carrier = Carrier(inline_nbytes=1 << 30)
    assert_same(there_and_back(carrier, value), value)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_images_of_pil_cross_with_their_pixels(carrier, mode):
    image = pytest.importorskip("PIL.Image")
    picture = image.effect_noise((37, 21), 50)
    picture = picture.convert(mode) if mode not in ("LA", "HSV", "YCbCr", "CMYK") else picture.convert("RGB").convert(mode)
    back = there_and_back(carrier, Media("image", picture)).source
    assert (back.mode, back.size, back.tobytes()) == (picture.mode, picture.size, picture.tobytes())
    back.putpixel((0, 0), back.getpixel((1, 1)))  # may be written to, as its original


def test_an_image_with_a_palette_is_refused(carrier):
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(ProcessorError, match="mode 'P'"):
        carrier.pack([image.effect_noise((8, 8), 50).convert("P")])


# --- no copy ----------------------------------------------------------------------------------------------------------


def mappings_of(name: str) -> list[range]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            begin, end = re.match(r"([0-9a-f]+)-([0-9a-f]+)", line).groups()
            found.append(range(int(begin, 16), int(end, 16)))
    return found


def test_a_large_result_is_views_of_the_mapping(carrier):
    result = processed(rows=1000)
    parcel = carrier.pack(result)
    assert parcel.frames == ()
    assert carrier._decoder.counters["nbytes_copied"] == 0
    back = carrier.unpack(parcel)
    (mapping,) = mappings_of(parcel.name)
    tensor = back.items[0].features["pixel_values"]
    assert tensor.data_ptr() in mapping
    assert tensor.data_ptr() + tensor.nbytes - 1 in mapping
    assert carrier._decoder.counters["nbytes_copied"] < 2000  # the small tensors, which lie in the main frame
    assert carrier._decoder.counters["nbytes_viewed"] == tensor.nbytes


def test_the_memory_goes_with_the_last_view(carrier):
    parcel = carrier.pack([torch.zeros(10000), np.zeros(10000)])
    one, two = carrier.unpack(parcel)
    assert not os.path.exists(Path(carrier.directory, parcel.name))  # the name is gone at once: no kill can leak it
    del one
    gc.collect()
    assert mappings_of(parcel.name)
    part = two[10:20]
    del two
    assert mappings_of(parcel.name)
    del part
    gc.collect()
    assert not mappings_of(parcel.name)


def test_what_is_unpacked_may_be_written_to(carrier):
    one, two = there_and_back(carrier, [torch.zeros(10000), np.zeros(10000)])
    one += 1
    two += 1
    assert one.sum() == two.sum() == 10000


def test_tensors_over_one_memory_cross_once(carrier):
    tensor = torch.randn(10000)
    parcel = carrier.pack([tensor, tensor, {"again": tensor}])
    assert len(parcel.sizes) == 2
    assert_same(carrier.unpack(parcel), [tensor, tensor, {"again": tensor}])


def test_packing_leaves_the_object_as_it_was(carrier):
    features = {"a": torch.randn(100), "b": np.ones(1000, np.float16), "c": [torch.zeros(3)]}
    before = copy.deepcopy(features)
    carrier.discard(carrier.pack(features))
    assert_same(features, before)


# --- by which way -----------------------------------------------------------------------------------------------------


def test_small_trees_travel_in_the_parcel(tmp_path):
    carrier = Carrier(directory=str(tmp_path))
    parcel = carrier.pack({"a": [1, torch.zeros(100)]})
    assert parcel.name is None
    assert os.listdir(tmp_path) == []
    assert_same(carrier.unpack(parcel), {"a": [1, torch.zeros(100)]})


def test_for_another_machine_everything_travels_in_the_parcel(carrier):
    parcel = carrier.pack(processed(), shared=False)
    assert parcel.name is None
    assert len(b"".join(parcel.frames)) == parcel.nbytes
    assert len(carrier.unpack(parcel).items) == 2


def test_without_room_in_shared_memory_the_parcel_carries_the_bytes(carrier, monkeypatch):
    def full(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    result = processed()
    parcel = carrier.pack(result)
    assert parcel.name is None
    assert_same(carrier.unpack(parcel), result)


def test_a_parcel_can_be_read_once_and_discarded_at_any_time(carrier):
    parcel = carrier.pack(torch.zeros(1000))
    carrier.unpack(parcel)
    with pytest.raises(SharedMemoryError):
        carrier.unpack(parcel)
    carrier.discard(parcel)
    other = carrier.pack(torch.zeros(1000))
    carrier.discard(other)
    carrier.discard(other)
    with pytest.raises(SharedMemoryError):
        carrier.unpack(other)
    carrier.discard(None)


# --- what cannot cross ------------------------------------------------------------------------------------------------


@dataclass
class Mine:
    a: int
    b: object


def test_a_class_of_ones_own_crosses_when_both_sides_know_it(tmp_path):
    carrier = Carrier(directory=str(tmp_path), classes=[Mine])
    assert there_and_back(carrier, [Mine(1, torch.ones(3))])[0].a == 1
    with pytest.raises(ProcessorError, match=r"\$\[0\]: a .*Mine cannot cross"):
        Carrier().pack([Mine(1, 2)])
    with pytest.raises(ProcessorError, match="dataclass"):
        Carrier(classes=[int])


@pytest.mark.parametrize("value", [object(), {1, 2}, 1 + 2j, lambda: None], ids=lambda v: type(v).__name__)
def test_what_cannot_cross_is_an_error_with_its_path(carrier, value):
    result = Processed(prompt_token_ids=[], items=[ProcessedItem(modality="image", features={"x": [0, value]}, hash="")])
    with pytest.raises(ProcessorError, match="cannot cross") as caught:
        carrier.pack(result)
    assert caught.value.path == "$.items[0].features['x'][1]"


def test_what_json_may_hold_crosses(carrier):
    deep: object = 1
    for _ in range(100):
        deep = [deep] if len(repr(deep)) % 2 else {"a": deep}
    value = {"big": 10**5000, "half \ud800": "\udfff", "deep": deep, "ids": [2**64] * 20}
    assert there_and_back(carrier, value) == value


def test_a_value_of_a_class_of_somebodys_own_crosses_as_what_it_is(carrier):
    class Text(str):
        pass

    class Whole(int):
        pass

    assert_same(there_and_back(carrier, [Text("a"), Whole(3), 2.5]), ["a", 3, 2.5])


def test_a_tree_without_end_is_an_error(carrier):
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ProcessorError, match="deep"):
        carrier.pack(endless)


def test_a_tensor_without_a_place_on_the_wire_is_an_error_and_leaves_nothing(carrier):
    with pytest.raises((EncodeError, FastmmError)):
        carrier.pack([torch.zeros(10000), np.array([object()])])


def test_a_parcel_that_nobody_packed_is_an_error(carrier, tmp_path):
    good = carrier.pack([1, [2, 3], {"a": torch.zeros(2000)}], shared=False)
    for frames in (
        [b""],
        [b"\xc1"],
        [good.frames[0][:-1], *good.frames[1:]],
        [b"\x93\x92\xa1T\x05\x90\x90"],
        [b"\x93\x92\xa1c\x63\x90\x90"],
    ):
        with pytest.raises(FastmmError):
            carrier.unpack(Parcel(tuple(map(len, frames)), None, tuple(frames)))
    with pytest.raises(FastmmError):  # sizes that the segment does not have
        carrier.unpack(carrier.pack(torch.zeros(1000))._replace(sizes=(10, 10**12)))
