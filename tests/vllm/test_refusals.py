"""What the real encoder refuses, we refuse with one error that names the path; what it mangles without a word, too."""

import collections
import types
import warnings

import numpy as np
import pytest
import torch
from peers import our_encoder
from vllm.v1.serial_utils import MsgpackEncoder
from vllm_family import FAMILY as F

import fastmm


class _Subclass(F.batched):
    pass


class _Text(str):
    pass


def elem(data, field=None):
    return F.request(
        "r",
        [1],
        mm_features=[F.feature(F.item({"k": F.elem(data, field or F.batched())}), "image", "i", F.placeholder(0, 1))],
        arrival_time=1.0,
    )


def flat(*bounds):
    return elem(1, F.flat(slices=[slice(*bounds)]))


def extra(value):
    return F.request("r", [1], reasoning_parser_kwargs={"a": [0, value]}, arrival_time=1.0)


def quiet(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


REFUSED_BY_VLLM = {
    "object array": lambda: extra(np.array([None])),
    "structured array": lambda: extra(np.zeros(2, [("a", "i4")])),
    "void array": lambda: extra(np.zeros(2, "V3")),
    "record array": lambda: extra(np.rec.array([(1,)], dtype=[("a", "i1")])),
    "datetime64 array": lambda: extra(np.array(["2020"], "M8[Y]")),
    "timedelta64 array": lambda: extra(np.array([1], "m8[s]")),
    "conjugate tensor": lambda: elem(torch.ones(300, dtype=torch.complex64).conj()),
    "negative tensor": lambda: elem(torch._neg_view(torch.ones(300))),
    "meta tensor": lambda: elem(torch.ones(300, device="meta")),
    "sparse tensor": lambda: elem(torch.eye(20).to_sparse()),
    "nested tensor": lambda: quiet(lambda: elem(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))),
    "text as data": lambda: elem("text"),
    "None in a list": lambda: elem([None]),
    "an unknown field": lambda: elem(1, _Subclass()),
    "no field": lambda: elem(1, "batched"),
    "an object": lambda: extra(object()),
    "a function": lambda: extra(len),
    "a class": lambda: extra(int),
    "complex": lambda: extra(1j),
    "a subclass of str": lambda: extra(_Text("a")),
    "a proxy of a dict": lambda: extra(types.MappingProxyType({})),
    "a deque": lambda: extra(collections.deque()),
    "a range": lambda: extra(range(3)),
    "an int too large": lambda: extra(2**64),
    "an int too small": lambda: extra(-(2**63) - 1),
    "a lone surrogate": lambda: extra("\ud800"),
    "a key that cannot be written": lambda: extra({object(): 1}),
    "a strided memoryview": lambda: extra(memoryview(b"abcd")[::2]),
}
# The real encoder takes these where a mapping or a plain subclass is as good as the thing itself: we may do so too.
MAY_BE_TAKEN = {
    "a proxy of a dict": dict,
    "a deque": list,
    "a range": list,
    "a subclass of str": str,
    "a strided memoryview": bytes,
}

MANGLED_BY_VLLM = {
    "a float bound": lambda: flat(1.7, 4),
    "a text bound": lambda: flat("1", 4),
    "a dict as data": lambda: elem({1: 2}),
    "empty text as data": lambda: elem(""),
    "a quantized tensor": lambda: quiet(lambda: extra(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))),
}


@pytest.mark.parametrize("name", REFUSED_BY_VLLM)
def test_vllm_refuses_it(name):
    with pytest.raises(Exception):  # noqa: B017 - whatever it happens to be
        MsgpackEncoder(256).encode(REFUSED_BY_VLLM[name]())


@pytest.mark.parametrize("name", MANGLED_BY_VLLM)
def test_vllm_writes_something_else_without_a_word(name):
    assert len(MsgpackEncoder(256).encode(MANGLED_BY_VLLM[name]())) == 1


@pytest.mark.parametrize("threshold", [0, 256])
@pytest.mark.parametrize("name", [name for name in {**REFUSED_BY_VLLM, **MANGLED_BY_VLLM} if name not in MAY_BE_TAKEN])
def test_we_refuse_it_with_its_path(name, threshold):
    message = {**REFUSED_BY_VLLM, **MANGLED_BY_VLLM}[name]()
    with pytest.raises(fastmm.FastmmError) as caught:
        our_encoder(threshold).encode(message)
    path = caught.value.path
    if message.mm_features is None:
        assert path.startswith("$.reasoning_parser_kwargs['a'][1]")
    elif name in ("an unknown field", "no field") or "bound" in name:
        assert path.startswith("$.mm_features[0].data['k'].field")
    else:
        assert path.startswith("$.mm_features[0].data['k'].data")


@pytest.mark.parametrize("name", MAY_BE_TAKEN)
def test_what_may_be_taken_is_written_right_or_refused(name):
    message = REFUSED_BY_VLLM[name]()
    try:
        (main,) = our_encoder(256).encode(message)
    except fastmm.FastmmError:
        return
    plain = MAY_BE_TAKEN[name](message.reasoning_parser_kwargs["a"][1])
    assert bytes(main) == MsgpackEncoder(256).encode(extra(plain))[0]


@pytest.mark.parametrize("value", [np.float64(1.5), np.float32(1.5), np.int64(3), np.bool_(True), np.uint8(7), np.float16(0.5)])
def test_numpy_scalars_are_numbers_to_us(value):
    assert our_encoder(256).encode(extra(value)) == our_encoder(256).encode(extra(value.item()))
    assert our_encoder(256).encode(elem([value])) == our_encoder(256).encode(elem([value.item()]))


def test_a_dict_that_changes_while_it_is_walked_is_an_error_not_a_broken_message():
    table = {}

    def hook(value):
        table["new"] = 1
        return 0

    table["a"] = object()
    with pytest.raises(fastmm.FastmmError):
        fastmm.Encoder(hook=hook).encode([table])


def test_a_list_that_shrinks_while_it_is_walked_is_an_error_not_a_crash():
    items = [object(), 1, 2]

    def hook(value):
        items.clear()
        return 0

    with pytest.raises(fastmm.FastmmError):
        fastmm.Encoder(hook=hook).encode(items)
