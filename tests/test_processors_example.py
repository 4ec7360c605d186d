"""The example package, installed as a user installs it: found by its entry point, conforming, and used in the demo."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "patch-processor"

pytestmark = pytest.mark.no_asan  # a new interpreter each, and Pillow

for needed in ("PIL", "msgspec", "pip", "torch"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}", allow_module_level=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the example is installed, in a directory of its own: nothing is fetched or left behind."""
    directory = tmp_path_factory.mktemp("example")
    source = shutil.copytree(EXAMPLE, directory / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(directory / "site"), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    paths = [str(directory / "site"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(environment: dict[str, str], *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def test_it_is_found_by_its_entry_point(environment):
    code = "from fastmm.processors import *; print(available_processors()['patches'], type(load_processor('patches')).__name__)"
    ended = run(environment, "-c", code)
    assert ended.stdout.split() == ["fastmm_patches:PatchProcessor", "PatchProcessor"], ended.stderr


def test_its_own_tests_pass(environment, tmp_path):
    ended = run(
        environment,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(EXAMPLE / "tests"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_demo_uses_it_and_every_value_arrives(environment, tmp_path):
    from PIL import Image

    Image.linear_gradient("L").resize((300, 200)).convert("RGB").save(tmp_path / "gradient.png")
    words = ["-m", "fastmm", "demo", str(tmp_path / "gradient.png"), "-o", str(tmp_path / "out"), "--json"]
    by_processor, by_itself = (run(environment, *words, *more) for more in (["--processor", "patches"], []))
    assert by_processor.returncode == 0, by_processor.stderr
    report, other = json.loads(by_processor.stdout), json.loads(by_itself.stdout)
    assert report["equal"]
    assert report["values"] == other["values"] > 0
    assert report["frames_at_tensors"] == other["frames_at_tensors"] == 1


def test_the_demo_names_the_processors_there_are(environment):
    ended = run(environment, "-m", "fastmm", "demo", "--processor", "nobody")
    assert ended.returncode == 2
    assert "'nobody': installed are 'patches'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_type_checker_takes_it_for_a_processor(environment, tmp_path):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy")
    (tmp_path / "uses.py").write_text(
        "from fastmm.processors import HfProcessor, Processor, ProcessorPool, Work\n"
        "from fastmm.processors.testing import check_processor\n"
        "from fastmm_patches import PatchProcessor\n"
        "one: Processor = PatchProcessor()\n"
        "other: Processor = HfProcessor(None)\n"
        "check_processor(PatchProcessor(), [Work(request_id='r', images=[b'x'])])\n"
        "ProcessorPool(PatchProcessor())\n"
    )
    ended = run(environment, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "uses.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_demo_says_which_processors_it_can_show(environment, tmp_path):
    (tmp_path / "other.py").write_text(
        "import numpy as np\n"
        "from fastmm.processors import *\n"
        "class Other:\n"
        "    schema = None\n"
        "    def process(self, work, tokenizer):\n"
        "        item = ProcessedItem(modality='image', features={'pixels': np.zeros(3)}, hash='h', spans=[(0, 0)])\n"
        "        return Processed(prompt_token_ids=[1, 2], items=[item])\n"
    )
    from PIL import Image

    Image.new("RGB", (60, 60)).save(tmp_path / "black.png")
    ended = run(environment, "-m", "fastmm", "demo", "black.png", "--processor", "other:Other", cwd=tmp_path)
    assert ended.returncode == 2
    assert "image_grid_thw and pixel_values; this one makes pixels" in ended.stderr
    assert "Traceback" not in ended.stderr
