"""The messages whose frames are kept as golden bytes, written against a family (see `families`)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .families import NUMPY_DTYPES, SAMPLING_VALUES, TORCH_DTYPES, Builder, all_sampling, value_of


@dataclass(frozen=True)
class Case:
    """A message, and the threshold from which its tensors leave the main frame."""

    name: str
    build: Builder
    threshold: int = 256


def _ids(count: int, step: int = 7919) -> list[int]:
    return [(index * step) % 152064 for index in range(count)]


def _request(f: SimpleNamespace, **fields: Any) -> Any:
    fields = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "arrival_time": 1764430000.25} | fields
    return f.request(**fields)


def _image(f: SimpleNamespace, elems: dict[str, Any], *, index: int = 0, **fields: Any) -> Any:
    fields = {
        "data": f.item(elems),
        "modality": "image",
        "identifier": f"id-{index}",
        "mm_position": f.placeholder(offset=4 * index, length=4),
        "mm_hash": f"hash-{index}",
    } | fields
    return f.feature(**fields)


def _one_elem(f: SimpleNamespace, data: Any, field: Any = None) -> Any:
    return _request(f, mm_features=[_image(f, {"pixel_values": f.elem(data=data, field=field or f.batched())})])


def _flat_images(f: SimpleNamespace, count: int) -> Any:
    field = f.flat(slices=[slice(2 * i, 2 * i + 2) for i in range(count)])
    grid = f.batched(keep_on_cpu=True)
    return _request(
        f,
        prompt_token_ids=_ids(4 * count),
        mm_features=[
            _image(
                f,
                {
                    "pixel_values": f.elem(data=f.tensor("bfloat16", (2, 96), i), field=field),
                    "image_grid_thw": f.elem(data=f.tensor("int64", (3,), i), field=grid),
                },
                index=i,
            )
            for i in range(count)
        ],
        sampling_params=f.sampling(max_tokens=64),
    )


def _everything(f: SimpleNamespace) -> Any:
    return _request(
        f,
        request_id="request-with-a-name-of-more-than-31-bytes",
        prompt_token_ids=_ids(40),
        mm_features=[
            _image(
                f,
                {
                    "pixel_values": f.elem(data=f.tensor("float32", (4, 24), 1), field=f.flat(slices=[slice(0, 4)])),
                    "sizes": f.elem(data=[[336, 448], [True, 2.5]], field=f.shared(batch_size=2)),
                },
                mm_position=f.placeholder(offset=3, length=9, is_embed=f.tensor("bool", (9,), 2)),
            )
        ],
        sampling_params=all_sampling(f),
        lora_request=f.lora(lora_name="ad", lora_int_id=3, lora_path="/adapters/ad", base_model_name="m", load_inplace=True),
        cache_salt="salt",
        data_parallel_rank=2,
        prompt_embeds=f.tensor("bfloat16", (5, 64), 3),
        prompt_is_token_ids=[True, False, True],
        client_index=1,
        current_wave=70000,
        priority=-5,
        trace_headers={"traceparent": "00-ab-cd-01"},
        resumable=True,
        external_req_id="x",
        reasoning_ended=False,
        reasoning_parser_kwargs={"effort": "high", "depth": [1, {"a": None}]},
        abort_immediately=True,
        session_id="s",
        kv_hints=f.kv_hints(
            protocol_version="1",
            message_id="m",
            actions=[f.kv_action(action_id="a", action_type="pin", action_version="2", payload={"ttl": 3.5})],
        ),
    )


def _stats(f: SimpleNamespace) -> Any:
    return f.scheduler_stats(
        num_running_reqs=3,
        num_kv_fetch_reqs_by_stage={"in_progress": 2},
        step_counter=2**40,
        kv_cache_usage=0.25,
        iteration_details=f.iteration_details(1, 2, 3, 4, 5, 6.5),
        prefix_cache_stats=f.prefix_cache_stats(requests=2, queries=100, hits=64),
        kv_cache_eviction_events=[f.eviction(1.5, 0.5, (0.25, 0.75))],
        spec_decoding_stats=f.spec_decoding(num_spec_tokens=2, num_accepted_tokens_per_pos=[1, 0]),
        kv_connector_stats={"n": 1, "parts": [1, 2.5]},
        waiting_lora_adapters={"ad": 1},
        cudagraph_stats=f.cudagraph(1, 8, 7, "FULL"),
        perf_stats=f.perf(num_flops_per_gpu=10**15, debug_stats=f.debug_perf(calc_duration=0.5, context_breakdown={"a": 1})),
    )


def _full_output(f: SimpleNamespace) -> Any:
    return f.output(
        request_id="r",
        new_token_ids=[5, 70000],
        new_logprobs=f.logprobs_lists(f.array("<i4", (2, 6), 1), f.array("<f4", (2, 6), 2), f.array("<i4", (2,), 3), [0, 2]),
        new_prompt_logprobs_tensors=f.logprobs_tensors(
            f.tensor("int32", (40, 2), 1), f.tensor("float32", (40, 2), 2), f.tensor("int32", (40,), 3)
        ),
        pooling_output=f.tensor("float32", (128,), 4),
        finish_reason=f.finish_reason.LENGTH,
        stop_reason="end",
        events=[f.event(f.event_type.QUEUED, 1.5), f.event(f.event_type.SCHEDULED, 2.5)],
        kv_transfer_params={"remote": [1, 2]},
        ec_transfer_params={"a": None},
        trace_headers={"t": "1"},
        prefill_stats=f.prefill_stats(num_prompt_tokens=40, num_computed_tokens=8, num_cached_tokens=32),
        routed_experts=f.array("<i2", (40, 4, 2), 5),
        num_nans_in_logits=1,
        mm_cache_miss_hashes=["h"],
        new_sampling_mask=f.sampling_mask(f.array("<i4", (7,), 6), f.array("<i8", (3,), 7), None),
        spec_decode_metrics=f.spec_decode_metrics(num_spec_tokens=2, histogram=[1, 2]),
        prompt_token_id_logprobs=f.tensor("float32", (2, 3), 8),
        error=f.error("validation_error", "no", True),
    )


CASES: list[Case] = [
    Case("text", lambda f: _request(f)),
    Case("text-no-ids", lambda f: _request(f, prompt_token_ids=None)),
    Case("text-2048-ids", lambda f: _request(f, prompt_token_ids=_ids(2048))),
    Case("text-id-widths", lambda f: _request(f, prompt_token_ids=[0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32])),
    Case("text-15-ids", lambda f: _request(f, prompt_token_ids=_ids(15))),
    Case("text-16-ids", lambda f: _request(f, prompt_token_ids=_ids(16))),
    Case("text-unicode", lambda f: _request(f, request_id="\u00e9\u20ac\U0001f600" * 9)),
    Case("everything", _everything),
    Case("everything-at-0", _everything, 0),
    Case("everything-inline", _everything, 2**62),
    Case("no-features", lambda f: _request(f, mm_features=[])),
    Case("cached-item", lambda f: _request(f, mm_features=[_image(f, {}, data=None, mm_hash=None)])),
    Case("empty-item", lambda f: _request(f, mm_features=[_image(f, {})])),
    Case("cached-elem", lambda f: _one_elem(f, None)),
    Case("int", lambda f: _one_elem(f, 3)),
    Case("bool", lambda f: _one_elem(f, True)),
    Case("float", lambda f: _one_elem(f, 2.5)),
    Case("nested-scalars", lambda f: _one_elem(f, [1, [2.5, [False, -(2**40)]], []])),
    Case("tuple", lambda f: _one_elem(f, (1, (2, 3)))),
    Case("nested-tensors", lambda f: _one_elem(f, [f.tensor("float32", (80,), 1), [f.tensor("int64", (2,), 2), 3, 2.5]])),
    Case("flat-1", lambda f: _flat_images(f, 1)),
    Case("flat-5", lambda f: _flat_images(f, 5)),
    Case("flat-20", lambda f: _flat_images(f, 20)),
    Case("flat-5-inline", lambda f: _flat_images(f, 5), 1 << 20),
    Case(
        "flat-dim-1",
        lambda f: _one_elem(
            f,
            f.tensor("float32", (4, 6)),
            f.flat(slices=[(slice(None), slice(0, 6)), (slice(None), slice(6, 300))], dim=1, keep_on_cpu=True),
        ),
    ),
    Case("flat-dim-minus-1", lambda f: _one_elem(f, f.tensor("int8", (4, 6)), f.flat(slices=(slice(None, None, 2),), dim=-1))),
    Case("flat-no-slices", lambda f: _one_elem(f, 1, f.flat(slices=[]))),
    Case("shared", lambda f: _one_elem(f, f.tensor("float16", (7,)), f.shared(batch_size=70000, keep_on_cpu=True))),
    Case("threshold-255", lambda f: _one_elem(f, [f.tensor("uint8", (n,), n) for n in (254, 255, 256, 257)]), 255),
    Case("threshold-256", lambda f: _one_elem(f, [f.tensor("uint8", (n,), n) for n in (254, 255, 256, 257)]), 256),
    Case("threshold-0", lambda f: _one_elem(f, [f.tensor("uint8", shape, 1) for shape in ((), (0,), (1,), (3, 0))]), 0),
    Case("threshold-1", lambda f: _one_elem(f, [f.tensor("uint8", shape, 1) for shape in ((), (0,), (1,), (3, 0))]), 1),
    Case(
        "ext-sizes",
        lambda f: _one_elem(f, [f.tensor("uint8", (n,), n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 255, 256)]),
        999,
    ),
    Case("ext-16-bit", lambda f: _one_elem(f, f.tensor("uint8", (65535,))), 1 << 20),
    Case("ext-32-bit", lambda f: _one_elem(f, f.tensor("uint8", (65536,))), 1 << 20),
    Case("large-aux", lambda f: _one_elem(f, f.tensor("bfloat16", (1024, 64)))),
    Case(
        "is-embed",
        lambda f: _request(f, mm_features=[_image(f, {}, mm_position=f.placeholder(1, 300, f.tensor("bool", (300,))))]),
    ),
    Case("prompt-embeds", lambda f: _request(f, prompt_token_ids=None, prompt_embeds=f.tensor("float32", (9, 16)))),
    Case("sampling", lambda f: _request(f, sampling_params=f.sampling())),
    Case("sampling-greedy", lambda f: _request(f, sampling_params=f.sampling(temperature=0, top_p=0.5, top_k=5, min_p=0.25))),
    Case("sampling-all", lambda f: _request(f, sampling_params=all_sampling(f))),
    Case("pooling", lambda f: _request(f, pooling_params=f.pooling())),
    Case(
        "pooling-all",
        lambda f: _request(
            f,
            pooling_params=f.pooling(
                use_activation=True,
                dimensions=64,
                step_tag_id=3,
                returned_token_ids=[1, 2],
                task="token_embed",
                requires_token_ids=True,
                skip_reading_prefix_cache=False,
                late_interaction_params=f.late_interaction("cache_query", "k", 3),
                extra_kwargs={"a": [1.5]},
                late_chunking_params=f.late_chunking(512),
            ),
        ),
    ),
    Case("lora", lambda f: _request(f, lora_request=f.lora(lora_name="a", lora_int_id=1, lora_path="/p"))),
    Case("abort", lambda f: ["r1", "r2"]),
    Case("utility", lambda f: (0, 2**40, "sleep", (1, "a", None, {"k": 2.5}))),
    Case("outputs-empty", lambda f: f.outputs(timestamp=2.5)),
    Case(
        "outputs-token",
        lambda f: f.outputs(
            outputs=[f.output("r1", [5]), f.output("r2", [70000], finish_reason=f.finish_reason.STOP)], timestamp=2.5
        ),
    ),
    Case("outputs-full", lambda f: f.outputs(1, [_full_output(f)], _stats(f), 2.5, None, {"r"}, 3, 4, "w")),
    Case("outputs-full-at-0", lambda f: f.outputs(1, [_full_output(f)], _stats(f), 2.5, None, {"r"}, 3, 4, "w"), 0),
    Case("outputs-stats", lambda f: f.outputs(scheduler_stats=f.scheduler_stats(), timestamp=2.5)),
    Case(
        "outputs-utility",
        lambda f: f.outputs(
            utility_output=f.utility_output(7, None, f.utility_result({"a": [1, f.tensor("int8", (3,))]})), timestamp=2.5
        ),
    ),
    Case("outputs-utility-failed", lambda f: f.outputs(utility_output=f.utility_output(7, "no"), timestamp=2.5)),
    *(
        Case(f"dtype-{dtype}", lambda f, dtype=dtype: _one_elem(f, [f.tensor(dtype, (3,), 1), f.tensor(dtype, (2, 8), 2)]), 17)
        for dtype in TORCH_DTYPES
    ),
    *(
        Case(
            f"numpy-{dtype[1:]}-{'big' if dtype[0] == '>' else 'little'}",
            lambda f, dtype=dtype: [f.array(dtype, (2, 3), 1)],
            20,
        )
        for dtype in NUMPY_DTYPES
    ),
    *(
        Case(
            f"sampling-{name}",
            lambda f, name=name, values=values: [f.sampling(**{name: value_of(value, f)}) for value in values],
        )
        for name, values in SAMPLING_VALUES.items()
    ),
]
