"""A vLLM that is not as fastmm needs it is left alone, with one clear warning; an unknown one that fits is used."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from vllm.v1 import serial_utils

from fastmm.integrations.vllm import codec, gate, plugin
from fastmm.integrations.vllm.originals import VllmDecoder, VllmEncoder


@pytest.fixture(autouse=True)
def _vllm_gets_its_names_back():
    assert plugin.state.mode == "off"
    yield
    plugin.switch_off()


def altered(**changes):
    """A serial_utils like the real one, with something changed: name, or Class__method, to a value; None takes it away."""
    module = SimpleNamespace(**vars(serial_utils))
    for name, value in changes.items():
        owner, _, method = name.partition("__")
        if method:
            setattr(module, owner, type(owner, (getattr(serial_utils, owner),), {method: value}))
        elif value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    return module


def test_the_installed_version_is_a_tested_one_and_fits():
    verdict = gate.examine()
    assert verdict.version == vllm.__version__
    assert verdict == gate.Verdict(vllm.__version__, True, ())


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.32.0", "0.32"),
        ("0.32.1+cpu", "0.32"),
        ("0.33.1rc1.dev12+gabcdef", "0.33"),
        ("v0.30.2", "0.30"),
        ("0.3", "0.3"),
        ("1.0.0", "1.0"),
        ("dev", ""),
        ("", ""),
    ],
)
def test_a_version_is_read_down_to_its_release_line(version, line):
    assert gate.release(version) == line


@pytest.mark.parametrize("version", ["0.29.0", "0.34.0", "0.3.0", "0.330.0", "1.0", "dev"])
def test_an_untested_version_that_fits_is_used_and_called_untested(version):
    verdict = gate.examine(version=version)
    assert verdict.fits
    assert not verdict.tested


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"MsgpackEncoder__encode": lambda self, obj, priority: None}, "MsgpackEncoder.encode takes (self, obj, priority)"),
        ({"MsgpackEncoder__encode_into": lambda self, obj: None}, "MsgpackEncoder.encode_into takes (self, obj)"),
        ({"MsgpackEncoder____init__": lambda self, size_threshold=None: None}, "MsgpackEncoder.__init__ takes"),
        ({"MsgpackDecoder____init__": lambda self, t, share_mem, provider, pin: None}, "expected (self, t, share_mem, oob"),
        ({"MsgpackDecoder__decode": None}, "MsgpackDecoder.decode is missing"),
        ({"MsgpackDecoder": None}, "MsgpackDecoder.decode is missing"),
        ({"CUSTOM_TYPE_RAW_VIEW": 4}, "CUSTOM_TYPE_RAW_VIEW is 4, expected 3"),
        ({"UtilityResult": None}, "UtilityResult is missing"),
    ],
)
def test_a_name_or_a_signature_that_does_not_fit_is_named(changes, said):
    assert any(said in misfit for misfit in gate.signature_misfits(altered(**changes)))


def test_the_real_module_has_no_misfit():
    assert list(gate.signature_misfits(altered())) == []
    assert list(gate.field_misfits(altered())) == []


def test_a_kind_of_field_that_is_new_or_different_is_named():
    kinds = dict(serial_utils.MMF_CLASS_TO_FACTORY)
    assert "kinds of fields" in next(gate.field_misfits(altered(MMF_CLASS_TO_FACTORY=kinds | {SimpleNamespace: "ragged"})))
    other = type("MultiModalFlatField", (), {"__dataclass_fields__": {"slices": None}})
    swapped = {(other if name == "flat" else cls): name for cls, name in kinds.items()}
    (said,) = gate.field_misfits(altered(MMF_CLASS_TO_FACTORY=swapped))
    assert "MultiModalFlatField has slices, expected keep_on_cpu, slices, dim" in said


def test_an_encoder_that_writes_other_bytes_is_found_out(monkeypatch):
    def wrong(self, obj):
        frames = VllmEncoder.encode(VllmEncoder(), obj)
        return [bytes(frames[0][:-1]) + b"\xc1", *frames[1:]]

    monkeypatch.setattr(codec.MsgpackEncoder, "encode", wrong)
    misfits = gate.examine().misfits
    assert any("a text request, encoded: frame 0 differs at byte" in misfit for misfit in misfits)


def test_a_decoder_that_makes_other_objects_is_found_out(monkeypatch):
    def wrong(self, bufs):
        decoded = VllmDecoder.decode(self, bufs)
        if hasattr(decoded, "prompt_token_ids"):
            decoded.prompt_token_ids = [1, 2, 3]
        return decoded

    monkeypatch.setattr(codec.MsgpackDecoder, "decode", wrong)
    misfits = gate.examine().misfits
    assert any("a text request, decoded: $.prompt_token_ids[1]" in misfit for misfit in misfits)


@pytest.mark.parametrize(
    ("replaced", "written", "said"),
    [
        (np.ndarray, ("np", "<f4", (1,), b""), "an output with 2 log probabilities, encoded: frame 0"),
        (torch.Tensor, ("float32", (1,), 0, "cpu"), "a multimodal request, encoded: frame 0"),
    ],
)
def test_a_vllm_that_writes_something_else_is_found_out(replaced, written, said, monkeypatch):
    hook = VllmEncoder.enc_hook
    monkeypatch.setattr(VllmEncoder, "enc_hook", lambda self, obj: written if isinstance(obj, replaced) else hook(self, obj))
    misfits = gate.examine().misfits
    assert any(said in misfit for misfit in misfits), misfits


def test_what_raises_while_it_is_looked_at_does_not_fit():
    def broken():
        raise RuntimeError("no such thing")
        yield

    verdict = gate.examine(try_out=broken)
    assert verdict.misfits == ("RuntimeError while looking: no such thing",)


@pytest.mark.parametrize("mode", ["1", "shadow"])
def test_a_misfit_leaves_vllm_alone_with_one_warning(mode, monkeypatch, caplog):
    monkeypatch.setenv("FASTMM_VLLM", mode)
    monkeypatch.setattr(VllmEncoder, "encode_into", lambda self, obj, buf, more: None)
    with caplog.at_level(logging.INFO, logger="vllm.fastmm"):
        vllm_logger = logging.getLogger("vllm")
        monkeypatch.setattr(vllm_logger, "propagate", True)
        plugin.register()
    assert plugin.state.mode == "off"
    assert serial_utils.MsgpackEncoder is VllmEncoder
    assert serial_utils.MsgpackDecoder is VllmDecoder
    # One record, however many handlers hand it on.
    (warning,) = {id(record): record.getMessage() for record in caplog.records if record.name == "vllm.fastmm"}.values()
    assert "MsgpackEncoder.encode_into takes (self, obj, buf, more), expected (self, obj, buf)" in warning
    assert "vLLM keeps its own" in warning
    assert vllm.__version__ in warning


def command(**environment):
    """Run the module as a container's start-up would."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FASTMM_", "VLLM_PLUGINS"))}
    return subprocess.run(
        [sys.executable, "-m", "fastmm.integrations.vllm"],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_command_says_what_would_be_patched_and_exits_with_the_verdict():
    done = command(FASTMM_VLLM="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"vLLM          {vllm.__version__} (tested)" in done.stdout
    assert "FASTMM_VLLM   1: on" in done.stdout
    assert "engine core   outlives malformed messages" in done.stdout
    for holder in plugin.HOLDERS:
        assert f"{holder}: Msgpack" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("verdict       fits: on")


def test_the_command_says_when_the_plugin_would_not_be_loaded():
    done = command(FASTMM_VLLM="1", VLLM_PLUGINS="lora_resolver,another")
    assert done.returncode == 1
    assert "VLLM_PLUGINS=lora_resolver,another keeps it out" in done.stdout
    assert "would not load it" in done.stdout.splitlines()[-1]
