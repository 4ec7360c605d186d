"""The conformance kit: what a model package runs in its own tests.

from fastmm.processors import Work
from fastmm.processors.testing import check_processor

def test_my_processor_keeps_the_contract():
    check_processor(MyProcessor(), [Work(request_id="a", text="<image>", images=[jpeg]), ...])
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import sys
import threading
import time
import types
import typing
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..codec import Decoder, Encoder
from ..errors import ExtensionError, FastmmError
from ..schema import EngineCoreRequest, WireTensor
from .contract import Budgets, Media, Processed, Processor, Tokenizer, Work
from .extensions import PREFIX, check_schema, decode_extensions
from .media import resolve_media
from .request import to_features, to_request
from .run import process_work, processor_name

__all__ = ["NonConforming", "check_processor"]


class NonConforming(AssertionError):
    """A processor breaks the contract.

    Attributes
    ----------
    complaints
        Each begins with the name of the check in brackets.
    """

    def __init__(self, name: str, complaints: Sequence[str]) -> None:
        super().__init__(f"{name} breaks the contract of a processor:\n" + "\n".join(f"  {one}" for one in complaints))
        self.complaints = list(complaints)


def check_processor(
    processor: Processor,
    samples: Sequence[Work],
    *,
    tokenizer: Tokenizer | None = None,
    budgets: Budgets | None = None,
    finite: bool = True,
    threads: int = 8,
    rounds: int = 4,
    timeout: float = 300.0,
) -> None:
    """Run a processor over samples and check that it keeps the contract.

    The checks: ``contract`` (a result that `validate_processed` passes), ``repeat`` (the same request gives the same result),
    ``hashes`` (an item's hash follows its content and nothing else), ``inputs`` (the request's objects are not written to),
    ``references`` (nor kept), ``ownership`` (a result is the caller's: it may be cast in place, and later calls do not change
    it), ``threads``, ``bfloat16`` (bits reach the other side as they were, and are no numbers taken for bits), ``schema``
    (strict).

    Parameters
    ----------
    processor
        It is called some dozens of times for each sample.
    samples
        Requests it can process; two at least that differ in everything, media too, or mixed up threads cannot be told. Where
        it has a schema, some with extensions.
    tokenizer, budgets, finite
        As in `process_work`.
    threads, rounds
        How many threads process every sample how many times.
    timeout
        Seconds that the threads may take in all.

    Raises
    ------
    NonConforming
        With everything that was found.
    """
    samples = list(samples)
    if not samples:
        raise ValueError("expected at least one sample")
    bench = _Bench(processor, tokenizer, budgets, finite)
    complaints = [f"[contract] {one}" for one in _static(processor)]
    if not complaints:
        # Everything runs on copies made now: what a processor writes to a request is seen, however often it does.
        try:
            pristine = [_copy(work) for work in samples]
        except FastmmError as error:
            raise NonConforming(
                processor_name(processor), [f"[contract] a sample's media cannot be resolved: {error}"]
            ) from None
        # The very first call of each sample is a watched one: a cache keeps the first request of its kind.
        kept = [f"[references] {one}" for one in _references(bench, pristine)]
        complaints = [f"[contract] {one}" for one in _contract(bench, pristine)] or kept
        checks: dict[str, Callable[[], Iterator[str]]] = {
            "repeat": lambda: _repeat(bench, pristine),
            "hashes": lambda: _hashes(bench, pristine),
            "inputs": lambda: _inputs(bench, pristine),
            "ownership": lambda: _ownership(bench, pristine),
            "threads": lambda: _threads(bench, pristine, threads, rounds, timeout),
            "bfloat16": lambda: _bfloat16(bench, pristine),
            "schema": lambda: _schema(bench, pristine),
        }
        broken = any(one.startswith("[contract]") for one in complaints)  # the rest would only say the same once more
        for name, check in () if broken else checks.items():
            complaints += [f"[{name}] {one}" for one in check()]
            if bench.stuck:  # a call would not come back here either
                break
    if complaints:
        raise NonConforming(processor_name(processor), complaints)


@dataclasses.dataclass(frozen=True)
class _Bench:
    """What every call of the processor needs."""

    processor: Processor
    tokenizer: Tokenizer | None
    budgets: Budgets | None
    finite: bool
    stuck: list[str] = dataclasses.field(default_factory=list)

    def run(self, work: Work) -> Processed:
        """On a copy of the work."""
        return self.run_on(_copy(work))

    def run_on(self, work: Work) -> Processed:
        """On this very work."""
        return process_work(self.processor, work, self.tokenizer, budgets=self.budgets, finite=self.finite)


# --- results, told apart ----------------------------------------------------------------------------------------------


def _digest(value: Any) -> Any:
    """What a value is, down to the bits of its tensors."""
    if isinstance(value, Mapping):
        return {key: _digest(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_digest(one) for one in value]
    if isinstance(value, WireTensor):
        return (value.dtype, tuple(value.shape), _hash(value.data))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return (str(value.dtype), tuple(value.shape), _hash(flat.view(torch.uint8).numpy() if flat.numel() else b""))
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.shape, _hash(np.ascontiguousarray(value).view(np.uint8) if value.size else b""))
    return value


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _snapshot(processed: Processed) -> Any:
    ids = processed.prompt_token_ids
    return (
        [int(one) for one in ids],
        [
            (
                item.modality,
                item.hash,
                _digest(item.features),
                _digest(item.model_data),
                [tuple(map(int, span)) for span in item.spans] if item.spans is not None else repr(item.placeholder),
            )
            for item in processed.items
        ],
    )


def _difference(one: Any, other: Any) -> str:
    if one[0] != other[0]:
        return "the prompt's ids differ"
    if len(one[1]) != len(other[1]):
        return f"{len(one[1])} items and {len(other[1])}"
    for i, (a, b) in enumerate(zip(one[1], other[1])):
        for name, left, right in zip(("modality", "hash", "features", "model_data", "place"), a, b):
            if left != right:
                if isinstance(left, dict) and isinstance(right, dict):
                    name = f"{name} {[key for key in {**left, **right} if left.get(key) != right.get(key)]}"
                return f"items[{i}]: {name} differ"
    return "no difference"


def _tensors(processed: Processed) -> Iterator[tuple[str, Any]]:
    def walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, (list, tuple)):
            for i, one in enumerate(value):
                yield from walk(f"{path}[{i}]", one)
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            yield path, value

    for i, item in enumerate(processed.items):
        for name in ("features", "model_data"):
            for key, value in getattr(item, name).items():
                yield from walk(f"items[{i}].{name}[{key!r}]", value)


# --- the checks -------------------------------------------------------------------------------------------------------


def _static(processor: Any) -> Iterator[str]:
    if not callable(getattr(processor, "process", None)) or not hasattr(processor, "schema"):
        yield "a processor has process() and schema"
        return
    try:
        check_schema(processor.schema)
    except FastmmError as error:
        yield str(error)


def _contract(bench: _Bench, samples: Sequence[Work]) -> Iterator[str]:
    for i, work in enumerate(samples):
        try:
            to_features(bench.run(work))
        except FastmmError as error:
            yield f"samples[{i}]: {error}"


def _repeat(bench: _Bench, samples: Sequence[Work]) -> Iterator[str]:
    for i, work in enumerate(samples):
        first = _snapshot(bench.run(work))
        again = _snapshot(bench.run(dataclasses.replace(work, request_id=f"{work.request_id}-again")))
        if first != again:
            yield f"samples[{i}]: the same request gave another result: {_difference(first, again)}"


def _hashes(bench: _Bench, samples: Sequence[Work]) -> Iterator[str]:
    contents: dict[str, Any] = {}
    for i, work in enumerate(samples):
        made = bench.run(dataclasses.replace(work, hashes=None))
        for j, item in enumerate(made.items):
            content = (item.modality, repr(_digest(item.features)), repr(_digest(item.model_data)))
            if contents.setdefault(item.hash, content) != content:
                yield f"samples[{i}]: items[{j}] has the hash of another item and other features: an engine would mix them up"


def _inputs(bench: _Bench, samples: Sequence[Work]) -> Iterator[str]:
    for i, work in enumerate(samples):
        given = _copy(work)

        def state(one: Work = given) -> Any:
            ids = one.prompt_token_ids
            return (
                [_digest(_content(media)) for media in one.media],
                None if ids is None else [int(token) for token in ids],
                repr(one.extensions),
            )

        before = state()
        bench.run_on(given)
        if state() != before:
            yield f"samples[{i}]: the request's media, ids or extensions were written to"


def _content(media: Media) -> Any:
    if media.data is not None:
        return bytes(media.data)
    source = media.source
    return np.asarray(source) if hasattr(source, "tobytes") and not isinstance(source, np.ndarray) else source


def _copy(work: Work) -> Work:
    """The same work over memory of its own, its media resolved."""
    resolved = resolve_media(work, Budgets(max_media_nbytes=None, max_pixels=None))
    changed: dict[str, Any] = {"request_id": _fresh(work.request_id), "extensions": copy.deepcopy(work.extensions)}
    for where in ("images", "videos", "audios"):
        changed[where] = [
            Media(one.kind, _fresh(one.source), memoryview(bytearray(one.data)))
            if one.data is not None
            else Media(one.kind, copy.deepcopy(one.source))
            for one in getattr(resolved, where)
        ]
    if work.prompt_token_ids is not None:
        changed["prompt_token_ids"] = copy.copy(work.prompt_token_ids)
    return dataclasses.replace(resolved, **changed)


def _fresh(value: Any) -> Any:
    """A str or bytes that nobody else holds; another value as it is."""
    if isinstance(value, str):
        return "".join([value[:1], value[1:]])
    return bytes(bytearray(value)) if isinstance(value, bytes) else value


class _Text(str):
    """A str that can be watched."""


class _Ids(list[Any]):
    """A list that can be watched."""


def _references(bench: _Bench, samples: Sequence[Work]) -> Iterator[str]:
    for i, work in enumerate(samples):
        try:
            kept = _kept_of(bench, work)
        except FastmmError:
            continue  # the contract's check says so
        if kept:
            yield f"samples[{i}]: after the call, and without its result, something still holds {', '.join(kept)}"


def _kept_of(bench: _Bench, work: Work) -> list[str]:
    """What of a request is still referred to after its call."""
    watched: list[tuple[str, weakref.ref[Any]]] = []
    # What has no weak references is held here, and counted: one reference more than this list's is somebody else's.
    counted: list[tuple[str, Any]] = [("nothing", object())]

    class WatchedWork(Work):
        __slots__ = ("__weakref__",)

        def __new__(cls, **_: Any) -> WatchedWork:
            new = super().__new__(cls)
            watched.append(("the Work", weakref.ref(new)))
            return new

    class WatchedMedia(Media):
        __slots__ = ("__weakref__",)

        def __new__(cls, *_: Any, **__: Any) -> WatchedMedia:
            new = super().__new__(cls)
            watched.append(("a Media", weakref.ref(new)))
            return new

    def watch(what: str, value: Any) -> Any:
        try:
            watched.append((what, weakref.ref(value)))
        except TypeError:
            if isinstance(value, (str, bytes)) and len(value) > 1:  # shorter ones are one object for all
                counted.append((what, value))
        return value

    def containers(value: Any) -> None:
        """The lists and maps in the extensions."""
        if isinstance(value, (list, dict)):
            counted.append(("a part of the extensions", value))
            for one in value.values() if isinstance(value, dict) else value:
                containers(one)

    def once(given: Work) -> None:
        changed: dict[str, Any] = {"request_id": watch("the request id", f"{given.request_id}-watched")}
        for where in ("images", "videos", "audios"):
            changed[where] = [
                WatchedMedia(
                    one.kind,
                    watch("a media's source", _fresh(one.source)),
                    memoryview(watch("a media's bytes", np.array(one.data))),
                )
                if one.data is not None
                else WatchedMedia(one.kind, watch("a decoded media", one.source))
                for one in getattr(given, where)
            ]
        if given.text is not None:
            changed["text"] = watch("the text", _Text(given.text))
        if given.prompt_token_ids is not None:
            changed["prompt_token_ids"] = watch("the ids", _Ids(given.prompt_token_ids))
        schema = bench.processor.schema
        if schema is not None and (given.extensions is None or isinstance(given.extensions, Mapping)):
            decoded = _watchable(decode_extensions(schema, given.extensions))
            changed["extensions"] = watch("the extensions", decoded)
            for name in given.extensions or ():
                containers(getattr(decoded, name, None))
        fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        made = bench.run_on(WatchedWork(**{**fields, **changed}))
        for path, tensor in _tensors(made):
            if "float" in str(tensor.dtype):
                watch(f"{path} of the result", tensor)

    once(_copy(work))
    gc.collect()
    within = Counter(
        id(one)
        for _, value in counted
        if isinstance(value, (list, dict))
        for one in (value.values() if isinstance(value, dict) else value)
    )
    usual = sys.getrefcount(counted[0][1])
    kept = {what for what, ref in watched if ref() is not None}
    # By index: a loop variable would be one reference more.
    kept |= {counted[i][0] for i in range(len(counted)) if sys.getrefcount(counted[i][1]) > usual + within[id(counted[i][1])]}
    return sorted(kept)


def _watchable(instance: Any) -> Any:
    """The same extensions in an object that can have weak references."""
    cls = type(instance)
    try:
        weakref.ref(instance)
    except TypeError:
        pass
    else:
        return instance
    if hasattr(cls, "__struct_fields__"):
        kind: Any = types.new_class(cls.__name__, (cls,), {"weakref": True})
        return kind(**{name: getattr(instance, name) for name in cls.__struct_fields__})
    kind = type(cls.__name__, (cls,), {"__slots__": ("__weakref__",)})
    new = object.__new__(kind)
    for field in dataclasses.fields(cls):
        object.__setattr__(new, field.name, getattr(instance, field.name))
    return new


def _ownership(bench: _Bench, samples: Sequence[Work]) -> Iterator[str]:
    before = [_snapshot(bench.run(work)) for work in samples]
    kept = [bench.run(work) for work in samples]
    for i, (snapshot, processed) in enumerate(zip(before, kept)):
        now = _snapshot(processed)
        if now != snapshot:
            yield f"samples[{i}]: a later call changed the result: {_difference(snapshot, now)}"
    for processed in kept:
        Encoder(dtype="bfloat16").encode(to_request(processed, "r"))  # as a client does: cast in place
    for i, (snapshot, work) in enumerate(zip(before, samples)):
        now = _snapshot(bench.run(work))
        if now != snapshot:
            yield (
                f"samples[{i}]: a result was cast in place, as the encoder does with what it is given, and the next call gave"
                f" another one: {_difference(snapshot, now)}"
            )


def _threads(bench: _Bench, samples: Sequence[Work], threads: int, rounds: int, timeout: float) -> Iterator[str]:
    wanted = [_snapshot(bench.run(work)) for work in samples]
    start = threading.Barrier(threads)
    complaints: dict[str, None] = {}

    def work_on(number: int) -> None:
        start.wait()
        for turn in range(rounds):
            for step in range(len(samples)):
                i = (number + turn + step) % len(samples)
                try:
                    found = _snapshot(bench.run(samples[i]))
                except Exception as error:
                    complaints[f"samples[{i}]: {type(error).__name__}: {error}"] = None
                else:
                    if found != wanted[i]:
                        complaints[f"samples[{i}]: another result than alone: {_difference(wanted[i], found)}"] = None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads meet more often in between
    deadline = time.monotonic() + timeout
    try:
        # Daemons: a processor that never returns must not keep the tests from ending.
        running = [threading.Thread(target=work_on, args=(number,), daemon=True) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in running):
            bench.stuck.append("threads")
            complaints[f"{threads} threads did not end within {timeout} seconds"] = None
    finally:
        sys.setswitchinterval(interval)
    yield from list(complaints)


def _bfloat16(bench: _Bench, samples: Sequence[Work]) -> Iterator[str]:
    for i, work in enumerate(samples):
        processed = bench.run(work)
        for path, tensor in _tensors(processed):
            if str(tensor.dtype).endswith("bfloat16") and _looks_like_numbers(tensor):
                yield f"samples[{i}]: {path} is bfloat16, and all of it denormal: numbers that were taken for bits"
        frames = Encoder().encode(to_request(processed, "r"))
        features = Decoder(EngineCoreRequest, tensors="wire").decode(frames).mm_features or ()
        sent = {id(one): one for one in to_features(processed)}
        for feature, other in zip(sent.values(), features):
            for key, elem in (feature.data or {}).items():
                left, right = _bits(elem.data), _bits(other.data[key].data)
                if left != right:
                    where = f"{key!r} of {feature.modality} at {feature.mm_position.offset}"
                    yield f"samples[{i}]: {where} has other bits on the other side"


def _bits(value: Any) -> Any:
    """Shapes and bytes, without the names of types, which tensors of one memory spell in several ways."""
    if isinstance(value, (list, tuple)):
        return [_bits(one) for one in value]
    found = _digest(value)
    return (list(found[1]), found[2]) if isinstance(found, tuple) else found


def _looks_like_numbers(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        words = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().view(np.uint16)
    elif isinstance(tensor, WireTensor):
        words = np.frombuffer(tensor.data, np.uint16)
    else:
        words = np.ascontiguousarray(tensor).view(np.uint16)
    return bool(words.any()) and not (words & 0x7F80).any()


# --- schemas ----------------------------------------------------------------------------------------------------------

# What must not be taken for a value of each kind.
_WRONG: dict[type, tuple[Any, ...]] = {int: (True, "7", 1.5), float: (True, "1.5"), str: (7, True), bool: (1, "true")}


def _schema(bench: _Bench, samples: Sequence[Work]) -> Iterator[str]:
    schema = bench.processor.schema
    if schema is None:
        try:
            bench.run(dataclasses.replace(samples[0], extensions={f"{PREFIX}of_no_schema": 1}))
        except ExtensionError:
            return
        yield "extensions are not refused, though there is no schema"
        return
    given = [work.extensions for work in samples if isinstance(work.extensions, Mapping) and work.extensions]
    if not given:
        yield "no sample has extensions: strictness cannot be seen"
        return
    for extensions in given:
        try:
            decode_extensions(schema, {**extensions, f"{PREFIX}that_no_one_knows": 1})
        except ExtensionError:
            pass
        else:
            yield f"an extension that it does not have ({PREFIX}that_no_one_knows) is taken"
        for path, kind, changed in _changed(dict(extensions), schema):
            try:
                decode_extensions(schema, changed)
            except ExtensionError:
                continue
            yield f"{path}: {kind} is taken where the schema names another type"


def _changed(extensions: dict[str, Any], schema: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The extensions with one value after another of a wrong type, where the schema names one: what is free is left alone."""

    def walk(
        value: Any, hint: Any, path: str, put: Callable[[Any], dict[str, Any]]
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        def at_key(key: Any) -> Callable[[Any], dict[str, Any]]:
            return lambda one: put({**value, key: one})

        def at_index(i: int) -> Callable[[Any], dict[str, Any]]:
            return lambda one: put([*value[:i], one, *value[i + 1 :]])

        inner = typing.get_args(hint)
        if isinstance(value, Mapping):
            if isinstance(hint, type) and not inner:
                named = _hints(hint)
                for key in value:
                    if key in named:
                        yield from walk(value[key], named[key], f"{path}.{key}", at_key(key))
            elif len(inner) == 2:
                for key in value:
                    yield from walk(value[key], inner[1], f"{path}.{key}", at_key(key))
        elif isinstance(value, list):
            if len(inner) == 1 or (len(inner) == 2 and inner[1] is ...):
                for i in range(min(len(value), 3)):
                    yield from walk(value[i], inner[0], f"{path}[{i}]", at_index(i))
        elif hint in _WRONG:
            for wrong in _WRONG[hint]:
                yield path, f"a {type(wrong).__name__}", put(wrong)

    def at_name(name: str) -> Callable[[Any], dict[str, Any]]:
        return lambda one: {**extensions, name: one}

    hints = _hints(schema)
    for name, value in extensions.items():
        if name in hints:
            yield from walk(value, hints[name], f"$.{name}", at_name(name))


def _hints(schema: Any) -> dict[str, Any]:
    if hasattr(schema, "__pydantic_fields__"):
        return {name: info.annotation for name, info in schema.__pydantic_fields__.items()}
    try:
        return typing.get_type_hints(schema)
    except (NameError, TypeError):
        return {}
