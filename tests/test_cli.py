"""The command `fastmm`: help, doctor, inspect, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastmm
from fastmm.cli import COMMANDS, main


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastmm", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "usage: fastmm " + command in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["nothing"], ["demo", "--dtype", "int8"], ["inspect"]])
def test_a_command_line_that_cannot_be_read_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: fastmm" in capsys.readouterr().err


def test_the_version_is_fastmms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fastmm {fastmm.__version__}\n"


def test_help_loads_neither_zmq_nor_torch() -> None:
    script = (
        "import sys; from fastmm.cli import parser; parser().format_help();"
        "print([name for name in ('zmq', 'torch', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_the_doctor_finds_a_working_fastmm_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "all well" in said
    assert "values compared: equal" in said
    for isa in fastmm.available_isas():
        assert isa in said
    assert fastmm.selected_isa() in said


def test_the_doctor_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == []
    assert said["findings"]["numpy"] == np.__version__


@pytest.mark.parametrize(("variable", "value"), [("FASTMM_ISA", "mmx"), ("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "a lot")])
def test_the_doctor_names_a_variable_that_is_wrong(variable: str, value: str) -> None:
    done = run("doctor", **{variable: value})
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout
    assert variable in done.stdout
    assert "Traceback" not in done.stderr


# --- inspect ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> list[str]:
    feature = fastmm.MmFeatureSpec(
        data={
            "pixel_values": fastmm.MmFieldElem(
                np.arange(512, dtype=np.float32).reshape(2, 256), fastmm.MmFlatField(slices=[slice(0, 2)])
            ),
            "grid": fastmm.MmFieldElem([np.array([7, 8]), 5], fastmm.MmBatchedField(keep_on_cpu=True)),
        },
        modality="image",
        identifier="hash-1",
        mm_position=fastmm.PlaceholderRange(2, 3),
    )
    request = fastmm.EngineCoreRequest(
        "r-77", [1, 2, 424242, 4, 5], [feature], sampling_params=fastmm.SamplingParams(stop=["secret word"])
    )
    files = []
    for index, frame in enumerate(fastmm.encode_request(request, dtype="bfloat16", threshold=256)):
        (tmp_path / f"frame-{index}").write_bytes(frame)
        files.append(str(tmp_path / f"frame-{index}"))
    return files


def test_inspect_shows_the_tree_and_nothing_of_what_it_carries(stored: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *stored]) == 0
    said = capsys.readouterr().out
    assert 'request_id: "r-77"' in said
    assert "prompt_token_ids: 5 numbers" in said
    assert "data: tensor bfloat16 [2, 256], 1,024 bytes, in frame 1" in said
    assert "[0]: tensor int64 [2], 16 bytes, inline" in said
    assert "field: flat, keep_on_cpu false, slices [[0, 2, null]], dim 0" in said
    assert 'identifier: "hash-1"' in said
    assert "session_id: null" in said
    for carried in ("424242", "secret"):
        assert carried not in said


def test_inspect_shows_other_messages_by_their_own_names_or_by_place(
    stored: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--type", "outputs", stored[0]]) == 0
    assert "engine_index: " in capsys.readouterr().out
    assert main(["inspect", "--type", "plain", stored[0]]) == 0
    assert "$: array of 22" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x92\x01", b"\x01\x02"])
def test_inspect_says_that_bytes_are_no_message_and_exits_with_1(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "main").write_bytes(content)
    assert main(["inspect", str(tmp_path / "main")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fastmm inspect: these frames are no message: ")
    assert err.count("\n") == 1


def test_inspect_says_that_a_file_is_missing_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_inspect_says_that_a_map_is_no_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "map").write_bytes(b"\x81\xa1a\x01")
    assert main(["inspect", str(tmp_path / "map")]) == 1
    assert "take --type plain" in capsys.readouterr().err
    assert main(["inspect", "--type", "plain", str(tmp_path / "map")]) == 0
    assert "a: 1" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_is_no_error(stored: list[str]) -> None:
    words = [sys.executable, "-m", "fastmm", "inspect", *stored]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
