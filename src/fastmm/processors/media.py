"""A request's media, made ready on the worker: decoded from text, or taken from what the front end has fetched.

Workers do no I/O. Budgets are checked before the memory that they bound is taken.
"""

from __future__ import annotations

import binascii
import io
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from ..errors import CompatError, LimitError, ProcessorError
from .contract import Budgets, Media, MediaKind, Work, changed
from .words import kind_of

__all__ = ["measure_pixels", "open_image", "resolve_media"]

# Formats that Pillow reads without starting another program, as it does for PostScript.
IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_FETCHED = re.compile(r"(?:https?|file):", re.IGNORECASE)
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{1,15}):")
_DATA_URL = re.compile(r"data:([^,]{0,256}),", re.IGNORECASE)
_SPACES = " \t\r\n\f"
_NO_SPACES = str.maketrans("", "", _SPACES)
# What the base64 of a JPEG and of MPEG audio begins with: it looks like an absolute path.
_SLASHED = re.compile(r"/(?:9j/|/)[A-Za-z0-9+/\r\n]{124}")


def _is_buffer(value: Any) -> bool:
    """Whether a source is encoded bytes, and not an array of pixels or samples."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return True
    if isinstance(value, (str, np.ndarray, np.generic)):
        return False
    try:
        with memoryview(value) as view:
            return view.ndim == 1 and view.format in ("B", "b", "c")
    except (TypeError, BufferError):
        return False


def _view(value: Any, path: str) -> memoryview:
    """The bytes at their own address, read-only."""
    if not _is_buffer(value):
        raise ProcessorError(f"expected bytes, got {type(value).__name__}", path=path)
    try:
        view = memoryview(value)
        contiguous = view.c_contiguous
    except (ValueError, BufferError):
        raise ProcessorError("expected bytes, got a buffer that was released", path=path) from None
    if not contiguous:
        raise ProcessorError("expected contiguous bytes", path=path)
    if not view.nbytes:
        raise ProcessorError("expected bytes, got none", path=path)
    return (view if view.format == "B" and view.ndim == 1 else view.cast("B")).toreadonly()


def is_fetched(source: Any) -> bool:
    """Whether a media source is one whose bytes the front end must fetch: a URL of http, https or file, or a path."""
    if not isinstance(source, str):
        return False
    if _FETCHED.match(source):
        return True
    return source.startswith("/") and _SLASHED.match(source) is None


_PLAIN = (dict, list, tuple, set, frozenset, int, float, complex)


def _is_decoded(media: Media) -> bool:
    """Whether a source is an image, a sound or a film in memory, and not whatever else a client's JSON may hold."""
    source = media.source
    if isinstance(source, (list, tuple)):
        if media.kind is MediaKind.VIDEO:  # frames
            return bool(source) and not any(isinstance(frame, (str, bytes, type(None), *_PLAIN)) for frame in source)
        is_pair = isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], (int, float))
        return media.kind is MediaKind.AUDIO and is_pair and hasattr(source[0], "shape")
    return not isinstance(source, _PLAIN)


class _Bytes:
    """The byte budget of one request, spent in the order of its media."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.spent = 0

    def spend(self, nbytes: int, path: str) -> None:
        self.check(nbytes, path)
        self.spent += nbytes

    def check(self, nbytes: int, path: str) -> None:
        """Whether there is room for so many; they are not spent."""
        total = self.spent + nbytes
        if self.limit is not None and total > self.limit:
            raise LimitError(f"expected at most {self.limit} bytes of media (max_media_nbytes), got {total}", path=path)


def _from_base64(text: str, budget: _Bytes, path: str) -> memoryview:
    # A text is megabytes long: counting and the decoder are quick where a regular expression is not.  The decoder leaves out
    # characters that are not base64's, which then shows in the length (were there one too many, it might not).
    nspaces, npadding = sum(map(text.count, _SPACES)), text.count("=")
    nchars = len(text) - nspaces - npadding
    if not nchars:
        raise ProcessorError("expected bytes, got none", path=path)
    nbytes = nchars * 3 // 4
    budget.spend(nbytes, path)
    bare = (text.translate(_NO_SPACES) if nspaces else text).rstrip("=")
    try:
        found = binascii.a2b_base64(bare + "=" * (-nchars % 4))
    except ValueError:
        found = b""
    if len(found) != nbytes or len(bare) != nchars or nchars % 4 == 1 or npadding > 2:
        raise ProcessorError(f"expected a URL, an absolute path or base64, got {len(text)} characters of neither", path=path)
    return memoryview(found)


def _unquoted(text: str, path: str) -> bytes:
    """Percent-encoded text decoded by C code; `urllib` makes an object for each escape."""
    raw = text.encode("utf-8", "replace").translate(None, b"\r\n\t")
    wanted = len(raw) - 2 * raw.count(b"%")
    found = binascii.a2b_qp(raw.replace(b"=", b"=3D").replace(b"%", b"="))  # quoted-printable: the same with another sign
    if len(found) != wanted:
        raise ProcessorError("expected percent-encoding, got a percent sign without two hexadecimal digits", path=path)
    return found


def _from_text(source: str, budget: _Bytes, path: str) -> memoryview:
    match = _DATA_URL.match(source)
    if match is None:
        if source[:5].lower() == "data:":
            raise ProcessorError("expected a data: URL with a comma before its data", path=path)
        scheme = _SCHEME.match(source)
        if scheme:
            raise ProcessorError(
                f"expected a URL of data:, http:, https: or file:, an absolute path or base64, got {scheme[1].lower()}:",
                path=path,
            )
        return _from_base64(source, budget, path)
    text = source[match.end() :]
    # At least so many bytes, whatever the escapes say: checked before any of them is decoded.
    nbytes = len(text) - 2 * text.count("%")
    if match[1].lower().replace(" ", "").endswith(";base64"):
        if "%" in text:
            budget.check((nbytes - sum(map(text.count, _SPACES)) - 2) * 3 // 4, path)
            text = _unquoted(text, path).decode("ascii", "replace")
        return _from_base64(text, budget, path)
    budget.check(nbytes - sum(map(text.count, "\r\n\t")), path)
    found = _unquoted(text, path)
    budget.spend(len(found), path)
    if not found:
        raise ProcessorError("expected bytes, got none", path=path)
    return memoryview(found)


def _places(work: Work) -> Iterator[tuple[str, int, Media]]:
    for where in ("images", "videos", "audios"):
        for i, media in enumerate(getattr(work, where)):
            yield where, i, media


def resolve_media(work: Work, budgets: Budgets | None = None, *, measure: Callable[[Media], int | None] | None = None) -> Work:
    """Give each media item its encoded bytes.

    ``data:`` URLs and base64 are decoded here; for ``http:``, ``https:`` and ``file:`` URLs and absolute paths the next of
    `Work.prefetched` is taken, at its own address. Sources that are bytes are viewed, and objects that are decoded already
    stay as they are. Nothing is fetched or opened.

    Parameters
    ----------
    work
        A request's work; it is not written to.
    budgets
        What it may ask for. None: the defaults of `Budgets`.
    measure
        How many pixels a media item has once decoded, from its header; None where that cannot be known, which is refused
        as long as there is a budget of pixels. None here: `measure_pixels`.

    Returns
    -------
    Work
        A new one, with `Media.data` set and `prefetched` empty.

    Raises
    ------
    ProcessorError
        An item cannot be decoded, lacks its prefetched bytes, or there are some left over.
    LimitError
        A budget is exceeded. The path is that of the item that did it.
    """
    budgets = Budgets() if budgets is None else budgets
    measured = measure_pixels if measure is None else measure
    budget = _Bytes(budgets.max_media_nbytes)
    fetched = iter(_fetched(work))
    found: dict[str, list[Media]] = {"images": [], "videos": [], "audios": []}
    taken = 0
    for where, i, media in _places(work):
        path = f"{where}[{i}]"
        source = media.source
        if media.data is not None:
            data = _view(media.data, path)
            budget.spend(data.nbytes, path)
        elif isinstance(source, str):
            if is_fetched(source):
                data = _view(_next(fetched, path), path)
                taken += 1
                budget.spend(data.nbytes, path)
            else:
                data = _from_text(source, budget, path)
        elif _is_buffer(source):
            data = _view(source, path)
            budget.spend(data.nbytes, path)
        elif _is_decoded(media):
            found[where].append(media)
            continue
        else:
            raise ProcessorError(
                f"expected a URL, a path, base64, bytes or a decoded {media.kind.value}, got {kind_of(source)}", path=path
            )
        found[where].append(changed(media, data=data))
    left = sum(1 for _ in fetched)
    if left:
        raise ProcessorError(f"expected {taken} prefetched, one for each URL and path, got {taken + left}", path="prefetched")
    places = {where: tuple(media) for where, media in found.items()}
    resolved = changed(work, prefetched=(), **places)
    if budgets.max_pixels is not None:
        _check_pixels(resolved, budgets.max_pixels, measured)
    return resolved


def _fetched(work: Work) -> Any:
    if isinstance(work.prefetched, (list, tuple)):
        return work.prefetched
    raise ProcessorError(f"expected a list of bytes, got {type(work.prefetched).__name__}", path="prefetched")


def _next(fetched: Iterator[Any], path: str) -> Any:
    for value in fetched:
        return value
    raise ProcessorError("its bytes were not prefetched, and workers do no I/O", path=path)


# --- pixels -----------------------------------------------------------------------------------------------------------


def _check_pixels(work: Work, limit: int, measure: Callable[[Media], int | None]) -> None:
    total = 0
    for where, i, media in _places(work):
        if media.kind is MediaKind.AUDIO:
            continue
        path = f"{where}[{i}]"
        try:
            pixels = measure(media)
        except (LimitError, ProcessorError) as error:
            error.path = path
            raise
        if pixels is None:
            raise ProcessorError(
                f"expected {media.kind.value} data whose size its header says, to hold the budget of pixels: give measure=, or"
                " set Budgets(max_pixels=None)",
                path=path,
            )
        total += pixels
        if total > limit:
            raise LimitError(f"expected at most {limit} decoded pixels (max_pixels), got {total}", path=path)


class _Reader(io.RawIOBase):
    """A file over bytes that stay where they are; `io.BytesIO` would copy them."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = 0 if whence == io.SEEK_SET else self._at if whence == io.SEEK_CUR else len(self._data)
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


@cache
def _known_formats() -> list[str]:
    """Pillow may be built without some; it knows only after it has looked for all."""
    from PIL import Image

    Image.init()
    return [name for name in IMAGE_FORMATS if name in Image.OPEN]


def open_image(media: Media) -> Any:
    """An image as a PIL image: its header is read, its pixels are not yet decoded.

    Parameters
    ----------
    media
        A resolved image. Where its source is decoded already, that is returned as it is.

    Raises
    ------
    ProcessorError
        Pillow cannot read it. Formats for which Pillow would start another program are not tried.
    LimitError
        It is larger than Pillow's own bound, ``PIL.Image.MAX_IMAGE_PIXELS``.
    CompatError
        Pillow is not installed.
    """
    if media.data is None:
        return media.source
    try:
        from PIL import Image
    except ImportError:
        raise CompatError("images are read by Pillow: install fastmm[processors]") from None
    try:
        return Image.open(_Reader(media.data), formats=_known_formats())
    except Image.DecompressionBombError as error:
        raise LimitError(str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # each of its readers fails in its own way on a broken header
        raise ProcessorError(f"expected an image that Pillow can read ({type(error).__name__})") from None


def measure_pixels(media: Media) -> int | None:
    """How many pixels an image or a video has once decoded, from its header alone.

    Images by Pillow (their first frame: that is what is decoded of them); videos by PyAV, where it is installed; what is
    decoded already by its size or shape. None where it cannot be known.
    """
    if media.data is None:
        return _decoded_pixels(media.source, media.kind)
    if media.kind is MediaKind.VIDEO:
        return _video_pixels(media.data)
    with open_image(media) as image:
        width, height = image.size
    return int(width) * int(height)


def _decoded_pixels(source: Any, kind: MediaKind) -> int | None:
    if isinstance(source, np.ndarray):
        return _shaped_pixels(source.shape, kind)
    if isinstance(source, (list, tuple)):  # frames, which are no lists themselves
        counts = [None if isinstance(one, (list, tuple)) else _decoded_pixels(one, MediaKind.IMAGE) for one in source]
        return None if None in counts else sum(count for count in counts if count is not None)
    size = getattr(source, "size", None)
    if isinstance(size, tuple) and len(size) == 2:  # PIL
        return int(size[0]) * int(size[1])
    shape = getattr(source, "shape", None)
    return None if shape is None else _shaped_pixels(shape, kind)


def _shaped_pixels(shape: Any, kind: MediaKind) -> int:
    """Extents multiplied, the channels' left out: they are the last, or stand before height and width."""
    extents = [int(extent) for extent in shape]
    ndim = 4 if kind is MediaKind.VIDEO else 3  # with channels; an array of three axes may be grey frames
    if len(extents) >= ndim:
        axis = next((axis for axis in (-1, -3) if extents[axis] in (1, 3, 4)), None)
        if axis is not None:
            del extents[axis]
    return math.prod(extents)


def _video_pixels(data: memoryview) -> int | None:
    try:
        import av
    except ImportError:
        return None
    try:
        with av.open(_Reader(data)) as container:
            return stream_pixels(container.streams.video[0])
    except Exception as error:
        raise ProcessorError(f"expected a video that PyAV can read ({type(error).__name__})") from None


def stream_pixels(stream: Any) -> int | None:
    """What a video's header says of its pixels, as PyAV reads it. None where it does not, or what cannot be."""
    width, height = int(stream.width), int(stream.height)
    frames = int(stream.frames)
    if not frames and stream.duration and stream.time_base and stream.average_rate:
        frames = math.ceil(stream.duration * stream.time_base * stream.average_rate)
    return width * height * frames if min(width, height, frames) > 0 else None
