"""HfProcessor: any processor of HuggingFace transformers behind the contract.

Each media item is processed by itself, with its placeholder alone as the text. So an item's features and the ids it expands
to do not depend on its neighbours (no padding to the largest of a batch), which is what lets an engine cache them by hash; and
they are put into the prompt at the item's placeholder token, as vLLM does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import CompatError, LimitError, ProcessorError
from ..schema import EngineCoreRequest, SamplingParams
from .contract import Budgets, Field, Layout, Media, MediaKind, Processed, ProcessedItem, Tokenizer, Work
from .media import open_image, stream_pixels
from .request import to_request
from .run import process_work
from .words import error_text

__all__ = ["HfProcessor"]

# What a processor returns of its text.  A bare image processor or feature extractor returns none of it.
TEXT_KEYS = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "special_tokens_mask", "position_ids", "labels")
)
ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
# A grid in patches says that the patches themselves are flat: the families of Qwen2-VL, and those that follow them.
GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
ON_CPU = frozenset((*GRIDS.values(), "second_per_grid_ts"))


class HfProcessor:
    """A HuggingFace processor, image processor or feature extractor as a `Processor`.

    Parameters
    ----------
    hf
        What ``AutoProcessor.from_pretrained`` returns, or an image processor or feature extractor alone; then `tokens` must
        say how many tokens an item takes, except where there is a grid.
    tokenizer
        None: the processor's own, else the one handed to `process`.
    placeholders
        Modality to the token, as text or id, that stands for one item in a prompt that is not expanded yet. None: the
        processor's ``image_token``, ``video_token`` and ``audio_token``.
    embeds
        Modality to the token, as text or id, that takes an item's embeddings in the expanded prompt. None: the
        ``image_token_id`` and so on of the processor or the tokenizer, where the item expands to such tokens, else the
        placeholder itself.
    fields
        Key to how the engine joins it. What is not named is inferred where that is certain: a grid is batched and stays on
        the CPU, pixels beside a grid are flat, and what has a single row for its item is batched. A key that is neither
        must be named.
    tokens
        Modality to a function of the item's features that gives the number of its tokens.
    drop
        Keys that the model does not take.
    options
        Further keyword arguments for each call. They are part of the hashes.
    raw_pixels
        Make pixels of 8 bits that are neither rescaled nor normalised, for an engine that does so itself. vLLM from 0.32 on
        does for Qwen2-VL and others, unless it is started with ``--no-mm-device-do-normalize``: pixels that are normalised
        here would be normalised twice there.
    add_special_tokens
        Whether a prompt given as text gets the tokenizer's special tokens. False for the output of a chat template.
    sampling_rate
        Of audio that comes as a bare array.
    salt
        Goes into every hash: set it to the name of the model where several share the engine's caches.

    Notes
    -----
    One object may be used from many threads, as long as nobody else uses its tokenizer with padding or truncation meanwhile.
    A subclass may override `load`, `options_for` and `item_features`.
    """

    schema: type | None = None

    def __init__(
        self,
        hf: Any,
        *,
        tokenizer: Any = None,
        placeholders: Mapping[str, str | int] | None = None,
        embeds: Mapping[str, str | int] | None = None,
        fields: Mapping[str, Field | str] | None = None,
        tokens: Mapping[str, Callable[[Mapping[str, Any]], int]] | None = None,
        drop: Iterable[str] = (),
        options: Mapping[str, Any] | None = None,
        raw_pixels: bool = False,
        add_special_tokens: bool = True,
        sampling_rate: int = 16_000,
        salt: str = "",
    ) -> None:
        self.hf = hf
        self.name = f"HfProcessor({type(hf).__name__})"
        self.tokenizer = tokenizer if tokenizer is not None else getattr(hf, "tokenizer", None)
        self.whole = getattr(hf, "tokenizer", None) is not None  # it takes text, and expands it itself
        self.fields = {key: Field(Layout(field)) if isinstance(field, str) else field for key, field in (fields or {}).items()}
        self.tokens = dict(tokens or {})
        self.drop = frozenset(drop)
        self.raw_pixels = raw_pixels
        self.options = {**(options or {}), **({"do_rescale": False, "do_normalize": False} if raw_pixels else {})}
        self.add_special_tokens = add_special_tokens
        self.sampling_rate = sampling_rate
        self.placeholders: dict[str, str | int] = dict(placeholders or {})
        self.embeds: dict[str, str | int] = dict(embeds or {})
        for modality in ARGUMENTS:
            token = getattr(hf, f"{modality}_token", None)
            if isinstance(token, str):
                self.placeholders.setdefault(modality, token)
        self._tensors = "pt" if _torch_is_there() else "np"
        self._salt = hashlib.blake2b(_written([salt, type(self).__qualname__, sampling_rate, _described(hf)])).digest()
        if self.tokenizer is not None:
            # The first call takes off what padding and truncation the tokenizer's file asks for. From then on calls change
            # nothing in it, and its Rust core may be used from several threads.
            self.tokenizer("")

    @classmethod
    def from_pretrained(cls, path: str, *, trust_remote_code: bool = False, **options: Any) -> HfProcessor:
        """Load ``AutoProcessor`` from a directory or a name.

        Parameters
        ----------
        path
            What ``from_pretrained`` of transformers takes.
        trust_remote_code
            As there.
        **options
            Arguments of `HfProcessor`.

        Raises
        ------
        CompatError
            transformers, or a package that this processor needs (often torchvision), is not installed.
        ProcessorError
            It is not there, or cannot be loaded.
        """
        try:
            import transformers
        except ImportError:
            raise CompatError("transformers is not installed") from None
        try:
            hf = transformers.AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        except ImportError as error:  # many processors need torchvision
            raise CompatError(f"the processor of {path!r} needs another package: {error_text(error)}") from error
        except Exception as error:
            raise ProcessorError(f"the processor of {path!r} cannot be loaded: {error_text(error)}") from error
        return cls(hf, **options)

    # --- what a subclass may change -----------------------------------------------------------------------------------

    def options_for(self, work: Work) -> Mapping[str, Any]:
        """Keyword arguments of the HuggingFace processor for one request: those of the constructor, unless overridden."""
        return self.options

    def load(self, media: Media) -> Any:
        """A media item as the HuggingFace processor takes it.

        An image is turned upright by its EXIF data and is RGB, over white where it is transparent, as in vLLM. Audio and
        video must come decoded, as an array, an ``(array, sampling rate)`` pair or a list of frames; encoded audio is read
        by soundfile and encoded video by PyAV, where they are installed.
        """
        if media.kind is MediaKind.IMAGE:
            return load_image(media)
        if media.data is None:
            return media.source
        return load_audio(media.data) if media.kind is MediaKind.AUDIO else load_video(media.data)

    def item_features(self, modality: str, made: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's keyword arguments, still with the axis of items, of what the HuggingFace processor made of one item."""
        return made

    # --- the contract -------------------------------------------------------------------------------------------------

    def process(self, work: Work, tokenizer: Tokenizer | None) -> Processed:
        """Expand the prompt and make the features; see `Processor`."""
        ids = self._prompt(work, self.tokenizer if self.tokenizer is not None else tokenizer)
        options = self.options_for(work)
        described = _written(options)
        modalities = [media.kind.value for media in work.media]
        wanted = {name: self._placeholder_id(name) for name in dict.fromkeys(modalities)}
        for name, token in wanted.items():  # before anything is decoded
            if ids.count(token) != modalities.count(name):
                raise ProcessorError(
                    f"expected a placeholder (token {token}) for each of the {modalities.count(name)} {name}s, got"
                    f" {ids.count(token)}",
                    path="prompt_token_ids",
                )
        made = []
        counts = dict.fromkeys(wanted, 0)
        for media in work.media:
            modality = media.kind.value
            path = f"{modality}s[{counts[modality]}]"
            counts[modality] += 1
            digest = hashlib.blake2b(described, digest_size=16, key=self._salt)
            loaded = self.load(media)
            _feed(digest, media.kind.value)
            _feed(digest, loaded if media.data is None else media.data)
            item = self._item(modality, loaded, options, wanted[modality], path)
            made.append((modality, *item, digest.hexdigest()))
        chunks = [(modality, chunk, self._embed_id(modality, chunk, wanted[modality])) for modality, chunk, *_ in made]
        expanded, spans = self._expand(ids, wanted, chunks)
        items = [
            ProcessedItem(modality=modality, features=features, model_data=extra, fields=fields, hash=digest, spans=span)
            for (modality, _, features, fields, extra, digest), span in zip(made, spans)
        ]
        return Processed(prompt_token_ids=expanded, items=items)

    def request(
        self,
        text: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        prefetched: Sequence[Any] = (),
        request_id: str = "0",
        sampling_params: SamplingParams | None = None,
        budgets: Budgets | None = None,
        **fields: Any,
    ) -> EngineCoreRequest:
        """A prompt and its photographs to a request, in one call.

        Parameters
        ----------
        text, prompt_token_ids
            The prompt, with a placeholder token for each item.
        images, videos, audios, prefetched
            As in `Work`.
        request_id, sampling_params, **fields
            As in `EngineCoreRequest`.
        budgets
            None: the defaults of `Budgets`.
        """
        work = Work(
            request_id=request_id,
            text=text,
            prompt_token_ids=prompt_token_ids,
            images=images,
            videos=videos,
            audios=audios,
            prefetched=prefetched,
        )
        return to_request(process_work(self, work, budgets=budgets), request_id, sampling_params, **fields)

    # --- the prompt ---------------------------------------------------------------------------------------------------

    def _prompt(self, work: Work, tokenizer: Any) -> list[int]:
        if work.prompt_token_ids is not None:
            return [int(one) for one in work.prompt_token_ids]
        if work.text is None:
            raise ProcessorError("expected a prompt, got neither text nor ids", path="text")
        if tokenizer is None:
            raise ProcessorError("expected a tokenizer, or the prompt as ids", path="text")
        return list(tokenizer.encode(work.text, add_special_tokens=self.add_special_tokens))

    def _placeholder_id(self, modality: str) -> int:
        token = self.placeholders.get(modality)
        if token is None:
            raise ProcessorError(f"{self.name} takes no {modality}s, or its placeholder must be given: placeholders=")
        return self._id_of(token, modality)

    def _embed_id(self, modality: str, chunk: Sequence[int], placeholder: int) -> int:
        """The token of an item's ids that takes an embedding: it is among them."""
        if modality in self.embeds:
            embed = self._id_of(self.embeds[modality], modality)
            if embed in chunk:
                return embed
            raise ProcessorError(f"expected tokens that take the {modality}'s embeddings ({embed}), got none of them")
        told = [getattr(one, f"{modality}_token_id", None) for one in (self.hf, self.tokenizer)]
        embed = next((one for one in told if isinstance(one, int) and one != placeholder and one in chunk), placeholder)
        # An item takes many embeddings, or one alone: another token that is there more often is not beside the point.
        if chunk.count(embed) < max(map(chunk.count, set(chunk)), default=1):
            raise ProcessorError(f"which token takes a {modality}'s embeddings is not certain: say so with embeds=")
        return embed

    def _id_of(self, token: str | int, modality: str) -> int:
        if isinstance(token, int):
            return token
        found = self.tokenizer.convert_tokens_to_ids(token) if self.tokenizer is not None else None
        if not isinstance(found, int) or found == getattr(self.tokenizer, "unk_token_id", None):
            raise ProcessorError(f"expected a token of the tokenizer for {modality}s, got {token!r}")
        return found

    def _expand(
        self, ids: list[int], wanted: Mapping[str, int], chunks: list[tuple[str, list[int], int]]
    ) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """The prompt with each placeholder replaced by its item's ids, and where the embeddings go in it."""
        waiting: dict[int, list[int]] = {token: [] for token in wanted.values()}
        for index, (modality, *_) in enumerate(chunks):
            waiting[wanted[modality]].append(index)
        order = {token: iter(indices) for token, indices in waiting.items()}
        expanded: list[int] = []
        spans: list[list[tuple[int, int]]] = [[] for _ in chunks]
        for one in ids:
            if one not in order:
                expanded.append(one)
                continue
            index = next(order[one])
            _, chunk, embed = chunks[index]
            spans[index] = _runs(chunk, embed, len(expanded))
            expanded += chunk
        return expanded, spans

    # --- one item -----------------------------------------------------------------------------------------------------

    def _item(
        self, modality: str, loaded: Any, options: Mapping[str, Any], token: int, path: str
    ) -> tuple[list[int], dict[str, Any], dict[str, Field], dict[str, Any]]:
        """The ids that its placeholder becomes, its features, how they are joined, and what is a plain number."""
        arguments: dict[str, Any] = {"return_tensors": self._tensors, **options}
        if modality == "audio":
            loaded, arguments["sampling_rate"] = _sampled(loaded, self.sampling_rate)
        if self.whole:
            text = self.placeholders[modality]
            if isinstance(text, int):
                assert self.tokenizer is not None
                text = self.tokenizer.convert_ids_to_tokens(text)
            made = self._call(path, text=[text], **{ARGUMENTS[modality]: [loaded]}, add_special_tokens=False, **arguments)
        else:
            made = self._call(path, [loaded], **arguments)
        dropped = self.drop | TEXT_KEYS if self.whole else self.drop
        features: dict[str, Any] = {}
        fields: dict[str, Field] = {}
        extra: dict[str, Any] = {}
        kept = self.item_features(modality, {key: value for key, value in made.items() if key not in dropped})
        for key, value in kept.items():
            field = self._field(key, value, kept, path)
            one = value if field.layout is not Layout.BATCHED else _only(key, value, path)
            if self.raw_pixels and key.startswith("pixel_values"):
                one = _bytes_of_pixels(key, one, path)
            if isinstance(one, (bool, int, float)):
                extra[key] = one
                continue
            features[key] = one
            fields[key] = field
        if modality in self.tokens:
            chunk = [token] * int(self.tokens[modality](features))
        elif self.whole:
            chunk = [int(one) for one in made["input_ids"][0]]
        else:
            chunk = [token] * self._tokens_of_grid(modality, features)
        return chunk, features, fields, extra

    def _call(self, path: str, *args: Any, **arguments: Any) -> dict[str, Any]:
        try:
            return dict(self.hf(*args, **arguments))
        except Exception as error:  # its message may hold pixels: the cause has it, the error has not
            raise ProcessorError(f"{type(self.hf).__name__} failed on it ({type(error).__name__})", path=path) from error

    def _field(self, key: str, value: Any, made: Mapping[str, Any], path: str) -> Field:
        if key in self.fields:
            return self.fields[key]
        if key in GRIDS and GRIDS[key] in made:
            return Field(Layout.FLAT)
        if hasattr(value, "__len__") and len(value) == 1:
            return Field(Layout.BATCHED, keep_on_cpu=key in ON_CPU)
        raise ProcessorError(f"how the engine joins {key!r} is not certain: say so with fields=", path=path)

    def _tokens_of_grid(self, modality: str, features: Mapping[str, Any]) -> int:
        grid = features.get(f"{modality}_grid_thw")
        merge = getattr(self.hf, "merge_size", None)
        if grid is None or not isinstance(merge, int):
            raise ProcessorError(f"{self.name} does not say how many tokens a {modality} takes: give tokens=")
        t, h, w = (int(one) for one in grid)
        return t * h * w // merge**2


def _torch_is_there() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def _described(hf: Any) -> Any:
    """What distinguishes one processor from another of its class."""
    parts = [hf, *(getattr(hf, name, None) for name in ("image_processor", "video_processor", "feature_extractor"))]
    found = []
    for part in parts:
        if part is not None:
            found.append([type(part).__qualname__, part.to_dict() if hasattr(part, "to_dict") else None])
    return found


def _written(value: Any) -> bytes:
    """JSON that is the same in every process: what has no JSON is written as text, without addresses."""
    return json.dumps(value, sort_keys=True, default=lambda one: re.sub(r" at 0x[0-9a-f]+", "", repr(one))).encode()


def _only(key: str, value: Any, path: str) -> Any:
    """The one row of a batch of one item: a view."""
    if not hasattr(value, "__len__") or len(value) != 1:
        raise ProcessorError(f"expected {key!r}, which is batched, to have one row for its item", path=path)
    return value[0]


def _bytes_of_pixels(key: str, value: Any, path: str) -> Any:
    """Pixels of 8 bits; image processors that work on PIL images give them as float32."""
    if str(value.dtype).endswith("uint8"):
        return value
    small = value.byte() if hasattr(value, "byte") else value.astype("uint8")
    if not bool((small == value).all()):
        raise ProcessorError(f"expected raw pixels from 0 to 255 in {key!r}, got others", path=path)
    return small


def _runs(chunk: Sequence[int], token: int, offset: int) -> list[tuple[int, int]]:
    """Where a token stands, as inclusive spans."""
    spans: list[tuple[int, int]] = []
    start = None
    for i, one in enumerate(chunk):
        if one == token:
            start = i if start is None else start
        elif start is not None:
            spans.append((offset + start, offset + i - 1))
            start = None
    if start is not None:
        spans.append((offset + start, offset + len(chunk) - 1))
    return spans


def _feed(digest: Any, value: Any) -> None:
    """A media item into its hash: the encoded bytes, or what was decoded."""
    if isinstance(value, str):
        value = value.encode()
    if hasattr(value, "tobytes") and not isinstance(value, memoryview):
        described = [getattr(value, name, None) for name in ("mode", "size", "shape", "dtype")]
        digest.update(repr([type(value).__name__, *map(str, described)]).encode())
        value = value.tobytes()
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for one in value:
            _feed(digest, one)
        return
    elif isinstance(value, (int, float)):
        value = repr(value).encode()
    elif hasattr(value, "numpy"):
        _feed(digest, value.detach().cpu().numpy() if hasattr(value, "detach") else value.numpy())
        return
    view = memoryview(value)
    digest.update(view.nbytes.to_bytes(8, "little"))
    digest.update(view)


def load_image(media: Media) -> Any:
    """An image upright and in RGB; arrays and tensors as they are."""
    found = open_image(media)
    if not hasattr(found, "convert"):
        shape = tuple(getattr(found, "shape", ()))
        if len(shape) != 3 or 0 in shape:
            raise ProcessorError(f"expected an image with height, width and channels, got shape {shape}")
        return found
    if 0 in found.size:
        raise ProcessorError(f"expected an image, got one of {found.size[0]} x {found.size[1]} pixels")
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(found)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layered = image.convert("RGBA")
        flat = Image.new("RGB", layered.size, (255, 255, 255))
        flat.paste(layered, mask=layered.getchannel("A"))
        return flat
    if image.mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")


def load_audio(data: memoryview) -> Any:
    """Encoded audio as an ``(array, sampling rate)`` pair, mixed down to one channel."""
    try:
        import soundfile
    except ImportError:
        raise CompatError("encoded audio is read by soundfile: install it, or decode before") from None
    import io

    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return (samples.mean(axis=1) if samples.ndim > 1 else samples), int(rate)


def load_video(data: memoryview) -> Any:
    """Encoded video as a list of frames: those that its header announces, by which it was let in. Where many more come, it is
    refused, before they take the memory."""
    try:
        import av
    except ImportError:
        raise CompatError("encoded video is read by PyAV: install av, or decode before") from None
    import io

    with av.open(io.BytesIO(data)) as container:
        announced = stream_pixels(container.streams.video[0])
        frames: list[Any] = []
        pixels = 0
        for frame in container.decode(video=0):
            size = frame.width * frame.height
            pixels += size
            # A header may have a rate and a duration in place of a count, and these are not exact.
            if announced is not None and pixels > announced + announced // 8 + size:
                raise LimitError(f"expected a video of {announced} pixels, as its header says, got more")
            frames.append(frame.to_ndarray(format="rgb24"))
        return frames


def _sampled(loaded: Any, rate: int) -> tuple[Any, int]:
    if isinstance(loaded, tuple) and len(loaded) == 2 and isinstance(loaded[1], int):
        return loaded[0], loaded[1]
    return loaded, rate
