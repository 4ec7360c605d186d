"""process_work and to_request: the order of a worker's steps, what a processor sees, and the way to the wire."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import fastmm
from fastmm.errors import CompatError, ExtensionError, LimitError, ProcessorError, SchemaError
from fastmm.processors import (
    Budgets,
    Field,
    Processed,
    ProcessedItem,
    Work,
    available_processors,
    load_processor,
    process_work,
    to_features,
    to_request,
)
from fastmm.schema import PlaceholderRange, SamplingParams, WireTensor

NO_PIXELS = Budgets(max_pixels=None)


def item(at: int, modality: str = "image", **changed: Any) -> ProcessedItem:
    given: dict[str, Any] = {
        "modality": modality,
        "features": {"x": np.full(3, at, np.float32)},
        "hash": f"h{at}",
        "spans": [(at, at + 1)],
    }
    return ProcessedItem(**{**given, **changed})


@dataclasses.dataclass
class Level:
    multimodal_level: int = 0


class Recording:
    """Says what it saw."""

    schema: type | None = None

    def __init__(self, result: Any = None) -> None:
        self.seen: list[tuple[Work, Any]] = []
        self.result = result

    def process(self, work: Work, tokenizer: Any) -> Any:
        self.seen.append((work, tokenizer))
        if isinstance(self.result, BaseException):
            raise self.result
        if self.result is not None:
            return self.result
        return Processed(
            prompt_token_ids=list(range(20)), items=[item(i * 3, media.kind.value) for i, media in enumerate(work.media)]
        )


class WithSchema(Recording):
    schema = Level


# --- what a processor sees --------------------------------------------------------------------------------------------


def test_a_processor_sees_bytes_and_its_schema_and_no_hashes():
    pytest.importorskip("msgspec")
    processor, tokenizer = WithSchema(), object()
    work = Work(
        request_id="r",
        text="hello",
        prompt_token_ids=[1, 2],
        images=["http://a"],
        prefetched=[b"bytes"],
        extensions={"multimodal_level": 3},
        hashes=["0xff"],
    )
    result = process_work(processor, work, tokenizer, budgets=NO_PIXELS)
    ((seen, given),) = processor.seen
    assert given is tokenizer
    assert bytes(seen.images[0].data) == b"bytes"
    assert (seen.request_id, seen.text, seen.prompt_token_ids) == ("r", "hello", [1, 2])
    assert seen.extensions == Level(3)
    assert seen.hashes is None
    assert seen.prefetched == ()
    assert result.items[0].hash == "00000000000000ff"
    assert work.hashes == ["0xff"]


def test_without_a_schema_it_sees_no_extensions_and_refuses_them_by_its_name():
    processor = Recording()
    process_work(processor, Work(request_id="r"))
    assert processor.seen[0][0].extensions is None
    with pytest.raises(ExtensionError, match="Recording takes none, got multimodal_a"):
        process_work(processor, Work(request_id="r", extensions={"multimodal_a": 1}))
    assert len(processor.seen) == 1


def test_an_instance_of_the_schema_is_taken_as_it_is():
    processor, level = WithSchema(), Level(5)
    process_work(processor, Work(request_id="r", extensions=level))
    assert processor.seen[0][0].extensions is level
    with pytest.raises(ProcessorError, match="extensions"):
        process_work(processor, Work(request_id="r", extensions=[1]))
    with pytest.raises(ProcessorError, match="extensions"):
        process_work(Recording(), Work(request_id="r", extensions=level))


# --- the order of steps, and their failures ---------------------------------------------------------------------------


def test_bad_extensions_and_media_never_reach_a_processor():
    processor = WithSchema()
    with pytest.raises(ExtensionError):
        process_work(processor, Work(request_id="r", extensions={"multimodal_level": True}, images=["http://a"]))
    with pytest.raises(ProcessorError, match=r"images\[0\]"):
        process_work(processor, Work(request_id="r", images=["http://a"]))
    with pytest.raises(LimitError):
        process_work(processor, Work(request_id="r", images=[b"abc"]), budgets=Budgets(max_media_nbytes=2, max_pixels=None))
    assert not processor.seen


def test_a_processors_exception_is_a_processor_error_with_its_cause():
    cause = KeyError("no such thing")
    with pytest.raises(ProcessorError, match="Recording failed: KeyError: 'no such thing'") as caught:
        process_work(Recording(cause), Work(request_id="r"))
    assert caught.value.__cause__ is cause


def test_a_long_message_of_a_processor_is_cut():
    with pytest.raises(ProcessorError) as caught:
        process_work(Recording(ValueError("x" * 1_000_000)), Work(request_id="r"))
    assert len(str(caught.value)) < 1000


class Evil(Exception):
    def __str__(self) -> str:
        raise Evil


@pytest.mark.parametrize("error", [Evil(), ValueError("half \ud800 a pair"), RecursionError(), KeyError(object())])
def test_whatever_a_processor_raises_becomes_an_error_that_can_be_read_and_logged(error):
    with pytest.raises(ProcessorError, match="Recording failed: ") as caught:
        process_work(Recording(error), Work(request_id="r"))
    str(caught.value).encode()


def test_a_failure_of_a_schemas_own_code_is_the_processors():
    @dataclasses.dataclass
    class Failing:
        multimodal_level: int = 0

        def __post_init__(self) -> None:
            raise KeyError("mine")

    processor = Recording()
    processor.schema = Failing
    with pytest.raises(ProcessorError, match="the schema of Recording failed: KeyError"):
        process_work(processor, Work(request_id="r"))


def test_what_has_no_schema_is_no_processor():
    with pytest.raises(ProcessorError, match="NoSchema, which has no schema"):
        process_work(NoSchema(), Work(request_id="r"))


def test_a_processors_own_errors_of_fastmm_pass_unchanged():
    error = ProcessorError("mine", path="images[0]")
    with pytest.raises(ProcessorError) as caught:
        process_work(Recording(error), Work(request_id="r"))
    assert caught.value is error


@pytest.mark.parametrize("result", [{}, [], (1, 2), "x", 3])
def test_another_result_is_refused(result):
    with pytest.raises(ProcessorError, match="expected a Processed"):
        process_work(Recording(result), Work(request_id="r"))


def test_a_result_is_validated_before_hashes_are_applied(caplog):
    bad = Processed(prompt_token_ids=[1, 2, 3], items=[item(0, hash=None)])
    with pytest.raises(ProcessorError, match=r"items\[0\].hash"):
        process_work(Recording(bad), Work(request_id="r", images=[b"x"], hashes=["no hex"]), budgets=NO_PIXELS)
    assert not caplog.records


def test_budgets_and_finiteness_reach_validation():
    work = Work(request_id="r", images=[b"x"])
    with pytest.raises(LimitError, match="max_output_nbytes"):
        process_work(Recording(), work, budgets=Budgets(max_output_nbytes=11, max_pixels=None))
    bad = Processed(prompt_token_ids=[1, 2, 3], items=[item(0, features={"x": np.array([np.nan], np.float32)})])
    process_work(Recording(bad), work, budgets=NO_PIXELS)
    with pytest.raises(ProcessorError, match="infinity or a NaN"):
        process_work(Recording(bad), work, budgets=NO_PIXELS, finite=True)


def test_loading_and_checking_can_be_swapped():
    calls = []

    def resolve(work: Work, budgets: Budgets) -> Work:
        calls.append("resolve")
        return work

    def validate(work: Work, processed: Any, budgets: Budgets, *, finite: bool) -> None:
        calls.append("validate")

    process_work(Recording(), Work(request_id="r", images=["http://a"]), resolve=resolve, validate=validate)
    assert calls == ["resolve", "validate"]


# --- features ---------------------------------------------------------------------------------------------------------


def result(*items: ProcessedItem) -> Processed:
    return Processed(prompt_token_ids=list(range(100, 120)), items=items)


def test_each_item_is_a_feature_over_its_own_memory():
    items = [item(0), item(3)]
    features = to_features(result(*items))
    for one, feature in zip(items, features):
        assert feature.modality == "image"
        assert feature.mm_hash == feature.identifier == one.hash
        assert np.shares_memory(feature.data["x"].data, one.features["x"])
        assert feature.data["x"].data.ctypes.data == one.features["x"].ctypes.data
    assert [(f.mm_position.offset, f.mm_position.length) for f in features] == [(0, 2), (3, 2)]


def test_they_are_those_that_build_features_makes_of_the_batch():
    torch = pytest.importorskip("torch")
    sizes, pixels = [2, 1, 3], torch.arange(24.0).reshape(6, 4)
    grid, shared = torch.arange(9).reshape(3, 3), torch.ones(2)
    batch = fastmm.build_features(
        tensors={"pixels": pixels, "grid": grid, "shared": shared},
        flat={"pixels": sizes},
        batched={"grid"},
        keep_on_cpu={"grid"},
        placeholders=[(0, 2), (3, 2), (6, 2)],
        hashes=["h0", "h3", "h6"],
        prompt_token_ids=list(range(100, 120)),
    )
    fields = {"pixels": Field("flat"), "grid": Field("batched", keep_on_cpu=True), "shared": Field("shared")}
    rows = pixels.split(sizes)
    made = to_features(
        result(*(item(3 * i, features={"pixels": rows[i], "grid": grid[i], "shared": shared}, fields=fields) for i in range(3)))
    )
    assert made == batch


def test_a_flat_key_is_joined_along_its_own_axis():
    fields = {"x": Field("flat", dim=-1)}
    made = to_features(
        result(*(item(3 * i, features={"x": np.zeros((2, 3 + i), np.float32)}, fields=fields) for i in range(2)))
    )
    assert [feature.data["x"].field.slices for feature in made] == [[(slice(None), slice(0, 3))], [(slice(None), slice(3, 7))]]
    assert [feature.data["x"].field.dim for feature in made] == [1, 1]


def test_several_spans_are_one_place_with_a_mask_of_those_between():
    (feature,) = to_features(result(item(0, spans=[(2, 3), (5, 5), (8, 9)])))
    position = feature.mm_position
    assert (position.offset, position.length) == (2, 8)
    assert np.array_equal(np.frombuffer(position.is_embed.data, bool), np.array([1, 1, 0, 1, 0, 0, 1, 1], bool))


def test_spans_that_touch_are_one_place_without_a_mask():
    (feature,) = to_features(result(item(0, spans=[(2, 3), (4, 6)])))
    assert (feature.mm_position.offset, feature.mm_position.length, feature.mm_position.is_embed) == (2, 5, None)


def test_a_placeholder_range_goes_through_with_its_mask():
    mask = WireTensor("bool", (3,), b"\1\0\1")
    (feature,) = to_features(result(item(0, spans=None, placeholder=PlaceholderRange(4, 3, mask))))
    assert feature.mm_position == PlaceholderRange(4, 3, mask)


def test_model_data_go_to_the_model_and_stay_on_the_host():
    features = to_features(
        result(item(0, model_data={"second": 1.5, "n": [1, 2]}), item(3, model_data={"second": 2.5, "n": []}))
    )
    assert [feature.data["second"].data for feature in features] == [1.5, 2.5]
    assert [feature.data["n"].data for feature in features] == [[1, 2], []]
    assert all(feature.data["second"].field.keep_on_cpu for feature in features)


def test_modalities_and_kinds_of_items_mix_in_the_prompts_order():
    made = to_features(
        result(
            item(9),
            item(12, features={"embeds": np.zeros((2, 4), np.float32)}),
            item(3, "video"),
            item(0, "audio", features={"sound": np.zeros(4, np.float32)}),
        )
    )
    assert [(one.modality, one.mm_position.offset, list(one.data)) for one in made] == [
        ("audio", 0, ["sound"]),
        ("video", 3, ["x"]),
        ("image", 9, ["x"]),
        ("image", 12, ["embeds"]),
    ]


def test_a_videos_keys_keep_the_names_the_processor_gave():
    (feature,) = to_features(result(item(0, "video", features={"pixel_values": np.zeros(2, np.float32)})))
    assert list(feature.data) == ["pixel_values"]


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_request_travels_to_the_other_side(kind):
    made = Processed(
        prompt_token_ids=kind(list(range(20))),
        items=[item(0, spans=[(0, 0), (2, 2)], features={"x": np.arange(300, dtype=np.float32)}, model_data={"n": 3})],
    )
    request = to_request(made, "r-1", SamplingParams(max_tokens=5), cache_salt="s", priority=2)
    again = fastmm.decode_request(fastmm.encode_request(request, dtype="bfloat16"), tensors="wire")
    assert (again.request_id, again.prompt_token_ids, again.cache_salt, again.priority) == ("r-1", list(range(20)), "s", 2)
    assert again.sampling_params.max_tokens == 5
    (feature,) = again.mm_features
    assert feature.data["x"].data.dtype == "bfloat16"
    assert feature.data["n"].data == 3
    assert feature.mm_position.is_embed == WireTensor("bool", (3,), b"\1\0\1")


def test_a_prompt_without_media_has_no_features():
    request = to_request(Processed(prompt_token_ids=[1, 2]), "r")
    assert request.mm_features is None
    assert request.sampling_params == SamplingParams()
    assert all(type(one) is int for one in request.prompt_token_ids)


def test_the_same_memory_is_sent():
    x = np.arange(300, dtype=np.float32)
    request = to_request(result(item(0, features={"x": x})), "r")
    frames = fastmm.encode_request(request)
    assert np.frombuffer(frames[1], np.uint8).ctypes.data == x.ctypes.data


# --- processors by name -----------------------------------------------------------------------------------------------

MODULE_LEVEL = Recording()


def make(**options: Any) -> Recording:
    processor = Recording()
    processor.options = options
    return processor


def fail() -> None:
    raise RuntimeError("no model")


NOT_ONE = 3


class NoSchema:
    def process(self, work: Any, tokenizer: Any) -> None: ...


class BadSchema(NoSchema):
    schema = dict


def test_a_class_a_function_and_an_object_are_loaded_by_their_place():
    assert type(load_processor(f"{__name__}:Recording")).__name__ == "Recording"
    assert load_processor(f"{__name__}:make", size=3).options == {"size": 3}
    assert type(load_processor(f"{__name__}:MODULE_LEVEL")).__name__ == "Recording"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nobody", "no processor is called 'nobody'"),
        ("no.such.module:X", "cannot be imported"),
        (":x", "cannot be imported: ValueError"),
        (".m:x", "cannot be imported: TypeError"),
        (f"{__name__}:nothing", "cannot be imported"),
        (f"{__name__}:NOT_ONE", "expected"),
        (f"{__name__}:fail", "cannot be made: RuntimeError: no model"),
        (f"{__name__}:dict", "cannot be imported"),
        (f"{__name__}:NoSchema", "schema"),
    ],
)
def test_what_cannot_be_loaded_says_why(name, text):
    with pytest.raises(ProcessorError, match=text):
        load_processor(name)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("def", "SyntaxError"),
        ("class E(ImportError):\n    def __str__(self):\n        raise ValueError\nraise E", "message cannot be read"),
    ],
)
def test_a_module_that_fails_as_it_is_imported_says_why(source, text, tmp_path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProcessorError, match=f"cannot be imported: .*{text}"):
        load_processor("fails_on_import:X")


def test_options_for_an_object_are_refused():
    with pytest.raises(ProcessorError, match="takes no options, got size"):
        load_processor(f"{__name__}:MODULE_LEVEL", size=1)


def test_a_schema_that_is_none_is_refused_when_the_processor_is_loaded():
    with pytest.raises((SchemaError, CompatError)):
        load_processor(f"{__name__}:BadSchema")


def declare(directory: Any, package: str, name: str, value: str) -> None:
    """What pip leaves of a package that declares a processor."""
    info = directory / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fastmm.processors]\n{name} = {value}\n")


def test_installed_packages_declare_processors_by_entry_point(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text("class P:\n    schema = None\n    def process(self, work, tokenizer): ...\n")
    declare(tmp_path, "my-model", "mine", "my_model:P")
    monkeypatch.syspath_prepend(tmp_path)
    assert available_processors()["mine"] == "my_model:P"
    assert type(load_processor("mine")).__name__ == "P"
    declare(tmp_path, "other-model", "mine", "other:P")
    with pytest.raises(ProcessorError, match="several packages declare a processor 'mine': .*my_model:P"):
        load_processor("mine")
