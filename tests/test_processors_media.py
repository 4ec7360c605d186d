"""resolve_media: what is decoded on the worker, what must come prefetched, and the budgets."""

from __future__ import annotations

import base64
import io
import struct
import sys
import tracemalloc
import urllib.parse
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmm.errors import FastmmError, LimitError, ProcessorError, SchemaError
from fastmm.processors import Budgets, Media, MediaKind, Work, measure_pixels, open_image, resolve_media

NO_PIXELS = Budgets(max_pixels=None)


def image(kind: str = "PNG", size: tuple[int, int] = (6, 4), **options: object) -> bytes:
    Image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    Image.fromarray(np.arange(size[0] * size[1] * 3, dtype=np.uint8).reshape(size[1], size[0], 3)).save(out, kind, **options)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds hardly a pixel."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def resolved(*images: object, prefetched: object = (), budgets: Budgets = NO_PIXELS) -> list[bytes]:
    work = resolve_media(Work(request_id="r", images=images, prefetched=prefetched), budgets)
    return [bytes(one.data) for one in work.images]


def address(view: object) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


# --- what is decoded on the worker ------------------------------------------------------------------------------------

BYTES = bytes(range(256)) * 3


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 255])
@pytest.mark.parametrize("wrap", ["data:image/png;base64,{}", "DATA:image/png;Base64,{}", "data:;base64,{}", "{}"])
def test_base64_and_data_urls_are_decoded(n, wrap):
    data = BYTES[:n]
    assert resolved(wrap.format(base64.b64encode(data).decode())) == [data]


def test_base64_may_be_broken_into_lines_and_unpadded():
    data = BYTES[:100]
    text = base64.encodebytes(data).decode()
    assert "\n" in text
    assert resolved(text, text.rstrip("=\n"), text.replace("\n", "\r\n "), "data:a/b;base64," + text) == [data] * 4


def test_a_data_url_may_be_percent_encoded():
    data = BYTES[:50]
    quoted = urllib.parse.quote(base64.b64encode(data).decode(), safe="")
    assert resolved("data:image/png;base64," + quoted) == [data]
    assert resolved("data:text/plain,a%20b%FF") == [b"a b\xff"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=",
        "====",
        "A",
        "AAAAA",
        "AA=A",
        "A===",
        "AAAA====",
        "AA==AA==",
        "AA-_",
        "AAA!",
        "not base64",
        "AAA\u00e9",
        "AAA\ud800",
        "%%%%",
        "relative/path.png",
        "image.png",
    ],
)
@pytest.mark.parametrize("wrap", ["{}", "data:image/png;base64,{}"])
def test_what_is_no_base64_is_an_error_that_names_the_item(text, wrap):
    with pytest.raises(ProcessorError, match=r"^images\[1\]: expected"):
        resolved(b"x", wrap.format(text))


@pytest.mark.parametrize("text", ["%", "%4", "%zz", "a%", "%%", "%%41", "%4%41", "%-1", "%+1", "% 1"])
@pytest.mark.parametrize("wrap", ["data:,{}", "data:,abc{}xyz", "data:;base64,{}", "data:;base64,QUJD{}QUJD"])
def test_a_percent_sign_without_its_digits_is_an_error(text, wrap):
    with pytest.raises(ProcessorError, match=r"images\[0\]"):
        resolved(wrap.format(text))


@given(st.binary(min_size=1, max_size=60))
def test_percent_encoding_is_undone_as_urllib_undoes_it(data):
    for safe in ("", "/=+ "):
        text = urllib.parse.quote(data, safe=safe)
        assert resolved(f"data:,{text}") == [urllib.parse.unquote_to_bytes(text)] == [data]


@pytest.mark.parametrize(
    "text", ["data:," + "%41" * 200_000, "data:;base64," + "%41" * 200_000, "A " * 400_000, "data:," + "A" * 200_000]
)
def test_a_budget_is_checked_before_escapes_and_spaces_are_undone(text):
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match=r"images\[0\]"):
            resolved(text, budgets=limited(100))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(text)
    finally:
        tracemalloc.stop()


def test_exactly_at_the_budget_passes_with_escapes_too():
    quoted = "".join(f"%{one:02x}" for one in BYTES)
    for nbytes, error in ((len(BYTES), None), (len(BYTES) - 1, LimitError)):
        for text in (
            f"data:,{quoted}",
            "data:;base64," + "".join(f"%{ord(one):02X}" for one in base64.b64encode(BYTES).decode()),
        ):
            if error is None:
                assert resolved(text, budgets=limited(nbytes)) == [BYTES]
            else:
                with pytest.raises(error):
                    resolved(text, budgets=limited(nbytes))


@pytest.mark.parametrize("url", ["data:", "data:image/png;base64", "data:,", "data:image/png;base64,"])
def test_a_data_url_without_data_is_an_error(url):
    with pytest.raises(ProcessorError, match=r"images\[0\]"):
        resolved(url)


@pytest.mark.parametrize("url", ["ftp://host/a", "s3://bucket/key", "blob:abc", "javascript:alert(1)", "gopher://x"])
def test_other_schemes_are_refused(url):
    with pytest.raises(ProcessorError, match=r"images\[0\]: expected a URL of data:, http:"):
        resolved(url, prefetched=[b"x"])


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data)), lambda data: memoryview(data).cast("c")]
)
def test_bytes_are_viewed_where_they_lie_and_read_only(kind):
    source = kind(BYTES)
    work = resolve_media(Work(request_id="r", images=[source]), NO_PIXELS)
    assert address(work.images[0].data) == address(source)
    assert work.images[0].data.readonly
    assert bytes(work.images[0].data) == BYTES


def test_a_decoded_object_stays_the_very_same():
    pixels = np.zeros((4, 6, 3), np.uint8)
    work = resolve_media(Work(request_id="r", images=[pixels]))
    assert work.images[0].source is pixels
    assert work.images[0].data is None


NO_MEDIA = [{}, {"url": "http://a"}, 5, True, 1.5, [], [[]], [1, 2], ["http://a"], (1, 2), {1}, 1j]


@pytest.mark.parametrize("source", NO_MEDIA)
@pytest.mark.parametrize("where", ["images", "videos", "audios"])
def test_what_json_holds_beside_text_is_no_media(where, source):
    with pytest.raises(
        ProcessorError, match=rf"^{where}\[0\]: expected a URL, a path, base64, bytes or a decoded {where[:-1]}, got a "
    ):
        resolve_media(Work(request_id="r", **{where: [source]}))


def test_frames_and_sounds_in_memory_are_taken():
    frame, sound = np.zeros((4, 6, 3), np.uint8), np.zeros(16, np.float32)
    work = resolve_media(Work(request_id="r", videos=[[frame, frame], np.zeros((2, 4, 6, 3))], audios=[sound, (sound, 16_000)]))
    assert [one.data for one in work.media] == [None] * 4


def test_a_list_in_lists_is_an_error_and_not_the_end():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for where in ("images", "videos", "audios"):
        with pytest.raises(ProcessorError, match="expected a URL"):
            resolve_media(Work(request_id="r", **{where: [deep]}))


def test_a_buffer_that_was_released_is_an_error():
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(ProcessorError, match="released"):
        resolved(view)


@pytest.mark.parametrize("source", [b"", bytearray(), memoryview(b"abcdef")[::2]])
def test_empty_and_scattered_bytes_are_errors(source):
    with pytest.raises(ProcessorError, match=r"images\[0\]"):
        resolved(source)


# --- what must come prefetched ----------------------------------------------------------------------------------------

FETCHED = [
    "http://host/a.png",
    "https://host/a.png",
    "HTTPS://HOST/a",
    "file:///a.png",
    "file:/a.png",
    "/absolute/path.png",
    "/",
]


@pytest.mark.parametrize("url", FETCHED)
def test_urls_and_absolute_paths_take_the_prefetched_bytes_at_their_address(url):
    fetched = bytes(BYTES)
    work = resolve_media(Work(request_id="r", images=[url], prefetched=[fetched]), NO_PIXELS)
    assert address(work.images[0].data) == address(fetched)
    assert work.prefetched == ()


@pytest.mark.parametrize("url", FETCHED)
def test_a_missing_prefetch_is_an_error_that_names_the_item(url):
    with pytest.raises(ProcessorError, match=r"^images\[1\]: .*not prefetched"):
        resolved(b"x", url)


def test_a_file_that_exists_is_not_read(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(image())
    for source in (str(path), f"file://{path}"):
        with pytest.raises(ProcessorError, match="not prefetched"):
            resolved(source)


@pytest.mark.parametrize(
    ("images", "prefetched"), [([], [b"x"]), ([b"x"], [b"y"]), (["http://a"], [b"x", b"y"]), (["data:,a"], [b"x"])]
)
def test_a_left_over_prefetch_is_an_error(images, prefetched):
    wanted = sum(isinstance(one, str) and one.startswith("http") for one in images)
    with pytest.raises(ProcessorError, match=f"^prefetched: expected {wanted} .* got {len(prefetched)}"):
        resolved(*images, prefetched=prefetched)


def test_prefetched_bytes_go_to_images_then_videos_then_audios():
    work = Work(
        request_id="r",
        audios=["http://c"],
        videos=["/b"],
        images=["http://a", b"own", "https://d"],
        prefetched=[b"1", b"2", b"3", b"4"],
    )
    found = resolve_media(work, NO_PIXELS)
    assert [bytes(one.data) for one in found.media] == [b"1", b"own", b"2", b"3", b"4"]
    assert [one.kind.value for one in found.media] == ["image", "image", "image", "video", "audio"]


@pytest.mark.parametrize("prefetched", [b"abc", "abc", {1: b"x"}, [None], ["text"], [3], [b""], [np.zeros((2, 2))]])
def test_prefetched_that_is_no_list_of_bytes_is_an_error(prefetched):
    with pytest.raises(ProcessorError):
        resolved("http://a", prefetched=prefetched)


def test_media_that_carry_their_bytes_need_no_prefetch():
    work = Work(request_id="r", images=[Media("image", "http://a", memoryview(BYTES))])
    assert bytes(resolve_media(work, NO_PIXELS).images[0].data) == BYTES
    again = resolve_media(resolve_media(work, NO_PIXELS), NO_PIXELS)
    assert bytes(again.images[0].data) == BYTES


@pytest.mark.parametrize("first", [b"\xff\xd8\xff\xe0", b"\xff\xfb\x90\x00", b"\xff\xf1\x50\x80"])
def test_the_base64_of_a_jpeg_or_of_mpeg_audio_is_no_path_though_it_begins_with_a_slash(first):
    data = first + BYTES
    text = base64.b64encode(data).decode()
    assert text[0] == "/"
    assert resolved(text) == [data]
    assert resolved(base64.encodebytes(data).decode()) == [data]


def test_a_path_that_looks_like_it_is_a_path():
    for path in ("/9j/photo.jpeg", "//server/share/photo.jpg", "/9j/" + "a" * 100 + ".jpg"):
        with pytest.raises(ProcessorError, match="not prefetched"):
            resolved(path)


# --- budgets ----------------------------------------------------------------------------------------------------------


def limited(nbytes: int) -> Budgets:
    return Budgets(max_media_nbytes=nbytes, max_pixels=None)


def test_exactly_at_the_byte_budget_passes_and_one_more_does_not():
    text = base64.b64encode(BYTES[:10]).decode()
    work = Work(request_id="r", images=[b"x" * 10], videos=["http://v"], audios=[text], prefetched=[b"y" * 10])
    resolve_media(work, limited(30))
    with pytest.raises(LimitError, match=r"^audios\[0\]: .*29 bytes .*got 30"):
        resolve_media(work, limited(29))
    with pytest.raises(LimitError, match=r"^videos\[0\]"):
        resolve_media(work, limited(19))
    with pytest.raises(LimitError, match=r"^images\[0\]"):
        resolve_media(work, limited(9))
    resolve_media(work, limited(None))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 299, 300])
def test_base64_counts_as_the_bytes_it_becomes(n):
    text = base64.b64encode(BYTES[:n]).decode()
    assert resolved(text, budgets=limited(n)) == [BYTES[:n]]
    assert resolved("\n" + text + " \n", budgets=limited(n)) == [BYTES[:n]]
    with pytest.raises(LimitError):
        resolved(text, budgets=limited(n - 1))


def test_a_base64_beyond_the_budget_is_not_decoded_first(monkeypatch):
    import fastmm.processors.media as module

    def never(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(module.binascii, "a2b_base64", never)
    with pytest.raises(LimitError):
        resolved("A" * 4000, budgets=limited(100))


def test_exactly_at_the_pixel_budget_passes_and_one_more_does_not():
    work = Work(request_id="r", images=[image(size=(6, 4)), image("JPEG", (5, 3))])
    resolve_media(work, Budgets(max_pixels=39))
    with pytest.raises(LimitError, match=r"^images\[1\]: .*38 decoded pixels .*got 39"):
        resolve_media(work, Budgets(max_pixels=38))
    with pytest.raises(LimitError, match=r"^images\[0\]"):
        resolve_media(work, Budgets(max_pixels=23))


@pytest.mark.parametrize("size", [(60_000, 60_000), (1 << 30, 1 << 30), (0x7FFFFFFF, 1)])
def test_a_bomb_is_refused_by_its_header(size):
    pytest.importorskip("PIL")
    data = png_header(*size)
    with pytest.raises(LimitError, match=r"images\[0\]"):
        resolve_media(Work(request_id="r", images=[data]))


def test_pixels_are_read_from_the_header_and_nothing_is_decoded(monkeypatch):
    ImageFile = pytest.importorskip("PIL.ImageFile")

    def never(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", never)
    assert measure_pixels(Media("image", "x", memoryview(image(size=(6, 4))))) == 24
    assert measure_pixels(Media("image", "x", memoryview(png_header(700, 600)))) == 420_000


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"\xff\xd8\xff\xe0" + b"\0" * 40,
    ],
)
def test_an_image_that_cannot_be_measured_is_refused(data):
    pytest.importorskip("PIL")
    with pytest.raises(ProcessorError, match=r"^images\[0\]: expected an image that Pillow can read"):
        resolve_media(Work(request_id="r", images=[data]))
    assert resolved(data) == [data]  # the processor may know better, where there is no budget of pixels


def test_a_video_that_cannot_be_measured_is_refused_and_measure_can_be_given():
    work = Work(request_id="r", videos=[b"no video"])
    with pytest.raises(ProcessorError, match=r"^videos\[0\]"):
        resolve_media(work)
    with pytest.raises(LimitError, match=r"videos\[0\]: .*99 .*100"):
        resolve_media(work, Budgets(max_pixels=99), measure=lambda media: 100)
    resolve_media(work, Budgets(max_pixels=100), measure=lambda media: 100)
    resolve_media(work, NO_PIXELS)


class FakeVideo:
    """As PyAV reads one: what its header says, and the frames that come. Deciding needs no codec."""

    def __init__(self, come: int, **header: object) -> None:
        header = {"width": 4, "height": 2, "frames": 0, "duration": None, "time_base": 1, "average_rate": 1, **header}
        self.streams = SimpleNamespace(video=[SimpleNamespace(**header)])
        self.come = come
        self.decoded = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def decode(self, video):
        for _ in range(self.come):
            self.decoded += 1
            yield SimpleNamespace(width=4, height=2, to_ndarray=lambda **options: np.zeros((2, 4, 3), np.uint8))


@pytest.mark.parametrize("header", [{"frames": -5}, {"duration": -1000}, {"frames": 5, "width": -4}, {}])
def test_a_video_whose_header_makes_no_sense_holds_no_budget(header, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", SimpleNamespace(open=lambda file: FakeVideo(1, **header)))
    assert measure_pixels(resolve_media(Work(request_id="r", videos=[b"video"]), NO_PIXELS).media[0]) is None
    with pytest.raises(ProcessorError, match=r"^videos\[0\]"):
        resolve_media(Work(request_id="r", videos=[b"video"]))


@pytest.mark.parametrize("header", [{"frames": 8}, {"duration": 8}])
def test_a_video_with_more_frames_than_its_header_announced_is_refused(header, monkeypatch):
    from fastmm.processors.hf import load_video

    video = FakeVideo(9, **header)
    monkeypatch.setitem(sys.modules, "av", SimpleNamespace(open=lambda file: video))
    assert len(load_video(memoryview(b"video"))) == 9  # a duration and a rate are not exact
    video.come, video.decoded = 100_000, 0
    with pytest.raises(LimitError, match="64 pixels"):
        load_video(memoryview(b"video"))
    assert video.decoded < 16


def test_audio_has_no_pixels():
    resolve_media(Work(request_id="r", audios=[b"sound"]), Budgets(max_pixels=0))


@pytest.mark.parametrize(
    ("source", "pixels"),
    [
        (np.zeros((4, 6), np.uint8), 24),
        (np.zeros((4, 6, 3), np.uint8), 24),
        (np.zeros((3, 4, 6), np.uint8), 24),
        (np.zeros((10, 4, 6, 3), np.uint8), 240),
        (np.zeros((10, 3, 4, 6), np.uint8), 240),
        ([np.zeros((4, 6, 3), np.uint8)] * 10, 240),
    ],
)
def test_what_is_decoded_already_counts_by_its_shape(source, pixels):
    kind = "video" if isinstance(source, list) or source.ndim == 4 else "image"
    assert measure_pixels(Media(kind, source)) == pixels


def test_frames_without_channels_are_not_taken_for_channels():
    assert measure_pixels(Media("video", np.zeros((4, 100, 100), np.uint8))) == 40_000
    assert measure_pixels(Media("video", np.zeros((3, 4, 100, 100), np.uint8))) == 30_000


def test_a_pil_image_counts_by_its_size():
    Image = pytest.importorskip("PIL.Image")
    assert measure_pixels(Media("image", Image.new("RGB", (6, 4)))) == 24


def test_an_image_is_opened_without_copying_its_bytes():
    data = image("JPEG", (640, 480))
    with open_image(Media("image", "x", memoryview(data))) as opened:
        assert opened.size == (640, 480)
        assert np.asarray(opened).shape == (480, 640, 3)


@pytest.mark.parametrize("value", [-1, True, 1.5, "1"])
def test_a_budget_is_a_number_or_none(value):
    with pytest.raises(ProcessorError, match="max_pixels"):
        Budgets(max_pixels=value)


# --- Work and Media ---------------------------------------------------------------------------------------------------


def test_what_is_no_media_becomes_the_source_of_one():
    work = Work(request_id="r", images=["a", Media("image", "b")], audios=["c"])
    assert [(one.kind, one.source) for one in work.media] == [
        (MediaKind.IMAGE, "a"),
        (MediaKind.IMAGE, "b"),
        (MediaKind.AUDIO, "c"),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Work(request_id=""),
        lambda: Work(request_id=3),
        lambda: Work(request_id="r", text=3),
        lambda: Work(request_id="r", images="http://a"),
        lambda: Work(request_id="r", images=b"abc"),
        lambda: Work(request_id="r", images=3),
        lambda: Work(request_id="r", images=[None]),
        lambda: Work(request_id="r", images=[Media("audio", "a")]),
        lambda: Media("picture", "a"),
        lambda: Media("image", None),
    ],
)
def test_work_of_the_wrong_shape_is_refused_where_it_is_made(make):
    with pytest.raises(SchemaError):
        make()


def test_work_and_its_resolution_leave_what_came_alone():
    images, prefetched = ["http://a"], [b"x"]
    work = Work(request_id="r", images=images, prefetched=prefetched)
    resolve_media(work, NO_PIXELS)
    assert images == ["http://a"]
    assert prefetched == [b"x"]
    assert work.images[0].data is None


@pytest.mark.parametrize("seed", range(40))
def test_a_broken_image_is_an_error_and_never_a_crash(seed):
    random = np.random.default_rng(seed)
    data = bytearray(image(("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")[seed % 6], (40, 30)))
    for _ in range(8):
        data[random.integers(len(data))] = random.integers(256)
    try:
        resolve_media(Work(request_id="r", images=[bytes(data[: random.integers(1, len(data))])]))
    except FastmmError as error:
        assert error.path == "images[0]"
