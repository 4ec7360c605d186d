"""Requests to frames and back: the functions most users call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ._native.decoder import Decoder
from ._native.encoder import Encoder, default_threshold
from .schema import EngineCoreRequest
from .schema.profile import WireProfile

__all__ = ["Decoder", "Encoder", "decode_request", "encode_request", "encode_requests"]

# One encoder and one decoder for each set of options, so that buffers and plans stay warm from call to call.
_encoders: dict[tuple[Any, ...], Encoder] = {}
_decoders: dict[tuple[Any, ...], Decoder] = {}
_KEPT_MAX = 64


def _encoder_for(
    dtype: Any,
    inplace: bool,
    threshold: int | None,
    dedup: bool,
    hook: Callable[[Any], Any] | None,
    profile: WireProfile | str | None,
    max_depth: int,
    max_frames: int,
    max_payload_nbytes: int | None,
) -> Encoder:
    if threshold is None:
        threshold = default_threshold()
    # A bool or a float equals an int as a key, and must reach the check of the options all the same.
    kinds = (type(inplace), type(dedup), type(threshold), type(max_depth), type(max_frames), type(max_payload_nbytes))
    key: tuple[Any, ...] = (dtype, inplace, threshold, dedup, hook, profile, max_depth, max_frames, max_payload_nbytes, kinds)
    try:
        encoder = _encoders.get(key) if hook is None else None
    except TypeError:  # what cannot be a key is no option either: the encoder says so
        encoder = None
    if encoder is None:
        encoder = Encoder(
            dtype=dtype,
            inplace=inplace,
            threshold=threshold,
            dedup=dedup,
            hook=hook,
            profile=profile,
            max_depth=max_depth,
            max_frames=max_frames,
            max_payload_nbytes=max_payload_nbytes,
        )
        if hook is None:  # a hook, and what it holds, must not outlive the call
            if len(_encoders) >= _KEPT_MAX:
                _encoders.clear()
            _encoders[key] = encoder
    return encoder


def encode_request(
    request: Any,
    *,
    dtype: Any = None,
    inplace: bool = True,
    threshold: int | None = None,
    dedup: bool = True,
    hook: Callable[[Any], Any] | None = None,
    profile: WireProfile | str | None = None,
    max_depth: int = 64,
    max_frames: int = 65536,
    max_payload_nbytes: int | None = None,
) -> list[Any]:
    """Write a request as ``[main, aux 1, ...]``, ready for ``socket.send_multipart([engine, b"\\x00", *frames], copy=False)``.

    Parameters
    ----------
    request
        An `EngineCoreRequest` of fastmm or of vLLM, or any other tree that vLLM's encoder can write.
    dtype
        ``"bfloat16"``, ``"float16"``, ``"float32"`` or the torch or numpy dtype: what every floating payload under
        ``mm_features`` and ``prompt_embeds`` ends in. None: as it is. Integers and bools are never touched.
    inplace
        With a `dtype`, the request's floating payloads are handed over: they are cast where they lie, and the request
        holds tensors of the new dtype over the same memory afterwards. Memory that is read-only, strided, mapped from a
        file, shared with another process, or overlapping another payload's is never written to; such payloads are cast
        into pooled buffers, as all are with ``inplace=False``.
    threshold
        Tensors of fewer bytes are written into the main frame. None: the environment's
        ``VLLM_MSGPACK_ZERO_COPY_THRESHOLD``, or 256, as in vLLM.
    dedup
        Tensors over the very same memory become one frame that several places of the main frame point to.
    hook
        Called with an object of a type the wire does not know; what it returns is written instead.
    profile
        The engine's release of vLLM: a `WireProfile`, its name (``"0.28"``) or a version. The request is written in that
        release's layout; what the release lacks must not be set. None: the newest, or what an object of vLLM's own has.
    max_depth, max_frames, max_payload_nbytes
        Limits of nesting, of aux frames and of tensor bytes in one message.

    Returns
    -------
    list
        ``main`` is ``bytes``, or a `Frame` from 32 KiB on. Each aux frame is a `Frame` that views, and keeps, the tensor's
        own memory; write to a tensor, or ``resize_()`` it, only when its frames are sent.

    Raises
    ------
    SchemaError, EncodeError, LimitError
        With the path of what cannot be written. Nothing was cast then.
    """
    return _encoder_for(dtype, inplace, threshold, dedup, hook, profile, max_depth, max_frames, max_payload_nbytes).encode(
        request
    )


def encode_requests(
    requests: Iterable[Any],
    *,
    dtype: Any = None,
    inplace: bool = True,
    threshold: int | None = None,
    dedup: bool = True,
    hook: Callable[[Any], Any] | None = None,
    profile: WireProfile | str | None = None,
    max_depth: int = 64,
    max_frames: int = 65536,
    max_payload_nbytes: int | None = None,
) -> list[list[Any]]:
    """Write several requests, such as n samples of one prompt: a list of frames for each.

    Requests that follow one another with the very same ``mm_features`` list share its walk, its cast and its frames. The
    parameters are those of `encode_request`.
    """
    return _encoder_for(dtype, inplace, threshold, dedup, hook, profile, max_depth, max_frames, max_payload_nbytes).encode_many(
        requests
    )


def decode_request(
    frames: Any,
    *,
    tensors: str = "torch",
    token_ids: str = "list",
    copy: bool = False,
    profile: WireProfile | str | None = None,
    max_depth: int = 64,
    max_elements: int = 1 << 24,
    max_frames: int = 65536,
    max_payload_nbytes: int | None = None,
) -> EngineCoreRequest:
    """Read a request from its frames.

    Parameters
    ----------
    frames
        ``[main, aux 1, ...]``: `zmq.Frame`, bytes, memoryview, `Frame`, or anything else with the buffer protocol.
    tensors
        What tensors become: ``"torch"``, ``"numpy"`` or ``"wire"`` (`WireTensor`). Types that numpy lacks are
        ``ml_dtypes`` arrays where that package is installed, else WireTensors. A tensor that the sender named as numpy
        does (``"<f4"``) is a numpy array in the first two cases.
    token_ids
        ``"list"``, or ``"array"`` for a numpy array, which is many times as fast.
    copy
        False: tensors view the frames' memory and keep it alive; over a read-only frame (``bytes``, a received frame)
        numpy arrays are read-only, and torch tensors, which cannot be, must not be written to. True: tensors own their
        memory. Data that is not aligned for its type is copied either way.
    profile
        The sender's release of vLLM where it is known; else layouts are told apart by their lengths.
    max_depth, max_elements, max_frames, max_payload_nbytes
        Limits of nesting, of items in the main frame, of aux frames and of tensor bytes.

    Raises
    ------
    DecodeError
        The frames are not what an encoder of this wire writes; TruncatedError and LimitError are kinds of it.
    """
    kinds = (type(max_depth), type(max_elements), type(max_frames), type(max_payload_nbytes))
    key = (tensors, token_ids, copy, profile, max_depth, max_elements, max_frames, max_payload_nbytes, kinds)
    try:
        decoder = _decoders.get(key)
    except TypeError:
        decoder = None
    if decoder is None:
        decoder = Decoder(
            EngineCoreRequest,
            tensors=tensors,
            token_ids=token_ids,
            copy=copy,
            profile=profile,
            max_depth=max_depth,
            max_elements=max_elements,
            max_frames=max_frames,
            max_payload_nbytes=max_payload_nbytes,
        )
        if len(_decoders) >= _KEPT_MAX:
            _decoders.clear()
        _decoders[key] = decoder
    return decoder.decode(frames)  # type: ignore[no-any-return]
