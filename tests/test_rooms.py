"""The rooms of the design hold, and the check that says so can fail."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import check_rooms  # noqa: E402


def faults_of(tmp_path, name, source):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return [fault.partition(str(file))[2] for fault in check_rooms.faults(tmp_path)]


def test_every_import_of_fastmm_goes_to_a_room_on_the_left():
    assert list(check_rooms.faults(ROOT / "src" / "fastmm")) == []


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("schema.py", "from fastmm.codec import Encoder\n", "room on its right"),
        ("schema.py", "from .codec import Encoder\n", "room on its right"),
        ("schema.py", "def f():\n    from fastmm import codec\n", "room on its right"),
        ("schema/part.py", "from ..codec import Encoder\n", "room on its right"),
        (
            "_native/frame.pyx",
            "from fastmm._native.plan cimport x\nfrom fastmm.codec import y\n",
            ":2: _native imports fastmm.codec",
        ),
        ("_native/frame.pyx", "cdef f():\n    import fastmm.features\n", "room on its right"),
        ("_native/frame.pxd", "cimport fastmm.codec as c\n", "room on its right"),
        ("_native/frame.pyx", "from ..codec cimport c\n", "room on its right"),
        ("codec.py", "import fastmm\n", "public names"),
        ("codec.py", "from fastmm import Encoder\n", "public names"),
        ("codec.py", "import zmq\n", "only transport"),
        ("codec.py", "def f():\n    import zmq\n", "only transport"),
        ("codec.py", "import torch\n", "module scope"),
        ("_native/tensor.pyx", "import torch\n", "module scope"),
        ("codec.py", "try:\n    import torch\nexcept ImportError:\n    torch = None\n", "module scope"),
        ("codec.py", "class A:\n    import torch\n", "module scope"),
        ("cli/demo.py", "from vllm import LLM\n", "only integrations/vllm"),
        ("integrations/sglang.py", "def f():\n    import vllm\n", "only integrations/vllm"),
        ("codec.py", "import pickle\n", "pickle"),
        ("helpers.py", "", "not one of the rooms"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, name, source, said):
    found = faults_of(tmp_path, name, source)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("codec.py", "from fastmm._native.encoder import encode\nfrom fastmm.schema import EngineCoreRequest\nimport numpy\n"),
        ("codec.py", "def f():\n    import torch\n"),
        ("codec.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"),
        ("_native/tensor.pyx", "cimport numpy as cnp\nfrom libc.stdint cimport int64_t\nfrom .frame cimport Frame\n"),
        ("_native/tensor.pyx", "cdef f():\n    import torch\n"),
        ("transport/client.py", "import zmq\nfrom zmq import asyncio\nfrom fastmm.codec import Encoder\n"),
        ("integrations/vllm/codec.py", "import vllm\nimport torch\nimport fastmm\n"),
        ("cli/demo.py", "import fastmm\n"),
    ],
)
def test_what_is_allowed_is_not_a_fault(tmp_path, name, source):
    assert faults_of(tmp_path, name, source) == []
