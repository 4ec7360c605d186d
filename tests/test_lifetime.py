"""Memory outlives the send, and nothing is left behind."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref

import numpy as np
import pytest
from support.memory import in_fresh_process
from support.requests import feature, leaf, request, same_bytes

from fastmm import Encoder, EngineCoreRequest, FastmmError, PlaceholderRange, SamplingParams, WireTensor, encode_request

torch = pytest.importorskip("torch")


def filled(number, count=10_000):
    return torch.full((count,), float(number))


def expected(number, count=10_000):
    return np.full(count, number, np.float32).tobytes()


# --- who holds what -------------------------------------------------------------------------------------------------------


def test_a_frame_keeps_the_memory_of_a_tensor_that_is_gone():
    frames = [encode_request(filled(i))[1] for i in range(50)]
    gc.collect()
    churn = [filled(99) for _ in range(50)]
    assert [bytes(frame) == expected(i) for i, frame in enumerate(frames)] == [True] * 50
    del churn


def test_a_view_of_a_frame_keeps_the_memory_of_a_frame_that_is_gone():
    views = [memoryview(encode_request(filled(i))[1])[4:] for i in range(50)]
    views += [np.frombuffer(encode_request(filled(i))[1], np.float32) for i in range(50)]
    gc.collect()
    churn = [filled(99) for _ in range(100)]
    for i in range(50):
        assert bytes(views[i]) == expected(i)[4:]
        assert views[50 + i].tobytes() == expected(i)
    del churn


SOURCES = {
    "torch": filled,
    "view": lambda i: filled(i, 20_000)[10_000:],
    "numpy": lambda i: np.full(10_000, i, np.float32),
    "numpy view": lambda i: np.full((2, 10_000), i, np.float32)[1],
    "torch of numpy": lambda i: torch.from_numpy(np.full(10_000, i, np.float32)),
    "numpy of torch": lambda i: filled(i).numpy(),
    "strided": lambda i: torch.full((100, 100), float(i)).t(),
    "wire": lambda i: WireTensor("float32", (10_000,), expected(i)),
    "frombuffer": lambda i: torch.frombuffer(bytearray(expected(i)), dtype=torch.float32),
    "dlpack": lambda i: np.from_dlpack(filled(i)),
}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("kind", SOURCES)
def test_frames_may_be_dropped_in_any_order_and_the_rest_keep_their_bytes(kind, dtype):
    rng = random.Random(5)
    frames = {}
    for i in range(40):
        made = request(SOURCES[kind](i), SOURCES[kind](i + 100))
        sent = encode_request(made, dtype=dtype)
        frames[i], frames[i + 100] = sent[1:]
        if i % 3 == 0:
            frames[i] = memoryview(frames[i])
    kept = {i: bytes(frame) for i, frame in frames.items()}
    order = list(frames)
    rng.shuffle(order)
    for i in order:
        del frames[i]
        churn = filled(7)
        assert all(bytes(frames[j]) == kept[j] for j in list(frames)[:5])
    del churn


@pytest.mark.parametrize("kind", SOURCES)
def test_the_memory_is_free_as_soon_as_the_last_frame_is_gone(kind):
    if kind in ("wire", "strided"):
        pytest.skip("owned by an object that takes no weak reference")
    value = SOURCES[kind](1)
    owner = value.untyped_storage() if isinstance(value, torch.Tensor) else value
    gone = []
    weakref.finalize(value, gone.append, 1)
    frames = encode_request([value])
    del value, owner
    second = memoryview(frames[1])
    del frames
    gc.collect()
    assert bytes(second) == expected(1)
    del second
    gc.collect()
    assert gone == [1]


@pytest.mark.no_asan
def test_the_batch_is_free_when_the_last_of_its_rows_is_gone():
    in_fresh_process("""
import gc, torch, fastmm
from support.memory import resident_nbytes
from support.requests import request
fastmm.Encoder().encode(request(torch.ones(1000)))
before = resident_nbytes()
batch = torch.ones(16, 1 << 20)
frames = fastmm.encode_request(request(*batch))[1:]
del batch; gc.collect()
while len(frames) > 1:
    frames.pop()
    assert resident_nbytes() - before > 60 << 20
frames.pop()
assert resident_nbytes() - before < 4 << 20
""")


# --- what the owner of a tensor does after the encode ----------------------------------------------------------------------


def test_the_frame_views_the_tensors_memory_so_the_tensor_is_written_after_the_send():
    tensor = filled(1)
    frames = encode_request(tensor)
    tensor.fill_(2)
    assert bytes(frames[1]) == expected(2)


def churn_torch():
    return [torch.full((10_000,), 77.0) for _ in range(30)]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "data", torch.zeros(5)),
        lambda t: t.set_(),
        lambda t: t.set_(torch.zeros(20_000, dtype=t.dtype)),
        lambda t: t.resize_(10),
        lambda t: t.resize_(0),
    ],
    ids=["data", "set", "set other", "resize smaller", "resize to nothing"],
)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_tensor_that_is_given_other_memory_leaves_the_frame_its_own(change, dtype):
    tensor = filled(3)
    made = request(tensor)
    frames = encode_request(made, dtype=dtype)
    before = bytes(frames[1])
    change(tensor)
    change(leaf(made))
    kept = churn_torch()
    assert bytes(frames[1]) == before
    del kept


def test_an_array_cannot_be_resized_while_a_frame_views_it():
    array = np.full(10_000, 3, np.float32)
    frames = encode_request([array])
    with pytest.raises(ValueError, match="resize"):
        array.resize(1_000_000)
    data = bytearray(expected(3))
    frames += encode_request(WireTensor("float32", (10_000,), memoryview(data)))
    with pytest.raises(BufferError):
        data.clear()
    assert bytes(frames[1]) == bytes(frames[3]) == expected(3)


def test_gradients_flow_through_a_tensor_whatever_frames_there_are():
    tensor = torch.ones(1000, requires_grad=True)
    frames = encode_request([tensor, tensor * 2])
    (tensor * 3).sum().backward()
    assert tensor.grad[0] == 3
    del frames
    assert tensor.sum() == 1000


# --- threads, exit --------------------------------------------------------------------------------------------------------


def test_frames_are_dropped_by_other_threads():
    import queue

    box = queue.SimpleQueue()
    bad = []

    def drop():
        while (item := box.get()) is not None:
            number, frames = item
            if bytes(frames[1]) != np.full(1000, number, np.float32).tobytes():
                bad.append(number)
            del item, frames

    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(3000):
        box.put((number, encode_request(request(torch.full((1000,), float(number))))))
    for _ in threads:
        box.put(None)
    for thread in threads:
        thread.join()
    assert bad == []


AT_EXIT = {
    "a global": "frames = encode(request(torch.ones(10000), torch.ones(100, 100).t()), dtype='bfloat16')",
    "a cycle": "frames = encode(request(torch.ones(10000))); frames.append(frames)",
    "a memoryview": "view = memoryview(encode(request(torch.ones(10000)))[1])",
    "a numpy array": "array = numpy.frombuffer(encode(request(torch.ones(10000)))[1], 'u1')",
    "a module": "sys.frames = encode(request(torch.ones(10000), numpy.ones(1000)))",
    "a large main frame": "frames = encode(request(torch.ones(10000)), threshold=2**62)",
    "a new leaf": "made = request(torch.ones(10000), numpy.ones(10000)); encode(made, dtype='float16')",
    "a thread": """
import threading, time
def forever():
    while True:
        encode(request(numpy.ones(200000, 'f4')), dtype='bfloat16')  # torch aborts in such a thread all by itself
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
""",
    "atexit": """
import atexit
frames = encode(request(torch.ones(10000)))
atexit.register(lambda: print(len(encode(request(torch.ones(1000)), dtype='bfloat16'))))
""",
    "a finalizer": """
class Late:
    def __del__(self):
        try: self.encode(self.made)
        except BaseException: pass
late = Late(); late.encode = encode; late.made = request(torch.ones(1000)); late.self = late
""",
}


@pytest.mark.parametrize("holder", AT_EXIT)
def test_frames_that_live_at_interpreter_exit_end_quietly(holder):
    in_fresh_process(f"""
import sys, numpy, torch
from fastmm import encode_request as encode
from support.requests import request
{AT_EXIT[holder]}
print("reached the end")
""")


# --- zmq ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
def test_frames_over_real_sockets_arrive_whole_while_everything_else_is_dropped(transport, tmp_path):
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        address = {"inproc": "inproc://frames", "ipc": f"ipc://{tmp_path}/s", "tcp": "tcp://127.0.0.1"}[transport]
        if transport == "tcp":
            address = f"{address}:{receiver.bind_to_random_port(address)}"
        else:
            receiver.bind(address)
        sender.set_hwm(0)
        receiver.set_hwm(0)
        sender.connect(address)
        encoder = Encoder(dtype="bfloat16")
        for number in range(60):  # all are sent, and dropped here, before the first one is read
            frames = encoder.encode(request(filled(number, 100_000), torch.full((200, 300), float(number)).t(), torch.ones(3)))
            sender.send_multipart(frames, copy=False)
            del frames
        gc.collect()
        kept = [filled(99, 100_000) for _ in range(10)]
        for number in range(60):
            assert receiver.poll(10_000)
            parts = receiver.recv_multipart(copy=False)
            assert len(parts) == 3
            bits = torch.tensor(float(number), dtype=torch.bfloat16).view(torch.int16).item()
            for part, count in zip(parts[1:], (100_000, 60_000), strict=True):
                assert np.array_equal(np.frombuffer(part, np.int16), np.full(count, bits, np.int16))
        del kept
    finally:
        sender.close(0)
        receiver.close(0)
        context.term()


def test_a_tracker_says_when_the_memory_of_a_frame_is_free_again():
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context:
        sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        receiver.bind("inproc://tracked")
        sender.connect("inproc://tracked")
        gone = []
        tensor = filled(1, 1_000_000)
        weakref.finalize(tensor.untyped_storage(), gone.append, 1)
        frames = encode_request([tensor])
        tracker = sender.send(frames[1], copy=False, track=True)
        assert not tracker.done
        del frames, tensor
        assert bytes(receiver.recv(copy=False).buffer) == expected(1, 1_000_000)
        gc.collect()
        tracker.wait(10)
        sender.close(0)
        receiver.close(0)


# --- nothing left behind --------------------------------------------------------------------------------------------------


def full_request():
    made = request(
        torch.ones(500), [torch.ones(10), (torch.ones(300), 5)], np.ones((30, 20)).T, prompt_embeds=torch.ones(10, 20)
    )
    made.mm_features.append(feature(None))
    made.mm_features[0].mm_position = PlaceholderRange(0, 300, torch.ones(300, dtype=torch.bool))
    made.sampling_params = SamplingParams(stop=["a"], extra_args={"k": [1.5, {"z": b"x"}]}, logit_bias={5: 1.0})
    made.trace_headers = {"t": "u"}
    return made


def everything(value, found=None):
    """All objects of a tree, containers first."""
    found = {} if found is None else found
    if id(value) in found:
        return found
    found[id(value)] = value
    children = []
    if isinstance(value, dict):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple)):
        children = list(value)
    elif hasattr(type(value), "__dataclass_fields__"):
        children = [getattr(value, name) for name in type(value).__dataclass_fields__]
    for child in children:
        if type(child) not in (int, float, bool, str, bytes, type(None)):
            everything(child, found)
    return found


@pytest.mark.parametrize(
    "options", [{}, {"threshold": 2**62}, {"dtype": "bfloat16", "inplace": False}, {"dedup": False}], ids=str
)
def test_reference_counts_return_to_their_start(options):
    made = full_request()
    objects = list(everything(made).values())
    encoder = Encoder(**options)
    encoder.encode(made)
    before = [sys.getrefcount(x) for x in objects]
    for _ in range(100):
        frames = encoder.encode(made)
        encoder.encode_into(made, bytearray())
        encoder.encode_many([made, made])
    del frames
    assert [sys.getrefcount(x) for x in objects] == before
    made.session_id = object()
    for _ in range(100):
        with pytest.raises(FastmmError):
            encoder.encode(made)
    assert [sys.getrefcount(x) for x in objects] == before


def test_reference_counts_return_to_their_start_when_leaves_are_replaced():
    none, marker = sys.getrefcount(None), feature(None)
    before = sys.getrefcount(marker)
    for _ in range(200):
        made = full_request()
        made.mm_features[3] = marker
        encode_request(made, dtype="bfloat16")
        encode_request(made, dtype="bfloat16")
    del made
    gc.collect()
    assert sys.getrefcount(marker) == before
    if sys.version_info < (3, 12):  # None is immortal from then on
        assert abs(sys.getrefcount(None) - none) < 100


SCENARIOS = {
    "text": "made = [list(range(100)), 'x' * 50]; run = lambda: encoder.encode(made)",
    "images": "made = request(torch.ones(500), torch.ones(300, 2).t()); run = lambda: encoder.encode(made)",
    "inline": "made = request(torch.ones(5), numpy.ones(3)); run = lambda: encoder.encode(made)",
    "a cast in place": "run = lambda: cast.encode(request(torch.ones(500), numpy.ones(500, 'f4')))",
    "a cast out of place": "made = request(torch.ones(500), torch.ones(30, 30).t()); run = lambda: out.encode(made)",
    "large main frames": "made = ['x' * 40000]; run = lambda: encoder.encode(made)",
    "into": "made = request(torch.ones(500)); buffer = bytearray(); run = lambda: encoder.encode_into(made, buffer)",
    "many": "made = request(torch.ones(500)); run = lambda: encoder.encode_many([made, made])",
    "an error": "made = request(torch.ones(500), torch.ones(30, 30).t(), object()); run = lambda: failing(cast, made)",
    "a hook": "made = [object(), object()]; run = lambda: hooked.encode(made)",
    "dropped late": "made = request(torch.ones(500)); run = lambda: (kept.append(encoder.encode(made)), kept.pop(0))",
    "a class of options": "made = request(torch.ones(500)); run = lambda: fastmm.encode_request(made, hook=lambda x: x)",
}


@pytest.mark.no_asan
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_resident_memory_is_flat_over_a_hundred_thousand_messages(scenario):
    in_fresh_process(f"""
import gc, numpy, torch, fastmm
from support.memory import resident_nbytes
from support.requests import request
encoder, cast = fastmm.Encoder(), fastmm.Encoder(dtype="bfloat16")
out = fastmm.Encoder(dtype="bfloat16", inplace=False)
hooked = fastmm.Encoder(hook=lambda x: numpy.ones(500))
kept = [None] * 100
def failing(encoder, made):
    try: encoder.encode(made)
    except fastmm.SchemaError: pass
{SCENARIOS[scenario]}
for _ in range(3000): run()
gc.collect(); blocks = __import__("sys").getallocatedblocks(); before = resident_nbytes()
for _ in range(100000): run()
gc.collect()
grown = resident_nbytes() - before
assert grown < 2 << 20, f"{{grown}} bytes"
assert __import__("sys").getallocatedblocks() - blocks < 1000
""")


def test_an_encoder_that_is_dropped_takes_its_buffers_along():
    gone = []

    def hook(value):
        return 1

    weakref.finalize(hook, gone.append, 1)
    encoder = Encoder(hook=hook)
    encoder.encode([object(), torch.ones(1000)])
    del encoder, hook
    gc.collect()
    assert gone == [1]


def test_a_message_is_not_kept_by_the_encoder():
    encoder = Encoder(dtype="bfloat16")
    gone = []
    made = request(torch.ones(1000), np.ones(1000))
    for value in (leaf(made), leaf(made, 1)):
        weakref.finalize(value, gone.append, 1)
    del value
    encoder.encode(made)
    del made
    gc.collect()
    assert gone == [1, 1]
    bad = EngineCoreRequest("r", [1], mm_features=[feature(filled(1)), feature(object())])
    weakref.finalize(leaf(bad), gone.append, 2)
    with pytest.raises(FastmmError):
        encoder.encode(bad)
    del bad
    gc.collect()
    assert gone == [1, 1, 2]


def test_the_same_frames_may_be_sent_twice():
    frames = encode_request(request(filled(1)))
    assert same_bytes(frames) == same_bytes(frames)


@pytest.mark.no_asan
def test_the_leak_counter_sees_a_leak():
    """The measure of the tests above, on something that leaks."""
    in_fresh_process("""
from support.memory import resident_nbytes
before = resident_nbytes()
kept = [bytearray(100) for _ in range(100_000)]
assert resident_nbytes() - before > 2 << 20
""")
