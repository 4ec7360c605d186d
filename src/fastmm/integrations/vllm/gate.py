"""Does this vLLM look as fastmm needs it to? Names, signatures, and a few messages through both encoders and decoders.

Versions in ``TESTED`` are tested: 0.33 and 0.32 with each change of fastmm, the others by ``make test-vllm VLLM=0.30.0``.
Another one is used when all of this fits; when something does not, vLLM is left alone. Importing this module imports nothing
of vLLM.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

TESTED = ("0.30", "0.31", "0.32", "0.33")

SERIAL_UTILS = "vllm.v1.serial_utils"

# What callers inside vLLM may pass: a parameter more is one that fastmm's classes would refuse.
SIGNATURES = {
    "MsgpackEncoder.__init__": ("self", "size_threshold", "oob_tensor_consumer"),
    "MsgpackEncoder.encode": ("self", "obj"),
    "MsgpackEncoder.encode_into": ("self", "obj", "buf"),
    "MsgpackEncoder.enc_hook": ("self", "obj"),
    "MsgpackDecoder.__init__": ("self", "t", "share_mem", "oob_tensor_provider"),
    "MsgpackDecoder.decode": ("self", "bufs"),
    "MsgpackDecoder.dec_hook": ("self", "t", "obj"),
    "MsgpackDecoder.ext_hook": ("self", "code", "data"),
}
CONSTANTS = {"CUSTOM_TYPE_PICKLE": 1, "CUSTOM_TYPE_CLOUDPICKLE": 2, "CUSTOM_TYPE_RAW_VIEW": 3}
CLASSES = ("UtilityResult", "OOBTensorConsumer")
FIELDS = {"batched": ("keep_on_cpu",), "flat": ("keep_on_cpu", "slices", "dim"), "shared": ("keep_on_cpu", "batch_size")}
FEATURE = ("data", "modality", "identifier", "mm_position", "mm_hash")


@dataclass(frozen=True)
class Verdict:
    """What the gate found: the version, whether it is a tested one, and all that does not fit."""

    version: str
    tested: bool
    misfits: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.misfits


def release(version: str) -> str:
    """The release line of a version: ``0.32`` of ``0.32.1rc1.dev12+cpu``; empty when it has none."""
    found = re.match(r"v?(\d+\.\d+)(?!\d)", version)
    return found[1] if found else ""


def examine(*, version: str | None = None, try_out: Callable[[], Iterator[str]] | None = None) -> Verdict:
    """Look at the vLLM of this process. Never raises: what cannot be looked at does not fit.

    Parameters
    ----------
    version
        To be used in the place of ``vllm.__version__``.
    try_out
        Sends messages through both sides and says what differs. None: ``fastmm.integrations.vllm.trial``.
    """
    if version is None:
        version = str(getattr(import_module("vllm"), "__version__", "unknown"))
    misfits: list[str] = []
    try:
        serial_utils = import_module(SERIAL_UTILS)
        misfits.extend(signature_misfits(serial_utils))
        if not misfits:
            misfits.extend(field_misfits(serial_utils))
        if not misfits:
            misfits.extend((try_out or _trial)())
    except Exception as error:
        misfits.append(f"{type(error).__name__} while looking: {str(error)[:200]}")
    return Verdict(version, release(version) in TESTED, tuple(misfits))


def signature_misfits(serial_utils: Any) -> Iterator[str]:
    """Names that lack, and functions that take something else."""
    for name, expected in SIGNATURES.items():
        owner, _, method = name.partition(".")
        function = getattr(getattr(serial_utils, owner, None), method, None)
        if function is None:
            yield f"{name} is missing"
            continue
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            yield f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})"
    for name, value in CONSTANTS.items():
        if getattr(serial_utils, name, None) != value:
            yield f"{name} is {getattr(serial_utils, name, 'missing')}, expected {value}"
    for name in CLASSES:
        if not isinstance(getattr(serial_utils, name, None), type):
            yield f"{name} is missing"


def field_misfits(serial_utils: Any) -> Iterator[str]:
    """Classes of multimodal data that have other members than fastmm writes and reads."""
    factories = {name: cls for cls, name in serial_utils.MMF_CLASS_TO_FACTORY.items()}
    if set(factories) != set(FIELDS):
        yield f"kinds of fields are {sorted(factories)}, expected {sorted(FIELDS)}"
        return
    for name, expected in FIELDS.items():
        if (found := _members(factories[name])) != expected:
            yield f"{factories[name].__name__} has {', '.join(found)}, expected {', '.join(expected)}"
    inputs = import_module("vllm.multimodal.inputs")
    if (found := _members(inputs.MultiModalFeatureSpec)) != FEATURE:
        yield f"MultiModalFeatureSpec has {', '.join(found)}, expected {', '.join(FEATURE)}"


def _members(cls: Any) -> tuple[str, ...]:
    return tuple(cls.__dataclass_fields__)


def _trial() -> Iterator[str]:
    from .trial import try_out

    return try_out()
