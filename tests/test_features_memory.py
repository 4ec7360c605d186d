"""Features hold the batch as long as they live, and not longer."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref

import pytest
from support.items import EMBED, KINDS, address_of, array_of, qwen, torch_or_skip

import fastmm
from fastmm import FastmmError, build_features


def test_the_batch_goes_with_its_last_leaf():
    given = qwen("numpy", [2, 3, 1])
    given["tensors"]["pixel_values"] = batch = given["tensors"]["pixel_values"].copy()
    gone = weakref.ref(batch)
    features = build_features(**given)
    frames = fastmm.encode_request(fastmm.EngineCoreRequest("r", [1], mm_features=features), threshold=0)
    del given, batch
    last = features[2].data["pixel_values"].data
    del features
    gc.collect()
    assert gone() is not None
    del last
    assert gone() is not None  # the frames
    del frames
    gc.collect()
    assert gone() is None


def test_torch_leaves_hold_the_storage_of_the_batch():
    torch = torch_or_skip()
    batch = torch.arange(12.0).reshape(6, 2)
    data = batch.data_ptr()
    features = build_features(**(qwen("torch", [2, 3, 1]) | {"tensors": {"x": batch}, "flat": {"x": [2, 3, 1]}, "batched": ()}))
    del batch
    gc.collect()
    assert [address_of(feature.data["x"].data) - data for feature in features] == [0, 16, 40]
    assert torch.cat([feature.data["x"].data for feature in features]).flatten().tolist() == list(range(12))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_whether_a_call_works_or_not(kind):
    given = qwen(kind, [2, 3, 1], embed_token_id=EMBED)
    given["prompt_token_ids"][given["placeholders"][0][0]] = 0  # one mask
    faulty = [
        given | {"flat": {"pixel_values": [2, 3, 2]}},
        given | {"placeholders": [(0, 3), (2, 3), (9, 1)]},
        given | {"placeholders": [(4, 3), (8, 3), (99, 1)]},
        given | {"batched": {"pixel_values"}},
    ]
    request = fastmm.EngineCoreRequest("r", [1], mm_features=build_features(**given), sampling_params=fastmm.SamplingParams())

    def once():
        build_features(**given)
        build_features(**given, full_slices=True, cached={1})
        fastmm.fan_out(request, 3, seeds=[1, 2, 3])
        for arguments in faulty:
            with pytest.raises(FastmmError):
                build_features(**arguments)

    for _ in range(20):
        once()
    gc.collect()
    tracemalloc.start()
    try:
        once()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100):
            once()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 8 << 10
    finally:
        tracemalloc.stop()


def test_many_threads_may_build_at_once():
    given = qwen("numpy", [5, 0, 7, 3] * 8, embed_token_id=EMBED)
    expected = build_features(**given)
    found = []

    def work():
        found.append(all(build_features(**given) == expected for _ in range(50)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_the_example_of_the_design():
    torch = torch_or_skip()
    counts = torch.tensor([1344, 352])
    pixel_values = torch.randn(int(counts.sum()), 6)
    expected = pixel_values.to(torch.bfloat16)
    ids = [1] * 4 + [151655] * 336 + [1] * 10 + [151655] * 88 + [2]
    features = build_features(
        tensors={
            "pixel_values": pixel_values,
            "image_grid_thw": torch.tensor([[1, 48, 28], [1, 16, 22]]),
            "patches_per_image": counts,
        },
        flat={"pixel_values": "patches_per_image"},
        batched={"image_grid_thw"},
        keep_on_cpu={"image_grid_thw"},
        placeholders=[(4, 336), (350, 88)],
        hashes=["a" * 64, "b" * 64],
        modality="image",
        prompt_token_ids=ids,
        embed_token_id=151655,
    )
    request = fastmm.EngineCoreRequest(
        request_id="r-1", prompt_token_ids=ids, mm_features=features, sampling_params=fastmm.SamplingParams(max_tokens=64)
    )
    decoded = fastmm.decode_request(fastmm.encode_request(request, dtype="bfloat16"))
    found = torch.cat([feature.data["pixel_values"].data for feature in decoded.mm_features])
    assert torch.equal(found, expected)
    assert found.dtype == torch.bfloat16
    assert [array_of(feature.data["image_grid_thw"].data).tolist() for feature in decoded.mm_features] == [
        [1, 48, 28],
        [1, 16, 22],
    ]
