"""The exception classes: what catches them, what they say, how they travel."""

import copy
import pickle

import pytest

from fastmm import errors

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_a_fastmm_error(cls):
    assert issubclass(cls, errors.FastmmError)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.SchemaError, TypeError),
        (errors.SchemaValueError, ValueError),
        (errors.EncodeError, ValueError),
        (errors.DecodeError, ValueError),
        (errors.TransportTimeout, TimeoutError),
        (errors.PeerClosed, ConnectionError),
    ],
)
def test_the_expected_builtin_catches_it(cls, builtin):
    with pytest.raises(builtin):
        raise cls("no")


def test_a_limit_is_caught_on_both_sides():
    assert issubclass(errors.LimitError, errors.EncodeError)
    assert issubclass(errors.LimitError, errors.DecodeError)
    assert issubclass(errors.TruncatedError, errors.DecodeError)
    assert not issubclass(errors.TruncatedError, errors.EncodeError)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(
    ("where", "text"),
    [
        ({}, "no"),
        ({"path": "$.a[0]"}, "$.a[0]: no"),
        ({"frame": 2, "offset": 7}, "frame 2, offset 7: no"),
        ({"frame": 0}, "frame 0: no"),
        ({"path": "$.a", "frame": 1}, "$.a, frame 1: no"),
    ],
)
def test_the_message_says_where_first(cls, where, text):
    error = cls("no", **where)
    assert str(error) == text
    assert error.message == "no"
    assert (error.path, error.frame, error.offset) == tuple(where.get(name) for name in ("path", "frame", "offset"))


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(
    "travel", [copy.copy, copy.deepcopy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(2, 6))]
)
def test_it_travels_whole(cls, travel):
    error = cls("no", path="$.a", frame=1, offset=2)
    error.__notes__ = ["while sending"]
    again = travel(error)
    assert type(again) is cls
    assert (str(again), again.message, again.path, again.frame, again.offset) == (str(error), "no", "$.a", 1, 2)
    assert again.__notes__ == ["while sending"]


def test_the_constructor_takes_the_place_by_keyword_only():
    with pytest.raises(TypeError):
        errors.FastmmError("no", "$.a")
