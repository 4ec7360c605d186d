"""The native half of the vLLM drop-in, on stand-ins for vLLM's classes: what needs no vLLM, and the sanitizers see."""

import gc
import random
import weakref

import pytest

msgspec = pytest.importorskip("msgspec")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from support.compare import assert_same, assert_same_frames  # noqa: E402
from support.families import fastmm_family  # noqa: E402
from support.golden_cases import CASES  # noqa: E402
from support.requests import feature, request  # noqa: E402
from support.stand_in import (  # noqa: E402
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    Refused,
    Request,
    StandInDecoder,
    StandInEncoder,
)

import fastmm  # noqa: E402
from fastmm import MmFlatField, PlaceholderRange  # noqa: E402

FIELDS = ("request_id", "prompt_token_ids", "mm_features", "arrival_time", "prompt_embeds")
REQUESTS = [case for case in CASES if isinstance(case.build(fastmm_family("torch")), fastmm.EngineCoreRequest)]


def received(frames):
    return [bytearray(memoryview(frame)) for frame in frames]


def frames_of(case):
    return received(fastmm.Encoder(dedup=False, threshold=case.threshold).encode(case.build(fastmm_family("torch"))))


# --- decoding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_mem", [True, False])
@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case.name)
def test_a_request_is_what_our_own_decoder_makes_of_it(case, share_mem):
    frames = frames_of(case)
    got = StandInDecoder(share_mem=share_mem).decode(frames)
    assert type(got) is Request
    expected = fastmm.Decoder().decode(frames)
    for name in FIELDS:
        assert_same(getattr(got, name), getattr(expected, name), f"$.{name}")
    for made in got.mm_features or ():
        assert type(made) is MultiModalFeatureSpec
        assert made.data is None or type(made.data) is MultiModalKwargsItem


def test_an_item_alone_and_a_tensor_alone():
    tensor = torch.arange(600.0)
    frames = fastmm.Encoder(dedup=False).encode(feature([tensor, torch.ones(2), 3, 2.5]).data)
    item = StandInDecoder(MultiModalKwargsItem).decode(frames)
    assert_same(item["pixel_values"].data, [tensor, torch.ones(2), 3, 2.5])
    assert torch.equal(StandInDecoder(torch.Tensor).decode(fastmm.Encoder().encode(tensor)), tensor)


def test_plain_messages():
    decoder = StandInDecoder(None)
    for value in (["r1", "r2"], [0, 2**40, "sleep", []], {"a": 1}, None, "text"):
        frames = fastmm.Encoder().encode(value)
        for form in (frames, tuple(frames), bytes(frames[0]), bytearray(frames[0]), memoryview(frames[0])):
            assert decoder.decode(form) == value


def test_many_ids_few_ids_and_ids_that_are_none():
    decoder = StandInDecoder()
    for ids in ([], [0], list(range(63)), list(range(64)), [2**63, 2**64 - 1, *range(100)], [7] * 5000, None):
        assert decoder.decode(fastmm.Encoder().encode(request(prompt_token_ids=ids))).prompt_token_ids == ids
    for ids in ([1.0] * 100, ["x"] * 100, [True] * 100, [*range(100), None], [-(2**63), *range(99)]):
        main = msgspec.msgpack.encode(["r", ids, None, None, None, 0.0, None, None, None])
        if ids[0] == -(2**63):
            assert decoder.decode(main).prompt_token_ids == ids
            continue
        with pytest.raises(msgspec.ValidationError, match=r"\$\[1\]"):
            decoder.decode([main])


def test_equal_field_metadata_is_shared_within_a_message_only():
    field = MmFlatField(slices=[slice(0, 4), slice(4, 8)])
    message = request(torch.ones(1))
    message.mm_features = [feature(torch.ones(4, 100), field=field) for _ in range(3)]
    frames = fastmm.Encoder().encode(message)
    decoder = StandInDecoder()
    first, second = decoder.decode(frames), decoder.decode(frames)
    ids = [{id(made.data["pixel_values"].field) for made in r.mm_features} for r in (first, second)]
    assert [len(found) for found in ids] == [1, 1]
    assert ids[0] != ids[1]


def test_what_is_left_to_msgspec_may_hold_tensors_too():
    message = request(torch.ones(1000), prompt_embeds=torch.arange(300.0).reshape(3, 100))
    frames = received(fastmm.Encoder(dedup=False).encode(message))
    for cut in (True, False):
        if cut:
            got = StandInDecoder(cut=cut).decode(frames)
            assert torch.equal(got.prompt_embeds, message.prompt_embeds)
    own = StandInDecoder(share_mem=False).decode(frames)
    own.prompt_embeds[0, 0] = -1
    assert np.frombuffer(frames[2], np.float32)[0] == 0


def test_a_provider_gives_tensors_in_and_beside_the_features():
    class Store:
        kept = []

        def new_message(self):
            pass

        def __call__(self, tensor):
            self.kept.append(tensor)
            return {"n": len(self.kept) - 1}

    store = Store()
    message = request(torch.ones(1000), prompt_embeds=torch.arange(300.0))
    frames = StandInEncoder(256, store).encode(message)
    got = StandInDecoder(oob_tensor_provider=lambda dtype, shape, meta: store.kept[meta["n"]]).decode(frames)
    assert got.prompt_embeds is message.prompt_embeds
    assert got.mm_features[0].data["pixel_values"].data is store.kept[0]
    for provider in (None, lambda *args: None, lambda *args: torch.ones(3), lambda *args: 1 / 0):
        with pytest.raises(msgspec.ValidationError):
            StandInDecoder(oob_tensor_provider=provider).decode(frames)


def test_a_provider_is_asked_once_for_each_tensor_of_a_small_message_too():
    class Keep:
        def new_message(self):
            pass

        def __call__(self, tensor):
            return {"n": 0}

    message = request(torch.ones(1000))
    frames = StandInEncoder(256, Keep()).encode(message)
    small = StandInEncoder(256, Keep()).encode(type(message)("r", None, message.mm_features))
    asked = []

    def provide(dtype, shape, meta):
        asked.append(meta)
        return torch.ones(1000)

    for sent in (frames, small):
        decoder = StandInDecoder(oob_tensor_provider=provide)
        for _ in range(20):
            asked.clear()
            assert decoder.decode(sent).mm_features[0].data["pixel_values"].data.sum() == 1000
            assert len(asked) == 1
    assert len(small[0]) < 256


# --- refusing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "position", [PlaceholderRange(offset=-1, length=1), PlaceholderRange(offset=0, length=4, is_embed=torch.ones(3).bool())]
)
def test_placeholders_are_checked(position):
    message = request(1)
    message.mm_features = [feature(3, mm_position=position)]
    frames = fastmm.Encoder().encode(message)
    with pytest.raises(Refused, match="mm_position"):
        StandInDecoder().decode(frames)


@pytest.mark.parametrize("pad", [0, 1000], ids=["small", "large"])
def test_a_small_message_is_checked_as_a_large_one_is(pad):
    """A small one goes to msgspec first."""
    message = request(3, cache_salt="x" * pad)
    message.mm_features[0].mm_position.offset = -1
    with pytest.raises(Refused):
        StandInDecoder().decode(fastmm.Encoder().encode(message))
    good = request(3, cache_salt="x" * pad)
    assert StandInDecoder().decode(fastmm.Encoder().encode(good)).mm_features[0].data["pixel_values"].data == 3


def test_frames_that_nothing_points_to():
    with pytest.raises(Refused, match="point to this aux frame"):
        StandInDecoder().decode([*fastmm.Encoder().encode(request()), b"surplus"])
    message = request(sampling_params=None, lora_request=None)
    main = msgspec.msgpack.decode(fastmm.Encoder().encode(message)[0])
    main[3] = {"extra": ["float32", [1], 1]}
    assert StandInDecoder().decode([msgspec.msgpack.encode(main), b"1234"]).sampling_params == main[3]
    main[3]["pickle"] = msgspec.msgpack.Ext(1, b"x")
    with pytest.raises(msgspec.DecodeError):
        StandInDecoder().decode([msgspec.msgpack.encode(main), b"1234"])


@pytest.mark.parametrize("of_type", [Request, MultiModalKwargsItem, torch.Tensor, None])
def test_junk_is_refused(of_type):
    decoder = StandInDecoder(of_type)
    for frames in ([], (), b"", [b""], [b"\xc1"], [b"\xdd\xff\xff\xff\xff"], [b"\x91" * 3000], [object()], 7, [b"\x80", b"x"]):
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(frames)


DAMAGED = [case for case in REQUESTS if not case.name.startswith(("dtype", "ext-32", "large", "sampling", "text-2048"))]


@pytest.mark.parametrize("case", DAMAGED, ids=lambda case: case.name)
def test_damaged_frames_are_refused_or_read_and_nothing_else(case):
    """Under the sanitizers above all. What is accepted, our own decoder accepts, and reads alike."""
    frames = frames_of(case)
    decoder, own = StandInDecoder(), fastmm.Decoder()
    rng = random.Random(case.name)
    for _ in range(400):
        main, *aux = map(bytearray, frames)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            at = rng.randrange(len(main))
            main[at] = rng.choice([rng.randrange(256), main[at] ^ (1 << rng.randrange(8)), 0xC0, 0x90, 0x80, 0xD4, 0xC7])
        if rng.random() < 0.3:
            del main[rng.randrange(len(main)) :]
        try:
            got = decoder.decode([main, *aux])
        except msgspec.DecodeError:
            continue
        try:
            expected = own.decode([main, *aux])
        except fastmm.DecodeError:
            continue  # in a part that the stand-in's types leave open
        assert_same(got.mm_features, expected.mm_features)
        assert_same(got.prompt_token_ids, expected.prompt_token_ids)


def test_features_with_a_pickle_are_left_to_their_hooks_where_pickles_are_allowed():
    class Allowing(StandInDecoder):
        def pickles_allowed(self):
            return True

        def ext_hook(self, code, data):
            return f"pickle of {len(data)}" if code == 1 else super().ext_hook(code, data)

    for pad in (0, 1000):
        main = msgspec.msgpack.decode(fastmm.Encoder().encode(request(3, cache_salt="x" * pad))[0])
        main[2][0]["data"]["pixel_values"]["data"] = msgspec.msgpack.Ext(1, b"abc")
        frames = [msgspec.msgpack.encode(main)]
        got = Allowing().decode(frames)
        assert got.mm_features[0].data["pixel_values"]["data"] == "pickle of 3"
        assert got.prompt_token_ids == [1, 2]
        with pytest.raises(msgspec.DecodeError):
            StandInDecoder().decode(frames)
    item = msgspec.msgpack.encode({"k": {"data": msgspec.msgpack.Ext(1, b"abc"), "field": ["batched", {"keep_on_cpu": True}]}})
    assert Allowing(MultiModalKwargsItem).decode(item)["k"]["data"] == "pickle of 3"


def test_frames_are_let_go():
    class Watched(bytearray):
        pass

    frames = [
        Watched(memoryview(frame)) for frame in fastmm.Encoder(dedup=False).encode(request(torch.ones(999), torch.ones(888)))
    ]
    watched = [weakref.ref(frame) for frame in frames]
    got = StandInDecoder().decode(frames)
    tensor = got.mm_features[1].data["pixel_values"].data
    with pytest.raises(Refused):
        StandInDecoder().decode([*frames, b"surplus"])
    del frames, got
    gc.collect()
    assert [ref() is None for ref in watched] == [True, True, False]
    assert tensor.sum() == 888


def test_a_decoder_may_be_used_within_itself():
    frames = fastmm.Encoder(dedup=False).encode(request(torch.arange(700)))

    def provide(dtype, shape, meta):
        assert decoder.decode(frames).mm_features[0].data["pixel_values"].data[3] == 3
        return torch.ones(1000)

    decoder = StandInDecoder(oob_tensor_provider=provide)
    outside = msgspec.msgpack.encode(["r", None, None, None, None, 0.0, None, None, None, ["float32", [1000], {"n": 1}]])
    assert decoder.decode([outside]).prompt_embeds.sum() == 1000


# --- encoding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_encoder_writes_what_the_plain_one_writes(case):
    message = case.build(fastmm_family("torch"))
    encoder = StandInEncoder(case.threshold)
    frames = encoder.encode(message)
    assert type(frames[0]) is bytes
    buffer = bytearray(100)
    if not case.name.startswith("outputs-utility"):  # vLLM's hook says what a utility result is
        assert_same_frames(frames, fastmm.Encoder(dedup=False, threshold=case.threshold).encode(message))
    assert_same_frames(encoder.encode_into(message, buffer), frames)
    assert bytes(buffer) == frames[0]


def test_what_their_encoder_asks_its_hook_for_goes_to_that_hook():
    encoder = StandInEncoder()
    assert msgspec.msgpack.decode(encoder.encode({"z": 1 + 2j})[0]) == {"z": [1.0, 2.0]}
    assert encoder.counters["messages_left"] == 0
    for foreign in (np.float64(1), np.int32(3), object(), np.array([object()]), np.zeros(3, "V4"), array_of_bytes()):
        with pytest.raises(TypeError, match="their hook does not know"):
            encoder.encode([foreign])
    assert encoder.counters["messages_left"] == 0


def array_of_bytes():
    import array

    return array.array("B", b"abc")


def test_what_we_refuse_is_left_to_their_encoder():
    encoder = StandInEncoder()
    deep = [[[3]]]
    for _ in range(1100):
        deep = [deep]
    with pytest.raises(RecursionError):
        encoder.encode(deep)
    with pytest.raises(OverflowError):
        encoder.encode([2**70])
    with pytest.raises(OverflowError):
        encoder.encode_into([2**70], bytearray())
    assert encoder.counters["messages_left"] == encoder.asked == 3
    assert StandInEncoder(passive=True).encode([1]) == [b"\x91\x01"]


def test_options_can_be_set_afterwards():
    encoder = StandInEncoder(1000)
    assert len(encoder.encode(torch.ones(100))) == 1
    encoder.size_threshold = -5
    assert encoder.size_threshold == 0
    assert len(encoder.encode(torch.ones(100))) == 2


@pytest.mark.parametrize("name", ["int4", "uint3", "int1"])
def test_a_type_whose_memory_looks_like_another_is_no_other(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this torch does not have it")
    with pytest.raises(fastmm.SchemaError, match=name):
        fastmm.Encoder().encode(torch.zeros(300, dtype=torch.uint8).view(dtype))
