"""fan_out: n samples of one prompt, which share its features."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from .._native.split import Batch, copy_record
from ..errors import SchemaError, SchemaValueError
from ..schema import EngineCoreRequest, SamplingParams
from .arguments import kind_of, listed, whole


def fan_out(request: Any, n: int, ids: Sequence[str] | None = None, seeds: Sequence[int | None] | None = None) -> list[Any]:
    """Make `n` requests of one, for n samples of its prompt.

    They share the very same prompt and features, so `encode_requests` walks the features once, casts their payload once
    and hands out the same frames for all; no memory of payload size is taken, however large n is. Prompt embeddings are
    shared as a read-only `WireTensor`: a cast of them goes into pooled memory.

    Parameters
    ----------
    request
        An `EngineCoreRequest` of fastmm or of vLLM. It is left as it is, and must not be encoded with a cast in place
        beside the new ones.
    n
        How many, at least 1.
    ids
        Their request ids, all different. None: ``"0_<request id>"``, ``"1_<request id>"``... as vLLM names them; for one
        sample the request's own.
    seeds
        Their seeds. None: where the request has one, that plus 0, 1, 2..., as in vLLM.

    Returns
    -------
    list of EngineCoreRequest
        Of the class of `request`. Their sampling parameters ask for one sample each.

    Raises
    ------
    SchemaError, SchemaValueError
        The counts do not agree, an id is taken twice, seeds are given to a request without sampling parameters.
    """
    count = whole(n)
    if count is None:
        raise SchemaError(f"expected a whole number, got {kind_of(n)}", path="n")
    if count < 1:
        raise SchemaValueError(f"expected at least 1, got {count}", path="n")
    for name in ("request_id", "sampling_params", "prompt_embeds"):
        if not hasattr(request, name):
            raise SchemaError(f"expected a request, got {kind_of(request)}: it has no {name}", path="request")
    if ids is None:
        names = [f"{i}_{request.request_id}" for i in range(count)] if count > 1 else [request.request_id]
    else:
        names = _samples(ids, "ids", count)
        for i, name in enumerate(names):
            if not isinstance(name, str):
                raise SchemaError(f"expected a str, got {kind_of(name)}", path=f"ids[{i}]")
        if len(set(names)) != count:
            raise SchemaValueError(f"expected {count} different ids, got {len(set(names))}", path="ids")
    params = request.sampling_params
    numbers: list[int | None] | None = None
    if seeds is not None:
        if params is None:
            raise SchemaError("expected a request with sampling_params, got None: seeds are part of them", path="seeds")
        numbers = []
        for i, seed in enumerate(_samples(seeds, "seeds", count)):
            number = whole(seed)
            if number is None and seed is not None:
                raise SchemaError(f"expected a whole number or None, got {kind_of(seed)}", path=f"seeds[{i}]")
            numbers.append(number)
    elif params is not None and params.seed is not None:
        numbers = [params.seed + i for i in range(count)]
    single = params
    if params is not None:
        single = _copied(params)
        single.n = 1
    # A cast in place puts the new leaf into one request only; the others would cast the same memory once more.
    embeds = None if request.prompt_embeds is None else _frozen(request.prompt_embeds)
    requests = []
    for i in range(count):
        sample = _copied(request)
        sample.request_id = names[i]
        if numbers is not None:
            single = _copied(single)
            single.seed = numbers[i]
        sample.sampling_params = single
        sample.prompt_embeds = embeds
        requests.append(sample)
    return requests


def _frozen(embeds: Any) -> Any:
    try:
        return Batch(embeds).frozen()
    except SchemaError as error:
        error.path = "request.prompt_embeds"
        raise


def _copied(value: Any) -> Any:
    return copy_record(value) if type(value) in (EngineCoreRequest, SamplingParams) else copy.copy(value)


def _samples(values: Any, where: str, n: int) -> list[Any]:
    found = listed(values, "a list with one for each sample", where)
    if len(found) != n:
        raise SchemaValueError(f"expected {n}, one for each sample, got {len(found)}", path=where)
    return found
