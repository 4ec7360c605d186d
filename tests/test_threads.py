"""Any thread: one Encoder may be used from many threads at once."""

from __future__ import annotations

import hashlib
import sys
import threading

import numpy as np
import pytest
from support.memory import in_fresh_process
from support.requests import leaf, request, same_bytes

from fastmm import Encoder, EngineCoreRequest, FastmmError, MmFlatField, encode_request

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _switch_often():
    """Many more switches between threads than in daily life."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def digest(frames):
    found = hashlib.blake2b()
    for frame in frames:
        found.update(memoryview(frame).nbytes.to_bytes(8, "little"))
        found.update(frame)
    return found.digest()


def in_threads(count, work):
    """Runs `work(number)` in threads that start together; raises what one of them raised."""
    errors = []
    barrier = threading.Barrier(count)

    def run(number):
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def messages():
    """Of every kind and size; those with a cast stay as they are, so that all threads may share them."""
    field = MmFlatField(slices=[(slice(i, i + 1),) for i in range(20)], dim=0)
    shared = torch.arange(3000.0)
    return [
        EngineCoreRequest("text", list(range(500)), arrival_time=1.0),
        request(shared, shared, torch.arange(900.0).reshape(30, 30).t(), np.arange(500), torch.ones(3)),
        request(*[torch.full((64,), float(i)) for i in range(20)]),
        request([shared[:100], (shared[100:300], 5)], prompt_embeds=shared),
        {"a": ["x" * 50_000, {"b": b"y" * 100}], "c": (1.5, None, field)},
        request(shared.to(torch.float16), shared.to(torch.float64)[::2]),
    ]


@pytest.mark.parametrize("options", [{}, {"threshold": 2**62}, {"dtype": "bfloat16", "inplace": False}], ids=str)
def test_four_threads_one_encoder_twenty_thousand_messages_all_equal(options):
    shared = messages()
    encoder = Encoder(**options)
    expected = [digest(Encoder(**options).encode(message)) for message in shared]
    wrong = []

    def work(number):
        for i in range(5000):
            which = (i * 7 + number) % len(shared)
            if digest(encoder.encode(shared[which])) != expected[which]:
                wrong.append(which)

    in_threads(4, work)
    assert wrong == []
    assert encoder.counters["messages"] == 20_000


def test_casts_in_place_in_four_threads():
    """Each thread hands over its own requests; large ones are cast without the GIL."""
    encoder = Encoder(dtype="bfloat16")

    def work(number):
        for i in range(300):
            size = (2000, 300_000)[i % 2]
            tensor = torch.full((size,), float(number * 1000 + i % 100))
            address = tensor.data_ptr()
            made = request(tensor, tensor[: size // 2].clone())
            frames = encoder.encode(made)
            assert frames[1].address == address
            wanted = torch.full((size,), float(number * 1000 + i % 100)).to(torch.bfloat16)
            assert torch.equal(leaf(made), wanted)
            assert bytes(frames[1]) == wanted.view(torch.int16).numpy().tobytes()

    in_threads(4, work)


def test_errors_in_one_thread_do_not_touch_the_others():
    encoder = Encoder()
    good, bad = request(torch.arange(1000.0)), request(torch.arange(1000.0), object())
    expected = same_bytes(encoder.encode(good))

    def work(number):
        for _ in range(2000):
            if number % 2:
                with pytest.raises(FastmmError):
                    encoder.encode(bad)
            else:
                assert same_bytes(encoder.encode(good)) == expected

    in_threads(4, work)


def test_every_way_to_encode_at_once():
    encoder = Encoder(hook=lambda _: "hooked")
    made = request(torch.arange(1000.0))
    made.session_id = object()
    expected = same_bytes(encoder.encode(made))

    def work(number):
        buffer = bytearray()
        for _ in range(1500):
            ways = (
                lambda: encoder.encode(made),
                lambda: encoder.encode_into(made, buffer),
                lambda: encoder.encode_many([made, made])[1],
                lambda: encode_request(made, hook=lambda _: "hooked"),
            )
            assert same_bytes(ways[number]()) == expected

    in_threads(4, work)


def test_a_tree_that_another_thread_changes_ends_in_a_message_or_an_error_and_no_crash():
    in_fresh_process("""
import dataclasses, enum, random, sys, threading
import numpy as np
import fastmm
sys.setswitchinterval(1e-6)
E = enum.Enum("E", {"A": [1, 2, [3]]})
D = dataclasses.make_dataclass("D", ["a", "b"])
S = dataclasses.make_dataclass("S", ["a", "b"], slots=True)
def leaf():
    return [E.A, np.float64(1.5), {"k": E.A, 5: [np.ones(100), E.A]}, D([E.A] * 3, np.ones(5)), S({"x": E.A}, [E.A]), (E.A, [E.A])]
tree = [leaf() for _ in range(5)]
encoder = fastmm.Encoder(hook=lambda _: [1])
stop = False
def change():
    rng = random.Random(1)
    while not stop:
        i = rng.randrange(5)
        tree[i] = leaf()
        tree[i][2].clear(); tree[i][3].a = object(); tree[i][4].b = None
        tree[i].append(object()); tree[i].pop()
def encode():
    done = 0
    while not stop:
        try: encoder.encode(tree)
        except fastmm.FastmmError as error: str(error)
        done += 1
    print(done)
threads = [threading.Thread(target=f) for f in (change, encode, encode)]
for t in threads: t.start()
threading.Event().wait(3)
stop = True
for t in threads: t.join()
""")


def test_a_deep_tree_on_a_small_stack():
    """The deepest tree that the options allow, in a thread with the stack that musl gives by default, eightfold."""
    in_fresh_process("""
import threading, fastmm
tree = 1
for _ in range(199): tree = {"k": tree} if _ % 2 else [tree]
done = []
def run(): done.append(len(fastmm.Encoder(max_depth=200).encode(tree)))
threading.stack_size(1 << 20)
thread = threading.Thread(target=run); thread.start(); thread.join()
assert done == [1]
""")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_that_was_forked_while_a_thread_was_casting_can_cast():
    in_fresh_process("""
import os, threading, time, warnings, torch, fastmm
from support.requests import request
warnings.simplefilter("ignore")
tensor = torch.ones(30_000_000)
thread = threading.Thread(target=lambda: fastmm.encode_request(request(tensor), dtype="bfloat16"))
forked = 0
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        try:
            fastmm.encode_request(request(tensor[:1000].clone(), tensor[1000:2000]), dtype="bfloat16")
            os._exit(0)
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    forked += 1
thread.join()
""")
