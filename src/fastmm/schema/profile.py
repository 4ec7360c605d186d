"""Which fields each vLLM release knows, 0.22 to 0.33: the layouts that an engine of that release writes and reads.

Positional classes are the reason: a field added in the middle moves all that follow it. In this span that happened twice.
0.26 put ``ec_transfer_params`` at position 9 of an output, and 0.32 took ``tensorizer_config_dict`` from position 4 of a LoRA
request; all other fields were added last. Classes written as maps only gained names, which an engine that lacks them skips.

The table was read off the sources of each release's wheel.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeAlias

from ..errors import CompatError, SchemaError
from .outputs import EngineCoreOutput, EngineCoreOutputs, LogprobsTensors
from .params import LoRARequest, PoolingParams, SamplingParams
from .request import EngineCoreRequest

Layout: TypeAlias = tuple[str, ...]

_OLDEST, _NEWEST = 22, 33

# The minor release that first had a field; what is not named here is as old as 0.22.
_SINCE: dict[type, dict[str, int]] = {
    EngineCoreRequest: {"session_id": 28, "kv_hints": 31},
    EngineCoreOutputs: {"weight_version": 32},
    EngineCoreOutput: {
        "ec_transfer_params": 26,
        "mm_cache_miss_hashes": 28,
        "new_sampling_mask": 28,
        "spec_decode_metrics": 29,
        "prompt_token_id_logprobs": 31,
        "error": 33,
    },
    LogprobsTensors: {"cu_num_generated_tokens_tensor": 29},
    PoolingParams: {"late_chunking_params": 33},
    LoRARequest: {},
    SamplingParams: {
        "stream_interval": 27,
        "trace_decode_token_ids": 29,
        "watermarking": 30,
        # 0.31 had it as one list of ids for all positions; as the array of ids per position that it is now, since 0.32.
        "prompt_logprob_token_ids": 32,
        "prompt_logprob_start": 31,
        "_watermarking_skipped": 32,
    },
}
# What was taken out: position, name, and the release that first lacked it. It was always nil for whoever did not set it.
_GONE: dict[type, tuple[int, str, int]] = {LoRARequest: (4, "tensorizer_config_dict", 32)}


def _layout(cls: type, minor: int) -> Layout:
    since = _SINCE[cls]
    names = [f.name for f in fields(cls) if since.get(f.name, 0) <= minor]
    position, name, until = _GONE.get(cls, (0, "", 0))
    if minor < until:
        names.insert(position, name)
    return tuple(names)


@dataclass(frozen=True, slots=True)
class WireProfile:
    """The wire of one vLLM release.

    Attributes
    ----------
    name
        ``"0.22"`` to ``"0.33"``.
    layouts
        By name of the class: its fields, in wire order. Only classes that differ between releases are in it.
    """

    name: str
    layouts: MappingProxyType[str, Layout] = field(repr=False, compare=False, hash=False)

    @property
    def index(self) -> int:
        """Place in `PROFILES`."""
        return int(self.name.partition(".")[2]) - _OLDEST

    def elements(self, cls: type | str) -> int:
        """How many fields instances of `cls` have on this wire."""
        return len(self.layouts[cls if isinstance(cls, str) else cls.__name__])

    @property
    def request_elements(self) -> int:
        """Length of a request's array."""
        return self.elements(EngineCoreRequest)

    @property
    def output_elements(self) -> int:
        """Length of one output's array."""
        return self.elements(EngineCoreOutput)

    @property
    def outputs_elements(self) -> int:
        """Length of the array that a message of outputs is."""
        return self.elements(EngineCoreOutputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_by_name, (self.name,))


PROFILES: tuple[WireProfile, ...] = tuple(
    WireProfile(f"0.{minor}", MappingProxyType({cls.__name__: _layout(cls, minor) for cls in _SINCE}))
    for minor in range(_OLDEST, _NEWEST + 1)
)
OLDEST, NEWEST = PROFILES[0], PROFILES[-1]


def _by_name(name: str) -> WireProfile:
    return next(profile for profile in PROFILES if profile.name == name)


# --- versions ---------------------------------------------------------------------------------------------------------

# What follows the first two numbers (.1, rc1, .dev12, .post1, +cpu, +g0123abc.d20260101) does not change the wire.
_VERSION = re.compile(r"v?(\d{1,9})\.(\d{1,9})(?!\d)(?:[.+_-]?[a-z0-9])*", re.IGNORECASE)

_warned: set[str] = set()
_lock = threading.Lock()


def profile_for(vllm_version: str | None) -> WireProfile:
    """The wire of an engine that says it is of this version.

    Parameters
    ----------
    vllm_version
        As in an engine's ready response: ``"0.32.0"``, ``"0.33.1rc1.dev12"``, ``"0.32.0+cpu"``. None: not known.

    Returns
    -------
    WireProfile
        The newest, when the version is newer than any known, None, no version at all, or the ``0.1.dev...`` that a source tree
        without tags calls itself. Unless it is None, a warning says so, once per version.

    Raises
    ------
    CompatError
        The version is older than 0.22.
    """
    if vllm_version is None:
        return NEWEST
    if not isinstance(vllm_version, str):
        raise SchemaError(f"expected a version, a str, got a {type(vllm_version).__qualname__}")
    match = _VERSION.fullmatch(vllm_version.strip())
    untagged = vllm_version.strip().lower().startswith("0.1.dev")
    release = (int(match[1]), int(match[2])) if match and not untagged else None
    if release is None:
        _warn_once(vllm_version, f"the engine calls its vLLM {vllm_version[:64]!r}, which says no release")
        return NEWEST
    if release < (0, _OLDEST):
        raise CompatError(f"the engine's vLLM is {vllm_version[:64]}: expected {OLDEST.name} or newer")
    if release > (0, _NEWEST):
        _warn_once(vllm_version, f"the engine's vLLM is {vllm_version[:64]}, newer than this fastmm knows")
        return NEWEST
    return PROFILES[release[1] - _OLDEST]


def profile_of_ready(ready: Mapping[str, Any]) -> WireProfile:
    """The wire of an engine by its ready response, as `profile_for`.

    0.22 does not say its version. It is told from an engine of other make by the ``dp_stats_address`` that all of vLLM's
    responses have.
    """
    version = ready.get("vllm_version")
    if version is None and "dp_stats_address" in ready:
        return OLDEST
    return profile_for(version)


def as_profile(profile: WireProfile | str | None) -> WireProfile | None:
    """A profile given as itself, as the name of one (``"0.28"``) or as a version of vLLM."""
    if profile is None or isinstance(profile, WireProfile):
        return profile
    return profile_for(profile)


def _warn_once(version: str, what: str) -> None:
    with _lock:
        if version in _warned:
            return
        if len(_warned) < 1000:
            _warned.add(version)
    warnings.warn(f"{what}; its messages are taken to be those of {NEWEST.name}", RuntimeWarning, stacklevel=3)


# --- for the decoder --------------------------------------------------------------------------------------------------


def moved_layouts(cls: type) -> tuple[Layout, ...]:
    """The layouts of `cls`, by release (as in `PROFILES`), of which today's is no continuation; () where none ever moved."""
    if cls not in _SINCE or getattr(cls, "__wire__", None) != "array":
        return ()
    newest = NEWEST.layouts[cls.__name__]
    layouts = tuple(profile.layouts[cls.__name__] for profile in PROFILES)
    moved = tuple(() if layout == newest[: len(layout)] else layout for layout in layouts)
    return moved if any(moved) else ()
