"""`fastmm demo`: real photographs cross to a real second process, and nothing but equality is called equal."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bare_client import BareClient
from support.sabotage import break_requests

import fastmm
from fastmm.cli import front_end, main
from fastmm.cli.photograph import Photograph, load_photograph, patches_of, pixels_of, resized_size
from fastmm.cli.request import bytes_of, request_for
from fastmm.cli.verdict import compare, converted

image = pytest.importorskip("PIL.Image", reason="the demo reads photographs with Pillow")
pytest.importorskip("skimage", reason="the demo's photographs are scikit-image's")

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_ml_dtypes = pytest.mark.skipif(importlib.util.find_spec("ml_dtypes") is None, reason="ml_dtypes is not installed")


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastmm", "demo", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def figures(*words: str | Path, cwd: Path) -> dict[str, Any]:
    done = run(*words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def picture(path: Path) -> np.ndarray:
    with image.open(path) as file:
        assert file.mode == "RGB"
        return np.asarray(file)


@pytest.fixture
def photograph() -> Photograph:
    rng = np.random.default_rng(5)
    return Photograph("noise", (84, 56), rng.integers(0, 256, (56, 84, 3), dtype=np.uint8))


@needs_torch
@pytest.mark.no_asan
def test_a_photograph_arrives_equal_and_is_painted_back(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "equal: all 1,524,096 values" in done.stdout
    assert "NOT" not in done.stdout
    assert "torch" in done.stdout
    assert fastmm.selected_isa() in done.stdout
    from skimage import data

    painted = picture(tmp_path / "fastmm-demo" / "astronaut.png")
    original = np.asarray(image.fromarray(data.astronaut()).resize((504, 504), image.Resampling.BICUBIC))
    assert painted.shape == (504, 504, 3)
    assert np.abs(painted.astype(int) - original.astype(int)).max() <= 1


def test_the_patches_are_viewed_where_they_lie_and_nothing_large_is_copied(tmp_path: Path) -> None:
    report = figures("coffee", "--tensors", "wire", cwd=tmp_path)
    patches_nbytes = 1176 * 1176 * 2
    assert report["nbytes_viewed"] == patches_nbytes
    assert report["nbytes_copied"] == 24  # the grid, in the main frame
    assert report["nbytes_cast"] == 2 * patches_nbytes
    assert report["frames_nbytes"][1:] == [patches_nbytes]
    assert report["frames_at_tensors"] == 1
    assert report["reference"] == "converted by integer arithmetic"
    assert report["values"] == 1176 * 1176
    assert report["equal"] is True
    assert set(report["milliseconds"]) == {"cast", "encode", "decode", "arrive", "answer"}
    assert report["nbytes_in_flight"] == 0
    assert report["processes"][0] != report["processes"][1]


def test_several_photographs_travel_in_one_request(tmp_path: Path) -> None:
    report = figures("coffee", "chelsea", "coffee", "--tensors", "wire", "-o", "painted", cwd=tmp_path)
    assert [p["patches"] for p in report["photographs"]] == [1176, 704, 1176]
    assert len(report["frames_nbytes"]) == 4
    assert report["values"] == (1176 + 704 + 1176) * 1176
    names = sorted(path.name for path in (tmp_path / "painted").iterdir())
    assert names == ["chelsea.png", "coffee-2.png", "coffee.png"]
    assert np.array_equal(picture(tmp_path / "painted/coffee.png"), picture(tmp_path / "painted/coffee-2.png"))


def test_inline_patches_travel_in_the_main_frame(tmp_path: Path) -> None:
    report = figures("chelsea", "--inline", "--tensors", "wire", cwd=tmp_path)
    assert len(report["frames_nbytes"]) == 1
    assert report["nbytes_viewed"] == 0
    assert report["nbytes_copied"] == 704 * 1176 * 2 + 24


def test_without_inplace_no_frame_lies_over_the_patches(tmp_path: Path) -> None:
    report = figures("chelsea", "--no-inplace", "--tensors", "wire", cwd=tmp_path)
    assert report["frames_nbytes"][1:] == [704 * 1176 * 2]
    assert report["frames_at_tensors"] == 0


@needs_ml_dtypes
def test_numpy_holds_the_patches_where_ml_dtypes_is_installed(tmp_path: Path) -> None:
    report = figures("chelsea", "--tensors", "numpy", cwd=tmp_path)
    assert report["reference"] == "as ml_dtypes converts them"


@pytest.mark.parametrize(("dtype", "item_nbytes"), [("float16", 2), ("float32", 4)])
def test_other_dtypes_arrive_equal(dtype: str, item_nbytes: int, tmp_path: Path) -> None:
    report = figures("chelsea", "--dtype", dtype, "--tensors", "wire", cwd=tmp_path)
    assert report["nbytes_viewed"] == 704 * 1176 * item_nbytes
    assert report["nbytes_cast"] == (704 * 1176 * 4 if dtype == "float16" else 0)


def test_a_photograph_of_ones_own_is_read_upright(tmp_path: Path) -> None:
    source = image.new("RGB", (80, 40), (255, 0, 0))
    source.paste((0, 0, 255), (0, 0, 40, 40))
    exif = source.getexif()
    exif[274] = 6  # turned by a quarter: what was left is at the top
    source.save(tmp_path / "own.jpg", exif=exif, quality=95)
    report = figures("own.jpg", "--tensors", "wire", cwd=tmp_path)
    assert report["photographs"][0]["original_size"] == [40, 80]
    painted = picture(tmp_path / "fastmm-demo" / "own.png").astype(int)
    assert painted[5, 30, 2] > 200 > 50 > painted[5, 30, 0]
    assert painted[-5, 30, 0] > 200 > 50 > painted[-5, 30, 2]


# --- what it must not call equal --------------------------------------------------------------------------------------


def test_one_wrong_value_is_not_equal_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tampered(*arguments: Any) -> fastmm.EngineCoreRequest:
        request = request_for(*arguments)
        bytes_of(request.mm_features[0].data["pixel_values"].data).view(np.float32)[1000] += 0.5
        return request

    monkeypatch.setattr(front_end, "request_for", tampered)  # the sender's only: the second process is another one
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "chelsea", "--tensors", "wire"]) == 1
    assert "NOT EQUAL: 1 of 827,904 values differ" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["grid", "ids", "hash", "position", "dtype", "features"])
def test_anything_else_that_differs_is_not_equal(what: str, photograph: Photograph) -> None:
    def arrived() -> fastmm.EngineCoreRequest:
        sent = request_for([photograph], "r", "wire")
        return fastmm.decode_request(fastmm.encode_request(sent, dtype="bfloat16"), tensors="wire")

    good = compare(arrived(), request_for([photograph], "r", "wire"), "bfloat16", "wire")
    assert (good["values"], good["differing"], good["faults"]) == (24 * 1176, 0, [])
    request = arrived()
    feature = request.mm_features[0]
    if what == "grid":
        feature.data["image_grid_thw"].data = fastmm.WireTensor("int64", (3,), np.array([1, 6, 4]))
    elif what == "ids":
        request.prompt_token_ids[7] += 1
    elif what == "hash":
        feature.mm_hash = "another"
    elif what == "position":
        feature.mm_position.offset += 1
    elif what == "dtype":
        feature.data["pixel_values"].data = fastmm.WireTensor("float16", (24, 1176), bytes(24 * 1176 * 2))
    else:
        request.mm_features.append(feature)
    bad = compare(request, request_for([photograph], "r", "wire"), "bfloat16", "wire")
    assert bad["faults"]


# --- patches ----------------------------------------------------------------------------------------------------------


def test_patches_are_in_the_order_of_qwen2_vl(photograph: Photograph) -> None:
    """One value of each patch, found the slow way; tests/vllm compares with the real processor."""
    patches = patches_of(photograph)
    assert patches.shape == (24, 1176)
    assert patches.dtype == np.float32
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    index = 0
    for block_row in range(2):
        for block_column in range(3):
            for row in range(2):
                for column in range(2):
                    for channel, frame, y, x in [(0, 0, 0, 0), (1, 1, 3, 9), (2, 0, 13, 13)]:
                        level = photograph.pixels[(2 * block_row + row) * 14 + y, (2 * block_column + column) * 14 + x, channel]
                        wanted = (level / 255 - mean[channel]) / std[channel]
                        got = patches[index, ((channel * 2 + frame) * 14 + y) * 14 + x]
                        assert got == pytest.approx(wanted, abs=1e-6)
                    index += 1


def test_pixels_come_back_from_patches(photograph: Photograph) -> None:
    assert np.array_equal(pixels_of(patches_of(photograph), photograph.grid_thw), photograph.pixels)


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((512, 512), (504, 504)),
        ((600, 400), (588, 392)),
        ((1, 1), (56, 56)),
        ((28, 28), (56, 56)),
        ((4000, 3000), (1148, 840)),
        ((200, 1), (812, 28)),
    ],
)
def test_sizes_are_multiples_of_28_within_the_limits(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert resized_size(*size, Path("a")) == resized
    assert 56 * 56 <= resized[0] * resized[1] <= 28 * 28 * 1280


@pytest.mark.parametrize(
    "tensors", ["wire", pytest.param("numpy", marks=needs_ml_dtypes), pytest.param("torch", marks=needs_torch)]
)
def test_every_reference_conversion_says_the_same(tensors: str) -> None:
    values = np.random.default_rng(1).standard_normal(4096, dtype=np.float32)
    values[:4] = [0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]  # ties
    bits, _how = converted(values, "bfloat16", tensors)
    assert bits[:4].tolist() == [0, 0x8000, 0x3F80, 0x3F82]
    assert np.array_equal(bits, converted(values, "bfloat16", "wire")[0])


# --- bad input --------------------------------------------------------------------------------------------------------


def bad_files(directory: Path) -> dict[str, tuple[str, str]]:
    """A word for the command line, what makes it bad, and what the one line must say."""
    (directory / "text.png").write_text("hello")
    (directory / "empty.jpg").touch()
    (directory / "a directory").mkdir()
    image.new("RGB", (3000, 10)).save(directory / "long.png")
    image.new("I;16", (60, 60), 30000).save(directory / "deep.png")
    image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)).save(directory / "whole.png")
    (directory / "cut.png").write_bytes((directory / "whole.png").read_bytes()[:5000])
    return {
        "missing.png": ("missing.png", "there is no such file"),
        "no sample": ("nobody", "there is no such file"),
        "directory": ("a directory", "is not a file"),
        "text": ("text.png", "not a picture"),
        "empty": ("empty.jpg", "not a picture"),
        "cut": ("cut.png", "cannot be read"),
        "long": ("long.png", "aspect ratio of at most 200"),
        "deep": ("deep.png", "8 bits"),
        "endless": ("x" * 5000, "File name too long"),
    }


@pytest.mark.parametrize("kind", ["missing.png", "no sample", "directory", "text", "empty", "cut", "long", "deep", "endless"])
def test_a_bad_photograph_is_one_clear_line_and_exit_2(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    word, says = bad_files(tmp_path)[kind]
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "chelsea", word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fastmm demo: ")
    assert err.count("\n") == 1
    assert says in err
    assert word[:80] in err
    assert not (tmp_path / "fastmm-demo").exists()


def test_an_output_that_cannot_be_made_is_one_clear_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["demo", "chelsea", "--output", str(tmp_path / "file")]) == 2
    assert "give another directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "words", "says"),
    [
        ("PIL", [], "Pillow: pip install 'fastmm[demo]'"),
        ("skimage", [], "pip install 'fastmm[demo]'"),
        ("torch", ["--tensors", "torch"], "pip install 'fastmm[torch]'"),
        ("ml_dtypes", ["--tensors", "numpy"], "pip install ml_dtypes"),
    ],
)
def test_a_missing_package_is_one_clear_line_and_exit_2(
    missing: str, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else found(name, *rest))
    monkeypatch.setitem(sys.modules, missing, None)  # what `import` then finds
    assert main(["demo", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_second_process_that_ends_early_is_one_clear_line_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "chelsea", "--tensors", "wire"]) == 1
    err = capsys.readouterr().err
    assert "the second process ended before it was ready, with exit status 1" in err
    assert err.count("\n") == 1


def test_a_second_process_that_is_killed_is_one_clear_line_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create = asyncio.create_subprocess_exec

    async def create_and_remember(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await create(*words, **options)
        monkeypatch.setattr(front_end, "request_for", lambda *rest: (process.kill(), request_for(*rest))[1])
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_and_remember)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "chelsea", "--tensors", "wire"]) == 1
    err = capsys.readouterr().err
    assert err == "fastmm demo: the second process ended before it answered, with exit status -9\n"


def test_frames_lost_on_the_way_are_one_clear_line_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_requests(monkeypatch, "", "lost")
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "chelsea", "--tensors", "wire"]) == 1
    err = capsys.readouterr().err
    assert "the second process could not use the request: DecodeError: $.mm_features[0].data['pixel_values']" in err
    assert err.count("\n") == 1


def test_the_second_process_does_not_outlive_its_front_end(tmp_path: Path) -> None:
    image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "a.png")
    client = BareClient(tmp_path)
    settings = {
        "photographs": [str(tmp_path / "a.png")],
        "pictures": [str(tmp_path / "b.png")],
        "request_id": "demo",
        "dtype": "bfloat16",
        "tensors": "wire",
        "handshake": client.address,
    }
    with subprocess.Popen([sys.executable, "-m", "fastmm.cli.painter", json.dumps(settings)]) as painter:
        client.greet()
        client.close()  # as the kernel does for a process that is killed
        assert painter.wait(60) == 0


def test_load_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()
    assert load_photograph(tmp_path / "a.png").pixels[0, 0].tolist() == [1, 2, 3]
    assert (tmp_path / "a.png").read_bytes() == before
