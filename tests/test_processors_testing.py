"""The conformance kit passes a good processor and catches each kind of bad one."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from typing import Annotated, Any

import numpy as np
import pytest

from fastmm.processors import Budgets, Field, Media, Processed, ProcessedItem, Work, to_features
from fastmm.processors.testing import NonConforming, check_processor
from fastmm.schema import EngineCoreRequest, WireTensor

msgspec = pytest.importorskip("msgspec")
pytestmark = pytest.mark.no_asan  # dozens of calls for each sample, and hardly any of them native

NO_PIXELS = Budgets(max_pixels=None)
PLACEHOLDER = 7


@dataclasses.dataclass
class Options:
    multimodal_scale: float = 1.0
    multimodal_crop: list[int] = dataclasses.field(default_factory=list)
    multimodal_mode: str = "a"


class Good:
    """Bytes to numbers, one token for each sixteen of them."""

    schema: type | None = Options

    def pixels(self, media: Media) -> np.ndarray:
        data = media.data if media.data is not None else media.source
        return np.frombuffer(data, np.uint8).astype(np.float32)

    def digest(self, media: Media, work: Work) -> str:
        data = media.data if media.data is not None else media.source.tobytes()
        return hashlib.blake2b(repr(work.extensions).encode() + bytes(data), digest_size=8).hexdigest()

    def finish(self, values: np.ndarray) -> Any:
        return values

    def process(self, work: Work, tokenizer: Any) -> Processed:
        scale = work.extensions.multimodal_scale if work.extensions is not None else 1.0
        ids = [len(work.text or "")]
        items = []
        for media in work.media:
            values = self.pixels(media) * np.float32(scale)
            n = len(values) // 16 + 1
            items.append(
                ProcessedItem(
                    modality=media.kind.value,
                    features={"values": self.finish(values)},
                    fields={"values": Field("flat")},
                    hash=self.digest(media, work),
                    spans=[(len(ids), len(ids) + n - 1)],
                )
            )
            ids += [PLACEHOLDER] * n
        return Processed(prompt_token_ids=ids, items=items)


def noise(seed: int, n: int = 200) -> bytes:
    return np.random.default_rng(seed).bytes(n)


def samples() -> list[Work]:
    return [
        Work(request_id="a", text="one", images=[noise(1)], extensions={"multimodal_scale": 2.0, "multimodal_crop": [1, 2]}),
        Work(request_id="b", text="two, longer", images=[noise(2, 300), "http://x"], prefetched=[noise(3)], audios=[noise(4)]),
        Work(request_id="c", prompt_token_ids=[1, 2], images=[np.frombuffer(noise(5), np.uint8).copy()]),
        Work(request_id="d", text="no media", extensions={"multimodal_mode": "b"}),
    ]


def check(processor: Any, works: Any = None, **options: Any) -> None:
    check_processor(processor, samples() if works is None else works, budgets=NO_PIXELS, **options)


def complaints_of(processor: Any, works: Any = None, **options: Any) -> list[str]:
    with pytest.raises(NonConforming) as caught:
        check(processor, works, **options)
    assert type(processor).__name__ in str(caught.value)
    return caught.value.complaints


def caught(processor: Any, name: str, works: Any = None, **options: Any) -> str:
    """All complaints are of one check."""
    found = complaints_of(processor, works, **options)
    assert {one.split("]")[0] for one in found} == {f"[{name}"}, found
    return "\n".join(found)


def test_a_good_processor_passes():
    check(Good())


def test_a_good_processor_without_a_schema_passes():
    class Plain(Good):
        schema = None

    check(Plain(), [dataclasses.replace(work, extensions=None) for work in samples()])


def test_a_good_processor_of_bfloat16_passes():
    class Words(Good):
        def finish(self, values: np.ndarray) -> Any:
            words = (values.view(np.uint32) >> 16).astype(np.uint16)
            return WireTensor("bfloat16", words.shape, words)

    check(Words())
    ml_dtypes = pytest.importorskip("ml_dtypes")

    class Array(Good):
        def finish(self, values: np.ndarray) -> Any:
            return values.astype(ml_dtypes.bfloat16)

    check(Array())
    torch = pytest.importorskip("torch")

    class Tensor(Good):
        def finish(self, values: np.ndarray) -> Any:
            return torch.from_numpy(values).bfloat16()

    check(Tensor())


def test_no_samples_is_a_mistake_of_the_tests_author():
    with pytest.raises(ValueError):
        check(Good(), [])


# --- contract ---------------------------------------------------------------------------------------------------------


def test_it_catches_what_is_no_processor():
    class NoSchema:
        def process(self, work: Work, tokenizer: Any) -> Processed:
            return Processed(prompt_token_ids=[1])

    class WrongSchema(NoSchema):
        schema = dict

    caught(NoSchema(), "contract")
    caught(WrongSchema(), "contract")


def test_it_catches_results_that_do_not_validate():
    class OffByOne(Good):
        def process(self, work: Work, tokenizer: Any) -> Processed:
            made = super().process(work, tokenizer)
            return dataclasses.replace(made, prompt_token_ids=made.prompt_token_ids[:-1])

    assert "spans" in caught(OffByOne(), "contract")

    class Infinite(Good):
        def finish(self, values: np.ndarray) -> Any:
            return values / 0

    with np.errstate(all="ignore"):
        assert "infinity" in caught(Infinite(), "contract")


def test_it_catches_a_processor_that_fails():
    class Failing(Good):
        def process(self, work: Work, tokenizer: Any) -> Processed:
            raise KeyError("x")

    assert "KeyError" in caught(Failing(), "contract")


# --- repeat and hashes ------------------------------------------------------------------------------------------------


def test_it_catches_a_result_that_is_another_each_time():
    class Random(Good):
        def finish(self, values: np.ndarray) -> Any:
            return values + np.float32(np.random.random())

    assert any(one.startswith("[repeat]") for one in complaints_of(Random()))


def test_it_catches_a_hash_of_the_request():
    class PerRequest(Good):
        def digest(self, media: Media, work: Work) -> str:
            return f"{work.request_id}-{super().digest(media, work)}"

    assert "hash differ" in caught(PerRequest(), "repeat")


@pytest.mark.parametrize(
    "digest",
    [lambda media, work: "constant", lambda media, work: media.kind.value, lambda media, work: str(len(media.data or b""))],
)
def test_it_catches_a_hash_that_two_contents_share(digest):
    class Colliding(Good):
        def digest(self, media: Media, work: Work) -> str:
            return digest(media, work)

    assert "hash of another item" in caught(Colliding(), "hashes")


def test_it_catches_a_hash_that_leaves_out_the_extensions():
    class Forgetful(Good):
        def digest(self, media: Media, work: Work) -> str:
            return hashlib.blake2b(media.data or media.source.tobytes(), digest_size=8).hexdigest()

    works = [
        Work(request_id=str(scale), text="x", images=[noise(1)], extensions={"multimodal_scale": scale}) for scale in (1.0, 2.0)
    ]
    assert "hash of another item" in caught(Forgetful(), "hashes", works)


# --- inputs, references, ownership ------------------------------------------------------------------------------------


def test_it_catches_writing_to_the_requests_media():
    class InPlace(Good):
        def process(self, work: Work, tokenizer: Any) -> Processed:
            made = super().process(work, tokenizer)
            for media in work.media:
                if media.data is None:
                    media.source[0] ^= 255
            return made

    assert any(one.startswith("[inputs]") for one in complaints_of(InPlace()))


def test_it_catches_writing_to_the_requests_ids():
    class Appending(Good):
        def process(self, work: Work, tokenizer: Any) -> Processed:
            if work.prompt_token_ids is not None:
                work.prompt_token_ids.append(1)
            return super().process(work, tokenizer)

    assert any(one.startswith("[inputs]") for one in complaints_of(Appending()))


@pytest.mark.parametrize(
    ("keep", "what"),
    [
        (lambda work: work, "the Work"),
        (lambda work: work.images, "a Media"),
        (lambda work: [media.data for media in work.media], "a media's bytes"),
        (
            lambda work: [np.frombuffer(media.data, np.uint8)[3:5] for media in work.media if media.data is not None],
            "a media's bytes",
        ),
        (lambda work: [media.source for media in work.media if media.data is None], "a decoded media"),
        (lambda work: work.text, "the text"),
        (lambda work: work.prompt_token_ids, "the ids"),
        (lambda work: work.extensions, "the extensions"),
        (lambda work: lambda: work, "the Work"),
    ],
)
def test_it_catches_what_is_kept_of_a_request(keep, what):
    class Keeping(Good):
        def process(self, work: Work, tokenizer: Any) -> Processed:
            self.last = keep(work)
            return super().process(work, tokenizer)

    assert what in caught(Keeping(), "references")


@dataclasses.dataclass(slots=True)
class Slotted:
    multimodal_scale: float = 1.0
    multimodal_crop: list[int] = dataclasses.field(default_factory=list)
    multimodal_mode: str = "a"


class Struct(msgspec.Struct):
    multimodal_scale: float = 1.0
    multimodal_crop: list[int] = []
    multimodal_mode: str = "a"


@pytest.mark.parametrize("kind", [Options, Slotted, Struct])
@pytest.mark.parametrize(
    ("keep", "what"),
    [
        (lambda extensions: extensions, "the extensions"),
        (lambda extensions: extensions.multimodal_crop, "a part of the extensions"),
    ],
)
def test_it_catches_extensions_that_are_kept_whatever_their_kind(kind, keep, what):
    class Keeping(Good):
        schema = kind

        def process(self, work: Work, tokenizer: Any) -> Processed:
            self.last = keep(work.extensions)
            return super().process(work, tokenizer)

    assert what in caught(Keeping(), "references")


@pytest.mark.parametrize("kind", [Options, Slotted, Struct])
def test_a_good_processor_passes_with_a_schema_of_each_kind(kind):
    class Plain(Good):
        schema = kind

        def digest(self, media: Media, work: Work) -> str:
            return f"{work.extensions.multimodal_scale}{super().digest(media, work)}"

    check(Plain())


@pytest.mark.parametrize(
    ("keep", "what"),
    [
        (lambda work, made: work.request_id, "the request id"),
        (lambda work, made: [media.source for media in work.media], "a media's source"),
        (lambda work, made: made, "of the result"),
        (lambda work, made: [item.features for item in made.items], "of the result"),
    ],
)
def test_it_catches_ids_sources_and_results_that_are_kept(keep, what):
    class Keeping(Good):
        def process(self, work: Work, tokenizer: Any) -> Processed:
            made = super().process(work, tokenizer)
            self.last = keep(work, made)
            return made

    assert what in caught(Keeping(), "references")


@pytest.mark.parametrize(
    "remember",
    [
        lambda memory, work, made: memory.setdefault("first", work),
        lambda memory, work, made: memory.setdefault("".join(item.hash for item in made.items), work),
        lambda memory, work, made: memory.setdefault(str(work.text), work.media),
    ],
)
def test_it_catches_what_only_the_first_request_of_its_kind_leaves_behind(remember):
    class Caching(Good):
        def __init__(self) -> None:
            self.memory: dict[str, Any] = {}

        def process(self, work: Work, tokenizer: Any) -> Processed:
            made = super().process(work, tokenizer)
            remember(self.memory, work, made)
            return made

    caught(Caching(), "references")


def test_it_catches_writes_that_change_nothing_the_second_time():
    class Stamping(Good):
        def process(self, work: Work, tokenizer: Any) -> Processed:
            for media in work.media:
                if media.data is None:
                    media.source[-1] = 7
            return super().process(work, tokenizer)

    assert "written to" in caught(Stamping(), "inputs")


def test_samples_are_never_written_to_themselves():
    class Stamping(Good):
        def process(self, work: Work, tokenizer: Any) -> Processed:
            for media in work.media:
                if media.data is None:
                    media.source[:] = 7
            return super().process(work, tokenizer)

    works = samples()
    with pytest.raises(NonConforming):
        check(Stamping(), works)
    assert not (works[2].images[0].source == 7).all()


def test_it_catches_a_cache_that_never_forgets():
    class Caching(Good):
        def __init__(self) -> None:
            self.cache: dict[str, Any] = {}

        def digest(self, media: Media, work: Work) -> str:
            found = super().digest(media, work)
            self.cache[found] = media
            return found

    assert "a Media" in caught(Caching(), "references")


def test_a_result_may_view_the_request():
    class Viewing(Good):
        def pixels(self, media: Media) -> np.ndarray:
            return np.frombuffer(media.data if media.data is not None else media.source, np.uint8)

        def process(self, work: Work, tokenizer: Any) -> Processed:
            made = super().process(work, tokenizer)
            items = [
                dataclasses.replace(
                    item, features={"values": np.frombuffer(media.data if media.data is not None else media.source, np.uint8)}
                )
                for item, media in zip(made.items, work.media)
            ]
            return dataclasses.replace(made, items=items)

    works = [dataclasses.replace(work, extensions={"multimodal_scale": 1.0}) for work in samples()]
    check(Viewing(), works)


def test_it_catches_one_buffer_for_all_results():
    class Shared(Good):
        buffer = np.zeros(1000, np.float32)

        def finish(self, values: np.ndarray) -> Any:
            view = self.buffer[: len(values)]
            view[:] = values
            return view

    found = complaints_of(Shared(), threads=1)
    assert any(one.startswith("[ownership]") and "later call" in one for one in found)


def test_it_catches_a_result_that_is_kept_and_given_again():
    class Remembering(Good):
        def __init__(self) -> None:
            self.made: dict[str, Processed] = {}

        def process(self, work: Work, tokenizer: Any) -> Processed:
            made = super().process(work, tokenizer)
            key = "".join(item.hash for item in made.items) + str(len(work.text or ""))
            return self.made.setdefault(key, made)

    found = complaints_of(Remembering())
    assert any(one.startswith("[ownership]") and "cast in place" in one for one in found)
    assert any(one.startswith("[references]") and "of the result" in one for one in found)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_it_catches_state_that_threads_share():
    class Racing(Good):
        def pixels(self, media: Media) -> np.ndarray:
            self.media = media.data if media.data is not None else media.source
            time.sleep(0)
            return np.frombuffer(self.media, np.uint8).astype(np.float32)

        def process(self, work: Work, tokenizer: Any) -> Processed:
            made = super().process(work, tokenizer)
            self.media = b""
            return made

    assert any(one.startswith("[threads]") for one in complaints_of(Racing(), threads=8, rounds=30))


def test_it_catches_a_failure_that_only_threads_see():
    class NotReentrant(Good):
        def __init__(self) -> None:
            self.busy = False

        def process(self, work: Work, tokenizer: Any) -> Processed:
            if self.busy:
                raise RuntimeError("Already borrowed")
            self.busy = True
            time.sleep(0.001)
            try:
                return super().process(work, tokenizer)
            finally:
                self.busy = False

    assert "Already borrowed" in caught(NotReentrant(), "threads")


def test_it_catches_threads_that_never_come_back():
    class Hanging(Good):
        """Two at once wait for each other."""

        def __init__(self) -> None:
            self.inside = 0
            self.release = threading.Event()

        def process(self, work: Work, tokenizer: Any) -> Processed:
            self.inside += 1
            if self.inside > 1:
                self.release.wait()
            time.sleep(0.001)
            self.inside -= 1
            return super().process(work, tokenizer)

    processor = Hanging()
    try:
        assert "did not end" in caught(processor, "threads", timeout=1.0)
    finally:
        processor.release.set()


def test_threads_really_run_at_once():
    class Meeting(Good):
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.inside = self.most = 0

        def process(self, work: Work, tokenizer: Any) -> Processed:
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            time.sleep(0.002)
            with self.lock:
                self.inside -= 1
            return super().process(work, tokenizer)

    processor = Meeting()
    check(processor, threads=4)
    assert processor.most > 1


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def test_it_catches_raw_words_that_are_not_marked():
    class Unmarked(Good):
        def finish(self, values: np.ndarray) -> Any:
            return (values.view(np.uint32) >> 16).astype(np.uint16)

    assert 'WireTensor("bfloat16"' in caught(Unmarked(), "contract")


def test_it_catches_numbers_taken_for_bits():
    class Numbers(Good):
        def finish(self, values: np.ndarray) -> Any:
            words = np.clip(values, 0, 100).astype(np.uint16)
            return WireTensor("bfloat16", words.shape, words)

    assert "numbers that were taken for bits" in caught(Numbers(), "bfloat16")


def test_bits_are_compared_on_the_other_side(monkeypatch):
    import fastmm.processors.testing as kit

    class Widening(kit.Encoder):
        def encode(self, request: Any) -> Any:
            for feature in request.mm_features or ():
                elem = feature.data["values"]
                elem.data = elem.data + 1
            return super().encode(request)

    copied = lambda made, name: EngineCoreRequest(name, list(made.prompt_token_ids), to_features(made))  # noqa: E731
    monkeypatch.setattr(kit, "to_request", copied)
    monkeypatch.setattr(kit, "Encoder", Widening)
    assert any(one.startswith("[bfloat16]") and "other bits" in one for one in complaints_of(Good()))


# --- schemas ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Free(Options):
    multimodal_crop: list[Any] = dataclasses.field(default_factory=list)
    multimodal_more: dict[str, Any] | None = None
    multimodal_either: int | bool = 0


def test_what_a_schema_leaves_free_is_no_fault():
    class Loose(Good):
        schema = Free

    extensions = {"multimodal_crop": [1, "a"], "multimodal_more": {"a": [1]}, "multimodal_either": 1}
    check(Loose(), [*samples(), Work(request_id="e", images=[noise(7)], extensions=extensions)])


def test_it_catches_a_pydantic_model_that_converts():
    pydantic = pytest.importorskip("pydantic")

    class Converting(pydantic.BaseModel):
        multimodal_scale: Annotated[float, pydantic.BeforeValidator(float)] = 1.0
        multimodal_crop: list[int] = []
        multimodal_mode: str = "a"

    class Swallowing(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="ignore")
        multimodal_scale: float = 1.0
        multimodal_crop: list[int] = []
        multimodal_mode: str = "a"

    class Loose(Good):
        schema = Converting

    class Looser(Good):
        schema = Swallowing

    assert "$.multimodal_scale: a str is taken" in caught(Loose(), "schema")
    assert "is taken" in caught(Looser(), "schema")


def test_samples_without_extensions_say_nothing_of_a_schema():
    works = [dataclasses.replace(work, extensions=None) for work in samples()]
    assert "no sample has extensions" in caught(Good(), "schema", works)
