"""What vLLM publishes of its codec's behaviour holds for ours: every test here runs the same code on both."""

import dataclasses
import inspect
import threading
from collections import UserDict
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import msgspec
import numpy as np
import pytest
import torch
import zmq
from codecs_of_both import CODECS, assert_identical, both, crossed
from support.compare import assert_same, assert_same_frames
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
    nested_tensors_equal,
)
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.tensor_ipc import TensorIpcReceiver, TensorIpcSender
from vllm.v1.serial_utils import UtilityResult

from fastmm.integrations.vllm import MsgpackDecoder, MsgpackEncoder


class Custom(UserDict):
    """What the wire does not know."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def __eq__(self, other):
        return type(other) is Custom and self.number == other.number

    __hash__ = None


@dataclass
class Everything:
    ints: torch.Tensor
    text: str
    several: list[torch.Tensor]
    halves: torch.Tensor
    array: np.ndarray
    custom: Custom
    small_fortran: torch.Tensor
    large_fortran: torch.Tensor
    small_strided: torch.Tensor
    large_strided: torch.Tensor
    scattered: torch.Tensor
    empty: torch.Tensor


def everything():
    return Everything(
        ints=torch.randint(0, 100, (1024,), dtype=torch.int32),
        text="hello",
        several=[torch.rand((1, 10)), torch.rand((3, 5, 4000), dtype=torch.float64), torch.tensor(1984)],
        halves=torch.rand(3, 200).to(torch.bfloat16),
        array=np.arange(512),
        custom=Custom(33),
        small_fortran=torch.rand(5, 4).t(),
        large_fortran=torch.rand(1024, 4).t(),
        small_strided=torch.rand(2, 4)[:, 1:3],
        large_strided=torch.rand(1024, 512)[:, 10:20],
        scattered=torch.rand(8, 9, 10).permute(2, 0, 1),
        empty=torch.empty(0),
    )


def assert_everything(decoded, expected):
    for field in dataclasses.fields(Everything):
        got, wanted = getattr(decoded, field.name), getattr(expected, field.name)
        if field.name == "custom":
            assert got == wanted
        else:
            assert_same(got, wanted)


@pytest.fixture
def pickles(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


@pytest.fixture
def no_pickles(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")


# --- a dataclass of everything ------------------------------------------------------------------------------------------


@crossed
def test_a_dataclass_of_tensors_of_every_kind_comes_back(sender, receiver, pickles):
    value, encoder, decoder = everything(), sender.Encoder(size_threshold=256), receiver.Decoder(Everything)
    frames = encoder.encode(value)
    assert len(frames) == 8
    assert_everything(decoder.decode(frames), value)

    buffer = bytearray()
    frames = encoder.encode_into(value, buffer)
    assert len(frames) == 8
    assert frames[0] is buffer
    assert_everything(decoder.decode(frames), value)


def test_both_write_it_alike(pickles):
    value = everything()
    theirs, ours = (codec.Encoder(256).encode(value) for codec in CODECS.values())
    assert_same_frames(ours, theirs)


@both
def test_frames_are_what_callers_take_them_for(codec, pickles):
    value, buffer = everything(), bytearray(b"what was there")
    frames = codec.Encoder(256).encode(value)
    assert type(frames) is list
    assert type(frames[0]) is bytes
    for frame in frames:
        assert memoryview(frame).cast("B").nbytes == len(memoryview(frame).cast("B"))
    into = codec.Encoder(256).encode_into(value, buffer)
    assert type(into) is list
    assert into[0] is buffer
    assert bytes(buffer) == frames[0]


def test_each_of_our_frames_has_its_bytes_as_its_length(pickles):
    for frame in MsgpackEncoder(256).encode(everything()):
        assert len(frame) == memoryview(frame).nbytes
        assert memoryview(frame).format == "B"


@both
def test_a_large_main_frame_is_bytes_too(codec):
    frames = codec.Encoder().encode([["x" * 200] * 1000, torch.ones(1000)])
    assert type(frames[0]) is bytes
    assert len(frames[0]) > 200_000


# --- multimodal kwargs --------------------------------------------------------------------------------------------------


@dataclass
class Request:
    mm: list[MultiModalKwargsItems] | None


def kwargs():
    flat = MultiModalFlatField(slices=[[slice(1, 2, 3), slice(4, 5, 6)], [slice(None, 2)]], dim=0)
    audio = MultiModalKwargsItem(
        {"a0": MultiModalFieldElem(data=torch.zeros(1000, dtype=torch.bfloat16), field=MultiModalBatchedField())}
    )
    video = MultiModalKwargsItem(
        {"v0": MultiModalFieldElem(data=[torch.zeros(1000, dtype=torch.int8) for _ in range(4)], field=flat)}
    )
    image = MultiModalKwargsItem(
        {
            "i0": MultiModalFieldElem(data=torch.zeros(1000, dtype=torch.int32), field=MultiModalSharedField(batch_size=4)),
            "i1": MultiModalFieldElem(
                data=torch.zeros(1000, dtype=torch.int32),
                field=MultiModalFlatField(slices=[slice(1, 2, 3), slice(4, 5, 6)], dim=2),
            ),
        }
    )
    return MultiModalKwargsItems({"audio": [audio], "video": [video], "image": [image]})


@crossed
def test_items_of_all_modalities_and_fields_come_back(sender, receiver):
    items = kwargs()
    frames = sender.Encoder(256).encode(Request([items]))
    assert len(frames) == 8
    assert sum(memoryview(frame).cast("B").nbytes for frame in frames) == 14_319
    (decoded,) = receiver.Decoder(Request).decode(frames).mm
    assert type(decoded) is MultiModalKwargsItems
    assert all(
        nested_tensors_equal(decoded[modality][0][key].data, elem.data)
        for modality, (item,) in items.items()
        for key, elem in item.items()
    )
    assert_identical(decoded, items)


@crossed
def test_one_item_comes_back(sender, receiver):
    (item,) = kwargs()["image"]
    decoded = receiver.Decoder(MultiModalKwargsItem).decode(sender.Encoder(256).encode(item))
    assert_identical(decoded, item)


# --- single values ------------------------------------------------------------------------------------------------------


@crossed
def test_a_tensor_an_array_and_a_dict_come_back(sender, receiver):
    for tensor in (torch.rand(3, 4), torch.rand(300, 4), torch.tensor(3), torch.empty(0, 3, dtype=torch.int16)):
        assert_identical(receiver.Decoder(torch.Tensor).decode(sender.Encoder().encode(tensor)), tensor)
    for array in (np.arange(3), np.arange(300.0).reshape(10, 30), np.array(3), np.array(["a", "bc"])):
        assert_same(receiver.Decoder(np.ndarray).decode(sender.Encoder().encode(array)), array)
    tree = {"a": [1, 2.5, None, True, "x", b"y"], "b": {"c": {}}}
    assert receiver.Decoder().decode(sender.Encoder().encode(tree)) == tree
    assert receiver.Decoder(dict[str, np.ndarray]).decode(sender.Encoder().encode({"a": np.arange(9)}))["a"].tolist() == [
        *range(9)
    ]


@both
def test_one_buffer_is_a_message_too(codec):
    main = codec.Encoder().encode(["a", 1])[0]
    for frame in (main, bytearray(main), memoryview(main), zmq.Frame(main)):
        assert codec.Decoder().decode(frame) == ["a", 1]
        assert codec.Decoder().decode([frame]) == ["a", 1]
        assert codec.Decoder().decode((frame,)) == ["a", 1]


# --- pickles ------------------------------------------------------------------------------------------------------------


@dataclass
class Holder:
    values: list[Custom]


@crossed
def test_a_custom_class_travels_where_the_operator_allows_it(sender, receiver, pickles):
    value = Holder([Custom(1), Custom(2)])
    assert receiver.Decoder(Holder).decode(sender.Encoder().encode(value)) == value


@crossed
@pytest.mark.parametrize("whole", [True, False], ids=["item", "request"])
def test_an_odd_number_of_an_item_travels_where_the_operator_allows_it(sender, receiver, whole, pickles):
    """numpy's numbers, which vLLM pickles."""
    item = MultiModalKwargsItem(
        {
            "k": MultiModalFieldElem(data=np.float64(2.5), field=MultiModalBatchedField()),
            "t": MultiModalFieldElem(data=torch.arange(100), field=MultiModalBatchedField()),
        }
    )
    if whole:
        decoded = receiver.Decoder(MultiModalKwargsItem).decode(sender.Encoder().encode(item))
    else:
        feature = MultiModalFeatureSpec(item, "image", "i", PlaceholderRange(0, 4), "h")
        request = EngineCoreRequest("r", [1] * 100, [feature], None, None, 0.0, None, None, None)
        decoded = receiver.Decoder(EngineCoreRequest).decode(sender.Encoder().encode(request)).mm_features[0].data
    assert type(decoded["k"].data) is np.float64
    assert decoded["k"].data == 2.5
    assert torch.equal(decoded["t"].data, torch.arange(100))


@both
def test_a_custom_class_is_refused_where_he_does_not(codec, no_pickles):
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        codec.Encoder().encode(Holder([Custom(1)]))


def test_a_pickle_is_not_loaded_where_he_does_not(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    frames = MsgpackEncoder().encode(Holder([Custom(1)]))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    with pytest.raises(msgspec.ValidationError, match="Extension type code 1 is not supported"):
        MsgpackDecoder(Holder).decode(frames)


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_utility_results_carry_their_types_as_vllms_do(allowed, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", allowed)
    results = [None, 3, "x", [1, {"a": 2.5}], {"k": [torch.ones(3)]}, torch.ones(500), (1, 2), np.arange(3)]
    for result in results:
        value = UtilityResult(result)
        theirs, ours = (codec.Encoder().encode(value) for codec in CODECS.values())
        assert_same_frames(ours, theirs)
        decoded = [codec.Decoder(UtilityResult).decode(theirs) for codec in CODECS.values()]
        assert type(decoded[1]) is UtilityResult
        assert_identical(decoded[1].result, decoded[0].result)


# --- out of band --------------------------------------------------------------------------------------------------------


class Queue:
    """As a multiprocessing queue within one process."""

    def __init__(self):
        self.items = []

    def put(self, item, timeout=None):
        self.items.append(item)

    def get(self, timeout=None):
        return self.items.pop(0)


@dataclass
class Tensors:
    name: str
    tensors: list[torch.Tensor]


@crossed
def test_tensors_go_by_a_sender_and_a_receiver(sender, receiver):
    queue = Queue()
    value = Tensors("r", [torch.rand(100), torch.rand(3), torch.arange(1000)])
    frames = sender.Encoder(256, TensorIpcSender(queue)).encode(value)
    assert len(frames) == 1
    assert len(queue.items) == 2  # the small one is inline
    decoded = receiver.Decoder(Tensors, oob_tensor_provider=TensorIpcReceiver(queue)).decode(frames)
    assert_same(decoded, value)


@crossed
def test_three_senders_take_turns(sender, receiver):
    queue = Queue()
    encoders = [sender.Encoder(0, TensorIpcSender(queue)) for _ in range(3)]
    decoder = receiver.Decoder(Tensors, oob_tensor_provider=TensorIpcReceiver(queue))
    values = [Tensors(f"{turn} {n}", [torch.rand(10) + n, torch.rand(20) + turn]) for turn in range(4) for n in range(3)]
    messages = [encoders[i % 3].encode(value) for i, value in enumerate(values)]
    order = [2, 0, 1, 5, 4, 3, 6, 8, 7, 11, 9, 10]  # of each sender in order, among them in any
    for index in order:
        assert_same(decoder.decode(messages[index]), values[index])


# --- the engine's sender ------------------------------------------------------------------------------------------------


@both
def test_a_hundred_messages_over_reused_buffers_arrive_whole(codec):
    """As the engine's output thread does it: a buffer is used again when its message's first frame is sent."""
    encoder, decoder = codec.Encoder(), codec.Decoder()
    received = []
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        address = f"inproc://reused-{id(encoder)}"
        pull.bind(address)
        push.connect(address)
        push.setsockopt(zmq.SNDHWM, 0)
        pull.setsockopt(zmq.RCVTIMEO, 20_000)

        def receive():
            received.extend(pull.recv_multipart(copy=False) for _ in range(100))

        thread = threading.Thread(target=receive)
        thread.start()
        free, pending = [], []
        nbytes = zmq.COPY_THRESHOLD + 1000
        for number in range(100):
            while pending and pending[0][0].done:
                free.append(pending.pop(0)[1])
            buffer = free.pop() if free else bytearray()
            frames = encoder.encode_into([number, f"{number:4}" * (nbytes // 4), torch.full((nbytes,), number).byte()], buffer)
            assert frames[0] is buffer
            tracker = EngineCoreProc._send_msg_tracking_payload(push, frames)
            pending.append((tracker, buffer))
            del frames
        thread.join(20)
        assert not thread.is_alive()
        for number, frames in enumerate(received):
            got, text, (dtype, shape, index) = decoder.decode([frames[0]])
            assert (got, text, dtype, shape) == (number, f"{number:4}" * (nbytes // 4), "uint8", [nbytes])
            assert set(frames[index].bytes) == {number}
        del frames, received[:]


@both
def test_frames_outlive_their_sender(codec):
    encoder, decoder = codec.Encoder(), codec.Decoder(Tensors)
    value = Tensors("r", [torch.arange(1000), torch.rand(2000, 3).t()])
    copies = [tensor.clone() for tensor in value.tensors]
    frames = encoder.encode(value)
    del value, encoder
    rubbish = [torch.full((1000,), -1) for _ in range(50)]
    decoded = decoder.decode(frames)
    del frames, decoder
    assert all(torch.equal(a, b) for a, b in zip(decoded.tensors, copies, strict=True))
    del rubbish


# --- the shape of the classes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_constructors_methods_and_attributes_are_those_of_vllm(kind):
    theirs, ours = (getattr(codec, kind) for codec in CODECS.values())
    assert issubclass(ours, theirs)
    assert ours.__name__ == theirs.__name__
    parameters = [inspect.signature(cls).parameters for cls in (theirs, ours)]
    assert list(parameters[0]) == list(parameters[1])
    assert [p.default for p in parameters[0].values()] == [p.default for p in parameters[1].values()]
    for name in dir(theirs):
        assert hasattr(ours, name)
    their_own, our_own = theirs(), ours()
    for name, value in vars(their_own).items():
        assert type(getattr(our_own, name)) is type(value), name
        if isinstance(value, (int, tuple, type(None))):
            assert getattr(our_own, name) == value


def test_the_threshold_and_the_consumer_can_be_set_afterwards():
    encoder = MsgpackEncoder(size_threshold=1000)
    assert encoder.size_threshold == 1000
    assert len(encoder.encode(torch.ones(100))) == 1
    encoder.size_threshold = 100
    assert len(encoder.encode(torch.ones(100))) == 2
    queue = Queue()
    encoder.oob_tensor_consumer = TensorIpcSender(queue)
    assert len(encoder.encode(torch.ones(100))) == 1
    assert len(queue.items) == 1


@pytest.mark.parametrize("threshold", [-1, 0, 2**70])
def test_any_threshold_is_taken_as_vllm_takes_it(threshold):
    value = [torch.ones(2), torch.ones(0), np.ones(3)]
    theirs, ours = (codec.Encoder(threshold).encode(value) for codec in CODECS.values())
    assert_same_frames(ours, theirs)


def test_the_threshold_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "8")
    assert [codec.Encoder().size_threshold for codec in CODECS.values()] == [8, 8]


@both
def test_hooks_can_be_called_by_hand(codec):
    encoder, decoder = codec.Encoder(), codec.Decoder()
    assert encoder.enc_hook(slice(1, None, 2)) == (1, None, 2)
    assert decoder.dec_hook(slice, [1, None, 2]) == slice(1, None, 2)
    assert decoder.dec_hook(int, 3) == 3
    raw = memoryview(np.arange(3, dtype=np.int32).tobytes())
    assert decoder.ext_hook(3, raw) is raw
    assert decoder.dec_hook(torch.Tensor, ["int32", [3], raw]).tolist() == [0, 1, 2]
    assert decoder.dec_hook(np.ndarray, ["<i4", [3], raw]).tolist() == [0, 1, 2]
    with pytest.raises(NotImplementedError):
        decoder.ext_hook(99, raw)


@both
def test_a_subclass_may_replace_a_hook(codec):
    class Encoder(codec.Encoder):
        def enc_hook(self, obj):
            return "replaced" if isinstance(obj, torch.Tensor) else super().enc_hook(obj)

    class Decoder(codec.Decoder):
        def dec_hook(self, t, obj):
            return torch.zeros(7) if t is torch.Tensor else super().dec_hook(t, obj)

    assert codec.Decoder().decode(Encoder().encode([torch.ones(1000), slice(1, 2, 3)])) == ["replaced", [1, 2, 3]]
    value = Tensors("r", [torch.ones(3)])
    (tensor,) = Decoder(Tensors).decode(codec.Encoder().encode(value)).tensors
    assert len(tensor) == 7


@both
def test_a_subclass_may_replace_a_helper(codec):
    class Encoder(codec.Encoder):
        def _encode_tensor(self, obj):
            return "replaced"

    class Decoder(codec.Decoder):
        def _decode_tensor(self, arr):
            return torch.zeros(7)

    item = MultiModalKwargsItem({"k": MultiModalFieldElem(data=torch.ones(1000), field=MultiModalBatchedField())})
    frames = Encoder().encode([torch.ones(1000), item])
    assert codec.Decoder().decode(frames) == [
        "replaced",
        {"k": {"data": "replaced", "field": ["batched", {"keep_on_cpu": False}]}},
    ]
    assert Encoder().encode_into(torch.ones(1000), bytearray())[0] == b"\xa8replaced"
    assert len(Decoder(list[torch.Tensor]).decode(codec.Encoder().encode([torch.ones(3)]))[0]) == 7
    assert len(Decoder(torch.Tensor).decode(codec.Encoder().encode(torch.ones(3)))) == 7
    assert len(Decoder(MultiModalKwargsItem).decode(codec.Encoder().encode(item))["k"].data) == 7
    array = Decoder(np.ndarray).decode(codec.Encoder().encode(np.arange(1000)))
    assert array.tolist() == list(range(1000))


@pytest.mark.parametrize("zone", [timezone.utc, timezone(timedelta(hours=-3, minutes=7))])
@pytest.mark.parametrize("insecure", ["0", "1"])
def test_dates_with_a_zone_are_written_as_vllm_writes_them(zone, insecure, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", insecure)
    for year in (1, 1969, 1970, 2020, 2300, 9999):
        value = {"a": [datetime(year, 2, 3, 4, 5, 6, 7, tzinfo=zone)]}
        encoder = MsgpackEncoder()
        assert encoder.encode(value) == CODECS["vllm"].Encoder().encode(value)
        assert encoder.counters["messages_left"] == 0


@both
def test_typed_messages_of_the_sockets(codec):
    outputs = codec.Decoder(EngineCoreOutputs).decode(codec.Encoder().encode(EngineCoreOutputs(engine_index=3, timestamp=1.5)))
    assert (outputs.engine_index, outputs.timestamp) == (3, 1.5)
    with pytest.raises(msgspec.ValidationError):
        codec.Decoder(EngineCoreRequest).decode(codec.Encoder().encode([1, 2, 3]))
