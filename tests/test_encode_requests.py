"""Several requests at once: what they share is walked once, cast once, sent as the same frames; all of them or none."""

from __future__ import annotations

import pytest
from support.memory import in_fresh_process
from support.payloads import assert_untouched, bits, values
from support.requests import feature, leaf, request, resolve, same_bytes, sent, unpacked

from fastmm import Encoder, EngineCoreRequest, FastmmError, LimitError, SamplingParams, encode_request, encode_requests

torch = pytest.importorskip("torch")


def samples(count, **more):
    features = request(values(), [values(seed=1), (values(seed=2),)], torch.arange(100)).mm_features
    return [
        EngineCoreRequest(
            f"r{i}", [1, 2, 3], mm_features=features, arrival_time=0.0, sampling_params=SamplingParams(seed=i), **more
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("threshold", [0, 256, 2**62])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("dedup", [True, False])
def test_each_message_is_the_one_that_encode_request_writes(dtype, threshold, dedup):
    options = {"dtype": dtype, "threshold": threshold, "dedup": dedup}
    together = encode_requests(samples(5), **options)
    alone = [encode_request(made, **options) for made in samples(5)]
    assert [same_bytes(frames) for frames in together] == [same_bytes(frames) for frames in alone]


def test_what_is_shared_is_cast_once_and_sent_from_the_very_same_memory():
    requests = samples(16)
    encoder = Encoder(dtype="bfloat16")
    together = encoder.encode_many(requests)
    for frames in together[1:]:
        assert [frame.address for frame in frames[1:]] == [frame.address for frame in together[0][1:]]
    assert encoder.counters["nbytes_cast"] == 3 * 4000
    assert encoder.counters["messages"] == 16
    assert leaf(requests[0]).dtype == torch.bfloat16
    again = encoder.encode_many(requests)
    assert [same_bytes(frames) for frames in again] == [same_bytes(frames) for frames in together]
    assert encoder.counters["nbytes_cast"] == 3 * 4000 + 4000  # the leaf in the tuple cannot be put back


def test_features_are_walked_once():
    asked = []

    class Counted:
        def __index__(self):
            asked.append(1)
            return 3

    from fastmm import MmFlatField

    features = [feature(torch.ones(100), field=MmFlatField(slices=[(slice(Counted()),)], dim=0))]
    encode_requests([EngineCoreRequest(f"{i}", [1], mm_features=features) for i in range(10)])
    assert len(asked) == 1


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("threshold", [0, 2**62])
def test_memory_that_several_requests_hold_is_cast_once_wherever_it_hangs(dedup, threshold):
    """prompt_embeds of n samples; another list of the same tensors; prompt_embeds that alias a shared feature."""
    tensor = values()
    expected = bits(values().to(torch.bfloat16))
    features = request(tensor).mm_features
    requests = [
        EngineCoreRequest("a", None, prompt_embeds=tensor),
        EngineCoreRequest("b", None, prompt_embeds=tensor),
        EngineCoreRequest("c", None, mm_features=features),
        EngineCoreRequest("d", None, mm_features=features, prompt_embeds=tensor.view(10, 100)),
        request(tensor, [tensor]),
    ]
    together = encode_requests(requests, dtype="bfloat16", dedup=dedup, threshold=threshold)
    for index in (0, 1, 3):
        assert resolve(unpacked(together[index])[9], together[index])[2] == expected
    for index in (2, 3, 4):
        assert sent(together[index])[2] == expected
    assert bits(tensor.view(torch.bfloat16)[:1000]) == expected
    again = encode_requests(requests, dtype="bfloat16", dedup=dedup, threshold=threshold)
    assert [same_bytes(frames) for frames in again] == [same_bytes(frames) for frames in together]


def test_overlaps_between_requests_are_never_written_to():
    tensor = values()
    requests = [request(tensor[:600]), request(tensor[400:]), request(tensor.view(torch.int32))]
    together = encode_requests(requests, dtype="bfloat16")
    assert sent(together[0])[2] == bits(values()[:600].to(torch.bfloat16))
    assert sent(together[1])[2] == bits(values()[400:].to(torch.bfloat16))
    assert sent(together[2])[2] == bits(values())
    assert_untouched(tensor, values())


@pytest.mark.parametrize("position", [0, 1, 4])
def test_one_that_fails_leaves_all_as_they_were(position):
    requests = samples(5)
    requests.append(request(values(seed=7)))
    requests[position] = request(values(seed=8), object())
    first = leaf(requests[5])
    shared = leaf(requests[3])
    for _ in range(2):
        with pytest.raises(FastmmError):
            encode_requests(requests, dtype="bfloat16")
        assert leaf(requests[5]) is first
        assert leaf(requests[3]) is shared
        assert_untouched(first, values(seed=7))
        assert_untouched(shared, values())


def test_the_frames_of_one_request_are_its_own():
    """Lists that are not shared, tensors that are: each message points to its own frames."""
    tensor = torch.arange(1000.0)
    together = encode_requests([request(tensor, torch.ones(100)), request(torch.ones(200), tensor)])
    assert sent(together[0], 0)[2] == sent(together[1], 1)[2] == tensor.numpy().tobytes()
    assert sent(together[1], 0)[2] == torch.ones(200).numpy().tobytes()
    assert [len(frames) for frames in together] == [3, 3]


def test_lists_that_alternate_are_right_all_the_same():
    one, two = request(torch.arange(1000.0)).mm_features, request(torch.arange(500.0), torch.ones(100)).mm_features
    requests = [EngineCoreRequest(f"{i}", [1], mm_features=[one, two, two, None][i % 4]) for i in range(12)]
    for made, frames in zip(requests, encode_requests(requests), strict=True):
        assert same_bytes(frames) == same_bytes(encode_request(made))


def test_anything_may_be_written_together():
    values_ = [1, "a", (1, request(torch.ones(100))), [request(torch.ones(100))], {"k": None}]
    assert [same_bytes(frames) for frames in encode_requests(values_)] == [same_bytes(encode_request(v)) for v in values_]
    assert encode_requests([]) == []
    assert encode_requests(iter([1, 2])) == [[b"\x01"], [b"\x02"]]


def test_an_iterable_that_raises_casts_nothing():
    first = request(values())
    tensor = leaf(first)

    def broken():
        yield first
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        encode_requests(broken(), dtype="bfloat16")
    assert leaf(first) is tensor
    assert_untouched(tensor, values())
    for wrong in (None, 5):
        with pytest.raises(TypeError):
            encode_requests(wrong)


def test_limits_hold_for_each_message():
    requests = samples(4)
    nbytes = encode_request(requests[0], threshold=0)
    total = sum(len(frame) for frame in nbytes[1:])
    assert len(encode_requests(requests, max_payload_nbytes=total)) == 4
    with pytest.raises(LimitError):
        encode_requests(requests, max_payload_nbytes=total - 1)
    assert len(encode_requests(requests, max_frames=4)) == 4
    with pytest.raises(LimitError):
        encode_requests(requests, max_frames=3)


def test_a_consumer_hears_of_each_message():
    class Consumer:
        messages = 0

        def new_message(self):
            self.messages += 1

        def __call__(self, tensor):
            return {"message": self.messages}

    consumer = Consumer()
    together = Encoder(oob_tensor_consumer=consumer).encode_many([request(torch.ones(1000)), request(torch.ones(1000))])
    assert [unpacked(frames)[2][0]["data"]["pixel_values"]["data"][2]["message"] for frames in together] == [1, 2]


def test_what_a_sibling_copies_counts_as_its_own():
    features = request(torch.ones(1000)).mm_features
    alone = EngineCoreRequest("b", [1], mm_features=features, prompt_embeds=torch.ones(10, 100))
    for limit in ({"max_payload_nbytes": 5000}, {"max_frames": 1}):
        with pytest.raises(LimitError):
            encode_request(alone, **limit)
        with pytest.raises(LimitError):
            encode_requests([EngineCoreRequest("a", [1], mm_features=features), alone], **limit)


def test_a_generator_that_uses_one_list_again_is_written_as_the_list_is_in_the_end_or_was():
    shared = []

    def refill():
        for i in range(3):
            shared[:] = request(torch.full((100,), float(i))).mm_features
            yield EngineCoreRequest(f"{i}", [1], mm_features=shared)

    together = encode_requests(refill())
    firsts = [sent(frames)[2][:4] for frames in together]
    in_the_end = torch.full((1,), 2.0).numpy().tobytes()
    assert firsts in ([torch.full((1,), float(i)).numpy().tobytes() for i in range(3)], [in_the_end] * 3)


def test_a_hook_that_takes_the_shared_list_apart_ends_in_no_crash():
    in_fresh_process("""
import gc, numpy as np, fastmm
class Thing: pass
def churn(): gc.collect(); return [[i] for i in range(5000)], [bytearray(s) for s in (56, 64, 72, 88, 120) for _ in range(500)]
for drop in ("features", "requests", "both"):
    features = [[np.ones(100), Thing()] for _ in range(3)]
    requests = [fastmm.EngineCoreRequest(f"{i}", [1], mm_features=features) for i in range(5)]
    def hook(_):
        if drop != "requests":
            for r in requests: r.mm_features = None
            features_gone = globals().pop("features", None); del features_gone
        if drop != "features": requests.clear()
        churn()
        return 1
    try: print(len(fastmm.encode_requests(requests, hook=hook)))
    except fastmm.FastmmError as error: print(error)
""")
