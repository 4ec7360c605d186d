"""split_extensions, is_multimodal and decode_extensions: each rule of the page, and what a hostile body may hold."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmm.errors import ExtensionError, FastmmError, ProcessorError, SchemaError, SchemaValueError
from fastmm.processors import check_schema, decode_extensions, is_multimodal, is_present, split_extensions

msgspec = pytest.importorskip("msgspec")


def deep(depth: int, leaf: Any = None) -> Any:
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


# --- rule 1: which fields are extensions ------------------------------------------------------------------------------


def test_fields_that_start_with_the_prefix_are_extensions_and_others_are_ignored():
    body = {"text": "hi", "image_data": ["x"], "multimodal_crop": 1, "unknown": {}, "xmultimodal_a": 2}
    assert split_extensions(body, 1, False) == [{"multimodal_crop": 1}]


def test_the_case_of_a_name_matters():
    assert split_extensions({"Multimodal_a": 1, "MULTIMODAL_b": 2, "multimodal_C": 3}, 1, False) == [{"multimodal_C": 3}]


def test_the_prefix_needs_its_underscore_and_nothing_after_it():
    assert split_extensions({"multimodal": 1, "multimodalx": 2, "multimodal_": 3}, 1, False) == [{"multimodal_": 3}]


def test_a_null_is_no_extension():
    assert split_extensions({"multimodal_a": None}, 1, False) == [{}]
    assert split_extensions({"multimodal_a": None}, 3, True) == [{}, {}, {}]


def test_names_that_are_no_strings_are_ignored():
    assert split_extensions({3: 1, b"multimodal_a": 2, None: 3, "multimodal_a": 4}, 1, False) == [{"multimodal_a": 4}]


@pytest.mark.parametrize("body", [None, [], "multimodal_a", 3, b"x", [("multimodal_a", 1)]])
def test_a_body_without_named_fields_is_a_clients_fault(body):
    with pytest.raises(ExtensionError, match="named fields"):
        split_extensions(body, 1, False)
    with pytest.raises(ExtensionError, match="named fields"):
        is_multimodal(body)


# --- rule 2: one request, and a batch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, "", False, [], [None], {}, {"a": [1]}, [1, 2], 1.5, b"x"])
def test_a_single_requests_values_pass_unchanged(value):
    (request,) = split_extensions({"multimodal_a": value}, 1, False)
    assert request["multimodal_a"] is value


def test_names_are_in_order_whatever_the_bodys_order():
    body = {"multimodal_b": [1], "multimodal_a": [2], "multimodal_B": [3]}
    assert list(split_extensions(body, 1, True)[0]) == ["multimodal_B", "multimodal_a", "multimodal_b"]
    assert list(split_extensions(body, 1, False)[0]) == ["multimodal_B", "multimodal_a", "multimodal_b"]


def test_cell_i_goes_to_request_i_and_a_null_cell_is_kept():
    body = {"multimodal_a": [1, None, [3]], "multimodal_b": ["x", "y", "z"]}
    assert split_extensions(body, 3, True) == [
        {"multimodal_a": 1, "multimodal_b": "x"},
        {"multimodal_a": None, "multimodal_b": "y"},
        {"multimodal_a": [3], "multimodal_b": "z"},
    ]


def test_a_batch_of_one_is_a_batch():
    assert split_extensions({"multimodal_a": [[1, 2]]}, 1, True) == [{"multimodal_a": [1, 2]}]
    with pytest.raises(ExtensionError, match="must be a list for batch processing"):
        split_extensions({"multimodal_a": 7}, 1, True)


@pytest.mark.parametrize("value", [7, 0, "ab", {"0": 1}, True, 1.0, b"ab"])
def test_a_batchs_value_that_is_no_list_is_an_error_that_names_the_field(value):
    with pytest.raises(ExtensionError, match="^multimodal_a must be a list for batch processing$") as caught:
        split_extensions({"multimodal_a": value}, 2, True)
    assert caught.value.field == "multimodal_a"
    assert caught.value.http_status == 400
    assert isinstance(caught.value, FastmmError)
    assert isinstance(caught.value, ValueError)


def test_an_empty_list_gives_every_request_its_own_empty_list():
    first, second = split_extensions({"multimodal_a": []}, 2, True)
    assert first == second == {"multimodal_a": []}
    assert first["multimodal_a"] is not second["multimodal_a"]


@pytest.mark.parametrize(("given_length", "n"), [(1, 2), (3, 2), (2, 1), (1, 0)])
def test_a_wrong_length_is_an_error_with_both_numbers(given_length, n):
    with pytest.raises(
        ExtensionError, match=f"multimodal_a list length {given_length} does not match batch size {n}"
    ) as caught:
        split_extensions({"multimodal_a": [0] * given_length}, n, True)
    assert caught.value.field == "multimodal_a"


def test_the_first_error_in_name_order_wins():
    body = {"multimodal_c": 1, "multimodal_a": [1, 2], "multimodal_b": [1]}
    with pytest.raises(ExtensionError) as caught:
        split_extensions(body, 2, True)
    assert caught.value.field == "multimodal_b"
    with pytest.raises(ExtensionError) as caught:
        split_extensions({"multimodal_c": [1], "multimodal_b": 3}, 2, True)
    assert caught.value.field == "multimodal_b"


@dataclasses.dataclass
class Broadcasting:
    __broadcast__: ClassVar[frozenset[str]] = frozenset({"multimodal_scale"})
    multimodal_scale: float = 1.0
    multimodal_crop: int = 0


class BroadcastingStruct(msgspec.Struct):
    __broadcast__: ClassVar[Any] = True
    multimodal_scale: float = 1.0


@pytest.mark.parametrize("schema", [Broadcasting, BroadcastingStruct])
def test_a_scalar_is_broadcast_where_the_schema_opts_in(schema):
    assert split_extensions({"multimodal_scale": 0.5}, 2, True, schema=schema) == [{"multimodal_scale": 0.5}] * 2


@pytest.mark.parametrize("schema", [None, Broadcasting])
def test_a_scalar_is_not_broadcast_where_it_does_not(schema):
    with pytest.raises(ExtensionError, match="multimodal_crop must be a list"):
        split_extensions({"multimodal_crop": 1}, 2, True, schema=schema)


def test_a_list_and_a_map_are_never_broadcast():
    with pytest.raises(ExtensionError, match="must be a list"):
        split_extensions({"multimodal_scale": {"a": 1}}, 2, True, schema=Broadcasting)
    with pytest.raises(ExtensionError, match="length 3"):
        split_extensions({"multimodal_scale": [1, 2, 3]}, 2, True, schema=Broadcasting)


@pytest.mark.parametrize("names", ["multimodal_scale", 5, None, {3}, {"multimodal_scale": True}])
def test_what_cannot_be_a_set_of_names_is_said_when_the_schema_is_looked_at(names):
    @dataclasses.dataclass
    class Broken:
        __broadcast__: ClassVar[Any] = names
        multimodal_scale: float = 1.0

    with pytest.raises(SchemaError, match="set of field names"):
        check_schema(Broken)
    with pytest.raises(SchemaError, match="set of field names"):
        split_extensions({"multimodal_scale": 1.0}, 2, True, schema=Broken)


def test_the_size_of_a_batch_is_capped_and_the_cap_can_be_set():
    assert len(split_extensions({}, 4096, True)) == 4096
    with pytest.raises(ExtensionError, match=r"4097 .* 4096"):
        split_extensions({}, 4097, True)
    assert len(split_extensions({}, 5000, True, max_batch=5000)) == 5000
    assert len(split_extensions({}, 5000, True, max_batch=None)) == 5000
    with pytest.raises(ExtensionError, match=r"3 .* 2"):
        split_extensions({"multimodal_a": 1}, 3, True, max_batch=2)


def test_an_empty_batch_has_no_requests():
    assert split_extensions({"multimodal_a": []}, 0, True) == []


@pytest.mark.parametrize(("n", "is_batch"), [(-1, True), (2, False), (0, False), (True, True), ("1", False)])
def test_a_number_of_requests_that_cannot_be_is_the_callers_fault(n, is_batch):
    with pytest.raises(SchemaValueError):
        split_extensions({}, n, is_batch)


def test_the_body_is_left_as_it_is():
    body = {"multimodal_b": [1, 2], "multimodal_a": [], "text": ["x", "y"]}
    split_extensions(body, 2, True)
    assert body == {"multimodal_b": [1, 2], "multimodal_a": [], "text": ["x", "y"]}


# --- rule 3: what makes a request multimodal --------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, [], [None], [[], [None, [[]]]], deep(3), ()])
def test_nulls_and_lists_of_nothing_else_are_not_present(value):
    assert not is_present(value)
    assert not is_multimodal({"multimodal_a": value})


@pytest.mark.parametrize("value", [{}, 0, "", False, [0], [None, [[{}]]], {"a": None}, [[], ""], b""])
def test_anything_else_is_present_an_empty_map_too(value):
    assert is_present(value)
    assert is_multimodal({"multimodal_a": value})


def test_one_present_extension_is_enough_and_other_fields_do_not_count():
    assert is_multimodal({"multimodal_a": [None], "multimodal_b": {}})
    assert not is_multimodal({"image_data": ["x"], "Multimodal_a": 1, "text": "y"})
    assert not is_multimodal({})


# --- bodies nobody would send in good faith ---------------------------------------------------------------------------


def test_nesting_of_any_depth_is_walked():
    assert not is_multimodal({"multimodal_a": deep(200_000)})
    assert is_multimodal({"multimodal_a": deep(200_000, 0)})
    assert len(split_extensions({"multimodal_a": deep(200_000)}, 1, True)) == 1


def test_a_list_in_itself_and_a_list_many_times_end():
    own: list[Any] = []
    own.append(own)
    assert not is_present(own)
    wide: Any = []
    for _ in range(80):
        wide = [wide, wide]
    assert not is_present(wide)


@pytest.mark.parametrize("schema", [Broadcasting, BroadcastingStruct])
def test_an_error_never_repeats_a_long_name_or_a_payload(schema):
    name = "multimodal_" + "x" * 1_000_000
    with pytest.raises(ExtensionError) as caught:
        split_extensions({name: 1}, 2, True)
    assert len(str(caught.value)) < 300
    with pytest.raises(ExtensionError) as caught:
        decode_extensions(schema, {name: 1})
    assert len(str(caught.value)) < 300
    with pytest.raises(ExtensionError) as caught:
        decode_extensions(schema, {"multimodal_scale": "secret" * 1000})
    assert "secret" not in str(caught.value)


def test_half_a_surrogate_pair_in_a_name_can_be_logged():
    for call in (
        lambda b: split_extensions(b, 2, True),
        lambda b: decode_extensions(None, b),
        lambda b: decode_extensions(Broadcasting, b),
    ):
        with pytest.raises(ExtensionError) as caught:
            call({"multimodal_\ud800": 1})
        str(caught.value).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(["multimodal_a", "multimodal_b", "Multimodal_a", "text"]), JSON)


@given(BODIES, st.integers(0, 4), st.booleans())
def test_any_body_is_split_or_refused_with_a_400(body, n, is_batch):
    n = n if is_batch else 1
    try:
        requests = split_extensions(body, n, is_batch)
    except ExtensionError as error:
        assert error.http_status == 400
        return
    assert len(requests) == n
    assert all(name.startswith("multimodal_") and body[name] is not None for request in requests for name in request)


# --- rule 4: schemas --------------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    FAST = "fast"
    GOOD = "good"


@dataclasses.dataclass
class Box:
    x: int
    y: int


@dataclasses.dataclass
class AsDataclass:
    multimodal_level: int
    multimodal_boxes: list[Box] = dataclasses.field(default_factory=list)
    multimodal_mode: Mode = Mode.FAST
    multimodal_pair: tuple[int, int] = (0, 0)


class StructBox(msgspec.Struct):
    x: int
    y: int


class AsStruct(msgspec.Struct):
    multimodal_level: int
    multimodal_boxes: list[StructBox] = []
    multimodal_mode: Mode = Mode.FAST
    multimodal_pair: tuple[int, int] = (0, 0)


def model() -> type:
    pydantic = pytest.importorskip("pydantic")

    class ModelBox(pydantic.BaseModel):
        x: int
        y: int

    return pydantic.create_model(
        "AsModel",
        multimodal_level=(int, ...),
        multimodal_boxes=(list[ModelBox], []),
        multimodal_mode=(Mode, Mode.FAST),
        multimodal_pair=(tuple[int, int], (0, 0)),
    )


def pydantic_dataclass() -> type:
    return pytest.importorskip("pydantic.dataclasses").dataclass(AsDataclass)


SCHEMAS = pytest.mark.parametrize(
    "make",
    [lambda: AsDataclass, lambda: AsStruct, model, pydantic_dataclass],
    ids=["dataclass", "struct", "pydantic", "pydantic_dataclass"],
)


@SCHEMAS
def test_the_processor_gets_an_instance_of_its_own_schema(make):
    schema = make()
    check_schema(schema)
    made = decode_extensions(
        schema,
        {"multimodal_level": 3, "multimodal_boxes": [{"x": 1, "y": 2}], "multimodal_mode": "good", "multimodal_pair": [4, 5]},
    )
    assert type(made).__name__ == schema.__name__
    assert isinstance(made, schema)
    assert (made.multimodal_level, made.multimodal_boxes[0].y, made.multimodal_mode) == (3, 2, Mode.GOOD)
    assert made.multimodal_pair == (4, 5)


@SCHEMAS
@pytest.mark.parametrize(
    ("values", "path", "field"),
    [
        ({"multimodal_level": True}, "$.multimodal_level", "multimodal_level"),
        ({"multimodal_level": 1.0}, "$.multimodal_level", "multimodal_level"),
        ({"multimodal_level": 1.5}, "$.multimodal_level", "multimodal_level"),
        ({"multimodal_level": "1"}, "$.multimodal_level", "multimodal_level"),
        ({"multimodal_level": None}, "$.multimodal_level", "multimodal_level"),
        (
            {"multimodal_level": 1, "multimodal_boxes": [{"x": 1, "y": 2}, {"x": 1, "y": True}]},
            "$.multimodal_boxes[1].y",
            "multimodal_boxes",
        ),
        ({"multimodal_level": 1, "multimodal_mode": "slow"}, "$.multimodal_mode", "multimodal_mode"),
        ({"multimodal_level": 1, "multimodal_boxes": {}}, "$.multimodal_boxes", "multimodal_boxes"),
    ],
)
def test_decoding_is_strict_and_errors_have_the_path(make, values, path, field):
    schema = make()
    if hasattr(schema, "__pydantic_validator__") and repr(values["multimodal_level"]) == "1.0":
        pytest.skip("JSON's 1.0 is an int to pydantic")
    with pytest.raises(ExtensionError) as caught:
        decode_extensions(schema, values)
    assert str(caught.value).startswith("invalid processor extensions: ")
    assert f"`{path}" in str(caught.value)
    assert caught.value.field == field
    assert caught.value.http_status == 400


@SCHEMAS
def test_a_missing_extension_that_has_no_default_is_named(make):
    with pytest.raises(ExtensionError, match=r"^invalid processor extensions: .* - at `\$(\.multimodal_level)?`$"):
        decode_extensions(make(), {})


@SCHEMAS
def test_an_extension_the_schema_does_not_have_is_refused_by_name(make):
    with pytest.raises(ExtensionError, match=r"^invalid processor extensions: .* at `\$\.multimodal_levle`") as caught:
        decode_extensions(make(), {"multimodal_level": 1, "multimodal_levle": 2})
    assert caught.value.field == "multimodal_levle"


@SCHEMAS
def test_a_deep_or_a_round_value_is_an_error_and_not_the_end(make):
    own: list[Any] = []
    own.append(own)
    for value in (deep(200_000), own):
        with pytest.raises(ExtensionError, match="invalid processor extensions"):
            decode_extensions(make(), {"multimodal_level": value})


@SCHEMAS
def test_a_number_of_thousands_of_digits_is_an_error_and_not_a_failure(make):
    values = {"multimodal_level": 1, "multimodal_boxes": [{"x": 1, "y": "1"}]}
    for number in (10**6000, -(10**6000)):
        for changed in ({"multimodal_level": number, "multimodal_boxes": 3}, {**values, "multimodal_pair": [number, "x"]}):
            with pytest.raises(ExtensionError, match="invalid processor extensions"):
                decode_extensions(make(), changed)


def test_a_deep_value_of_any_type_is_an_error_and_not_the_end():
    pydantic = pytest.importorskip("pydantic")

    @dataclasses.dataclass
    class Loose:
        multimodal_any: Any = None

    class LooseStruct(msgspec.Struct):
        multimodal_any: Any = None

    class LooseModel(pydantic.BaseModel):
        multimodal_any: Any = None

    for schema in (Loose, LooseStruct, LooseModel):
        try:
            decode_extensions(schema, {"multimodal_any": deep(200_000)})
        except ExtensionError as error:
            assert "deep" in str(error)


def test_a_pydantic_model_that_wants_more_names_gets_them():
    pydantic = pytest.importorskip("pydantic")

    class Open(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")
        multimodal_a: int = 0

    assert decode_extensions(Open, {"multimodal_b": 2}).multimodal_b == 2


def test_constraints_of_the_schema_hold():
    @dataclasses.dataclass
    class Bounded:
        multimodal_level: int = 0

        def __post_init__(self) -> None:
            if self.multimodal_level > 3:
                raise ValueError("the level is at most 3")

    class BoundedStruct(msgspec.Struct):
        multimodal_level: Annotated[int, msgspec.Meta(le=3)] = 0
        multimodal_kind: Literal["a", "b"] = "a"

    for schema in (Bounded, BoundedStruct):
        assert decode_extensions(schema, {"multimodal_level": 3}).multimodal_level == 3
        with pytest.raises(ExtensionError, match="3"):
            decode_extensions(schema, {"multimodal_level": 4})


def test_a_processor_without_a_schema_refuses_extensions_by_name():
    assert decode_extensions(None, {}) is None
    assert decode_extensions(None, None) is None
    assert decode_extensions(None, {"multimodal_a": None}) is None  # a null cell of a batch
    with pytest.raises(
        ExtensionError, match="invalid processor extensions: Llava takes none, got multimodal_a, multimodal_b"
    ) as caught:
        decode_extensions(None, {"multimodal_b": [], "multimodal_a": 0}, processor="Llava")
    assert caught.value.field == "multimodal_a"


@pytest.mark.parametrize("schema", [int, dict, object, "AsStruct", AsDataclass(1), enum.Enum])
def test_what_is_no_schema_is_said_before_a_request_comes(schema):
    with pytest.raises(SchemaError, match="dataclass, a msgspec struct, a pydantic model"):
        check_schema(schema)


def test_a_schema_of_none_is_fine():
    check_schema(None)


def test_a_field_that_no_request_can_give_is_said_before_a_request_comes():
    @dataclasses.dataclass
    class Unnamed:
        multimodal_level: int = 0
        level: int = 0

    class UnnamedStruct(msgspec.Struct):
        level: int = 0

    for schema in (Unnamed, UnnamedStruct):
        with pytest.raises(SchemaError, match=r"multimodal_\.\.\., got level"):
            check_schema(schema)


def test_an_annotation_that_is_not_there_is_said_before_a_request_comes():
    @dataclasses.dataclass
    class Unknown:
        multimodal_level: NoSuchType = 0  # noqa: F821

    with pytest.raises(SchemaError, match="NoSuchType"):
        check_schema(Unknown)


@pytest.mark.parametrize("schema", [AsDataclass, AsStruct])
def test_an_error_never_repeats_a_value_that_is_none_of_an_enum(schema):
    with pytest.raises(ExtensionError) as caught:
        decode_extensions(schema, {"multimodal_level": 1, "multimodal_mode": "my secret - at `$.x`"})
    assert "secret" not in str(caught.value)
    assert caught.value.field == "multimodal_mode"


def test_another_exception_of_the_schemas_code_is_the_processors_failure():
    @dataclasses.dataclass
    class Failing:
        multimodal_level: int = 0

        def __post_init__(self) -> None:
            raise KeyError("mine")

    check_schema(Failing)
    with pytest.raises(ProcessorError, match="the schema of P failed: KeyError: 'mine'"):
        decode_extensions(Failing, {}, processor="P")
