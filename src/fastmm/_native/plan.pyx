"""How objects of a Python type are walked: one plan per type, made once.

A plan turns what reflection can say about a type into a flat C array of (offset, key bytes, default), so that the walk
itself never asks for an attribute by name where a slot will do.  The rules of what is written are msgspec's, measured; the
classes of vLLM are known by their qualified names, for vllm is never imported here.
"""

import dataclasses
import datetime
import decimal
import enum
import functools
import sys
import uuid
import weakref
from collections import UserDict
from collections.abc import Mapping

import msgpack
import numpy

from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from fastmm.errors import SchemaError
from fastmm.schema.profile import NEWEST, PROFILES

from .record cimport class_attribute, slot_offset
from .tensor cimport FAMILY_BUFFER, FAMILY_EXCHANGE, FAMILY_NUMPY, Producer, producer_of

cdef extern from *:
    """
    static int fmm_exports_buffer(PyObject *cls)
    {
        PyBufferProcs *procs = ((PyTypeObject *)cls)->tp_as_buffer;
        return procs != NULL && procs->bf_getbuffer != NULL;
    }
    """
    bint fmm_exports_buffer(object cls)

cdef PlanEntry plan_cache[PLAN_CACHE_SIZE]
cdef dict plans = {}  # id of the type -> (weak reference to it, its plan)
cdef PyObject* unset_object = NULL
cdef object unset_holder = None  # keeps it

# Which of vLLM's classes are written as `[factory, {fields}]`; exact classes only, as there.
FACTORIES = {
    ("vllm.multimodal.inputs", "MultiModalBatchedField"): "batched",
    ("vllm.multimodal.inputs", "MultiModalFlatField"): "flat",
    ("vllm.multimodal.inputs", "MultiModalSharedField"): "shared",
}
# What the fields of some classes hold, by the class's name: FMM_MODE_* of plan_field.h.
MODES = {
    "MultiModalFieldElem": {"data": FMM_MODE_TENSOR | FMM_MODE_PAYLOAD, "field": FMM_MODE_FIELD},
    "MmFieldElem": {"data": FMM_MODE_TENSOR | FMM_MODE_PAYLOAD, "field": FMM_MODE_FIELD},
    "PlaceholderRange": {"is_embed": FMM_MODE_TENSOR},
    "EngineCoreRequest": {"prompt_embeds": FMM_MODE_TENSOR | FMM_MODE_PAYLOAD},
}


cdef PyObject* plan_find(PyTypeObject* cls) except NULL:
    cdef PlanEntry* entry = plan_entry(cls)
    known = plans.get(<uintptr_t>cls)
    plan = plan_make(<object>cls) if known is None else known[1]
    entry.cls = cls
    entry.plan = <PyObject*>plan
    return entry.plan


cdef Plan plan_make(object cls):
    cdef Plan plan = plan_build(cls)
    plan.ours_only = is_ours_only(cls, plan)
    find_unset()
    cdef uintptr_t key = <uintptr_t><PyObject*>cls

    def forget(_, key=key):  # the address may be a new type's tomorrow
        cdef PlanEntry* entry = plan_entry(<PyTypeObject*><uintptr_t>key)
        if entry.cls == <PyTypeObject*><uintptr_t>key:
            entry.cls = NULL
        plans.pop(key, None)

    plans[key] = (weakref.ref(cls, forget), plan)
    return plan


cdef bint is_ours_only(object cls, Plan plan) except -1:
    if plan.kind == KIND_CONVERT:
        return issubclass(cls, numpy.generic) or cls.__name__ == "UtilityResult"
    if plan.kind == KIND_TENSOR:
        return plan.producer.family not in (FAMILY_EXCHANGE, FAMILY_NUMPY)
    if plan.kind == KIND_MAPPING:
        return not any([base.__module__ == "vllm.multimodal.inputs" for base in cls.__mro__])
    return plan.kind == KIND_EXT and cls.__module__ != "msgspec.msgpack" or plan.kind == KIND_UNKNOWN


cdef int find_unset() except -1:
    global unset_object, unset_holder
    msgspec = sys.modules.get("msgspec")
    if unset_object is NULL and msgspec is not None:
        unset_holder = msgspec.UNSET
        unset_object = <PyObject*>unset_holder
    return 0


cdef Plan plan_new(Kind kind):
    cdef Plan plan = Plan.__new__(Plan)
    plan.kind = kind
    return plan


cdef class Plan:
    def __init__(self):
        raise TypeError("plans are made by the encoder")

    def __dealloc__(self):
        free(self.fields)


cdef dict BUILTINS = {
    type(None): KIND_NONE, bool: KIND_NUMBER, int: KIND_NUMBER, float: KIND_NUMBER, str: KIND_STR,
    bytes: KIND_BYTES, bytearray: KIND_BYTES, memoryview: KIND_BYTES, slice: KIND_SLICE,
}
# Subclasses of these are read as their base, as msgspec does; subclasses of the scalars above are not.
cdef list CONTAINERS = [
    (list, KIND_LIST), (tuple, KIND_TUPLE), (dict, KIND_DICT), (set, KIND_SET), (frozenset, KIND_SET),
]
cdef object EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
cdef dict CONVERTERS = {
    datetime.datetime: lambda v: exact_timestamp(v) if v.tzinfo else v.isoformat(),
    datetime.date: datetime.date.isoformat,
    datetime.time: lambda v: v.isoformat().replace("+00:00", "Z"),
    datetime.timedelta: lambda v: iso_duration(v),
    uuid.UUID: str,
    decimal.Decimal: str,
}


cdef Plan plan_build(object cls):
    cdef Plan plan
    if cls in BUILTINS:
        return plan_new(BUILTINS[cls])
    if issubclass(cls, type):
        return plan_new(KIND_UNKNOWN)
    if issubclass(cls, enum.Enum):
        return convert_plan(enum_value)
    if issubclass(cls, numpy.generic):
        return convert_plan(numpy_scalar)
    if cls in CONVERTERS:
        return convert_plan(CONVERTERS[cls])
    if cls is msgpack.ExtType or cls is msgpack.Timestamp or (cls.__module__, cls.__name__) == ("msgspec.msgpack", "Ext"):
        return plan_new(KIND_EXT)
    if cls.__module__ == "msgspec" and cls.__name__ in ("Raw", "UnsetType"):
        return plan_new(KIND_RAW if cls.__name__ == "Raw" else KIND_UNSET)
    if hasattr(cls, "__struct_fields__") and hasattr(cls, "__struct_config__"):
        return msgspec_plan(cls)
    for base, kind in CONTAINERS:
        if issubclass(cls, base):
            return plan_new(kind)
    if hasattr(cls, "__wire__") and dataclasses.is_dataclass(cls):
        return record_plan(cls)
    if dataclasses.is_dataclass(cls):
        return dataclass_plan(cls)
    producer = producer_of(cls)
    if producer is not None:
        plan = plan_new(KIND_TENSOR)
        plan.producer = producer
        return plan
    if (cls.__module__, cls.__qualname__) == ("vllm.v1.serial_utils", "UtilityResult"):
        return convert_plan(lambda utility: (None, utility.result))
    if issubclass(cls, Mapping):
        plan = plan_new(KIND_MAPPING)
        plan.user_dict = issubclass(cls, UserDict)
        return plan
    return buffer_plan if fmm_exports_buffer(cls) else plan_new(KIND_UNKNOWN)


cdef Plan make_buffer_plan():
    cdef Plan plan = plan_new(KIND_TENSOR)
    plan.producer = Producer.__new__(Producer)
    plan.producer.family = FAMILY_BUFFER
    return plan


cdef Plan buffer_plan = make_buffer_plan()


cdef Plan convert_plan(object convert):
    cdef Plan plan = plan_new(KIND_CONVERT)
    plan.convert = convert
    return plan


def enum_value(member):
    """What stands for an enum's member: the number or string it is, where it is one, else its value."""
    if isinstance(member, int):
        return int.__int__(member)
    return str.__str__(member) if isinstance(member, str) else member._value_


def numpy_scalar(scalar):
    """A numpy scalar as a number, bool or string of Python's; others (void, long double, datetime64) are refused."""
    value = scalar.item()
    if type(value) in (bool, int, float, str, bytes) and scalar.dtype.kind not in "mMV":
        return value
    raise SchemaError(f"expected a number, bool or string, got a numpy scalar of dtype {scalar.dtype}")


def exact_timestamp(moment):
    """To the microsecond: msgpack's own `from_datetime` went through a float before 1.2, which is off by up to 0.5 us."""
    since = moment - EPOCH
    return msgpack.Timestamp(since.days * 86400 + since.seconds, since.microseconds * 1000)


def iso_duration(delta):
    """A timedelta in ISO 8601, days and seconds only."""
    sign = "-" if delta.days < 0 else ""
    delta = abs(delta)
    seconds = f"{delta.seconds}.{delta.microseconds:06d}".rstrip("0").rstrip(".") if delta.microseconds else str(delta.seconds)
    time = f"T{seconds}S" if delta.seconds or delta.microseconds else ""
    days = f"{delta.days}D" if delta.days or not time else ""
    return f"{sign}P{days}{time}"


# --- structs ----------------------------------------------------------------------------------------------------------


cdef object NOTHING = object()  # no value of a field
cdef dict EMPTY = {list: FMM_EMPTY_LIST, dict: FMM_EMPTY_DICT, set: FMM_EMPTY_SET}


cdef Plan struct_plan(object cls, list names, list keys, list defaults, bint as_array, bint in_dict):
    """``defaults`` has one pair per field: the object that is left out, the type whose empty ones are; NOTHING for none."""
    cdef Plan plan = plan_new(KIND_STRUCT)
    cdef int position = 0
    cdef fmm_field_t* field
    cdef int i
    modes = {}
    for base in cls.__mro__:
        modes.update(MODES.get(base.__name__, {}))
    plan.as_array = as_array
    plan.in_dict = in_dict
    plan.profiled = profiled_name(cls)
    plan.head = b""
    plan.properties = frozenset()
    plan.names = [sys.intern(name) for name in names]
    plan.defaults = defaults
    encoded = [msgpack.packb(key) for key in keys]
    plan.keys_home = b"".join(encoded) + bytes(16)  # padding, so that keys can be copied 16 bytes at a time
    plan.keys = plan.keys_home
    if len(plan.keys_home) > 0xffff or cls.__basicsize__ > 0xffff:
        raise SchemaError(f"expected a class of some thousand fields at most, got {cls.__module__}.{cls.__qualname__}")
    plan.nfields = len(names)
    plan.fields = <fmm_field_t*>calloc(max(plan.nfields, 1), sizeof(fmm_field_t))
    if plan.fields is NULL:
        raise MemoryError()
    for i in range(plan.nfields):
        field = &plan.fields[i]
        name = plan.names[i]
        field.offset = 0 if in_dict else slot_offset(<PyTypeObject*>cls, class_attribute(cls, name))
        if field.offset == 0 and not in_dict:
            raise SchemaError(f"expected a class with slots, got {cls.__module__}.{cls.__qualname__}, whose field {name!r} "
                              "has none: give its dataclass decorator slots=True")
        field.key = position
        field.key_nbytes = len(encoded[i])
        position += field.key_nbytes
        identical, empty = defaults[i]
        field.identical = <PyObject*>identical
        field.empty = EMPTY.get(empty, FMM_EMPTY_KEPT)
        plan.may_omit = plan.may_omit or identical is not NOTHING or field.empty
        field.mode = modes.get(name, 0) | (FMM_MODE_FEATURES if name == "mm_features" else 0)
    return plan


cdef object default_of(object value, object factory, object missing):
    """When msgspec leaves a field out: the very default object, or an empty list, dict or set of the default factory."""
    if factory is list or factory is dict or factory is set:
        return (NOTHING, factory)
    if value is not missing and factory is missing:
        return (value, NOTHING)
    return (NOTHING, NOTHING)


cdef Plan msgspec_plan(object cls):
    cdef Plan plan
    msgspec = sys.modules["msgspec"]
    config = cls.__struct_config__
    names = list(cls.__struct_fields__)
    as_array = bool(config.array_like)
    omit = bool(config.omit_defaults) and not as_array
    defaults = [(NOTHING, NOTHING)] * len(names)
    if omit:
        given = cls.__struct_defaults__
        for i, value in enumerate(given, len(names) - len(given)):
            factory = getattr(value, "factory", msgspec.NODEFAULT) if type(value).__name__ == "Factory" else msgspec.NODEFAULT
            defaults[i] = default_of(value, factory, msgspec.NODEFAULT)
    plan = struct_plan(cls, names, list(cls.__struct_encode_fields__), defaults, as_array, False)
    plan.may_omit = not as_array  # UNSET leaves a field out
    if config.tag is not None:
        plan.head = msgpack.packb(config.tag) if as_array else msgpack.packb(config.tag_field) + msgpack.packb(config.tag)
        plan.head_nelem = 1
    return plan


cdef Plan record_plan(object cls):
    """fastmm's own schema classes: dataclasses with slots that say in `__wire__` how they are written."""
    cdef Plan plan
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields]
    omit = cls.__wire__ == "map-omit-defaults"
    defaults = [
        default_of(field.default, field.default_factory, dataclasses.MISSING) if omit else (NOTHING, NOTHING)
        for field in fields
    ]
    plan = struct_plan(cls, names, names, defaults, cls.__wire__ == "array", False)
    if "prompt_token_ids" in names:
        plan.fields[names.index("prompt_token_ids")].mode |= FMM_MODE_IDS
    factory = cls.__dict__.get("__wire_factory__")
    if factory is not None:
        wrap(plan, factory)
    return plan


cdef Plan dataclass_plan(object cls):
    cdef Plan plan
    names = [field.name for field in dataclasses.fields(cls)]
    slots = all(slot_offset(<PyTypeObject*>cls, class_attribute(cls, name)) for name in names)
    plan = struct_plan(cls, names, names, [(NOTHING, NOTHING)] * len(names), False, not slots)
    plan.may_omit = plan.missing_ok = True
    plan.dictless = plan.in_dict and not cls.__dictoffset__
    computed = hasattr(cls, "__getattr__") or cls.__getattribute__ is not object.__getattribute__
    plan.properties = frozenset(
        name for name in names if computed or plan.in_dict and hasattr(class_attribute(cls, name), "__set__"))
    factory = FACTORIES.get((cls.__module__, cls.__qualname__))
    if factory is not None:
        wrap(plan, factory)
    return plan


cdef str profiled_name(object cls):
    """Under which name the wire profiles know a class of ours, of vLLM, or one made from such."""
    for base in cls.__mro__:
        if base.__name__ in NEWEST.layouts and base.__module__.partition(".")[0] in ("fastmm", "vllm"):
            return base.__name__
    return None


cdef Plan plan_for_profile(Plan plan, object cls, int index):
    if plan.by_profile is None:
        plan.by_profile = [None] * len(PROFILES)
    if plan.by_profile[index] is None:
        plan.by_profile[index] = profile_plan(plan, cls, PROFILES[index].layouts[plan.profiled])
    return plan.by_profile[index]


cdef Plan profile_plan(Plan plan, object cls, tuple layout):
    """Fields that the profile lacks are left off; those that the class lacks are nil, or left off where none follows."""
    cdef Plan other
    cdef int i
    known = set(plan.names)
    wanted = list(layout)
    while wanted and wanted[-1] not in known:
        wanted.pop()
    if not plan.as_array:
        other = struct_plan(cls, plan.names, plan.names, plan.defaults, False, plan.in_dict)
        other.may_omit = plan.may_omit
    elif known.issuperset(wanted):
        other = struct_plan(cls, wanted, wanted, [(NOTHING, NOTHING)] * len(wanted), True, False)
        for i in range(other.nfields):
            other.fields[i].mode = plan.fields[plan.names.index(other.names[i])].mode
    else:
        other = convert_plan(functools.partial(values_of, tuple([name if name in known else None for name in wanted])))
    defaults = defaults_of(cls)
    other.surplus = [(name, defaults.get(name)) for name in plan.names if name not in layout]
    return other


def values_of(names, obj):
    """Fields by name; None for a name that is None."""
    return tuple([None if name is None else getattr(obj, name) for name in names])


cdef dict defaults_of(object cls):
    """Values that stand for "not asked for"; fields that must be given have none, and need none."""
    if dataclasses.is_dataclass(cls):
        return {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
    given = cls.__struct_defaults__
    return dict(zip(cls.__struct_fields__[len(cls.__struct_fields__) - len(given):], given))


cdef int wrap(Plan plan, str factory) except -1:
    plan.wrapped = True
    plan.memo = True
    plan.head = b"\x92" + msgpack.packb(factory)
    return 0
