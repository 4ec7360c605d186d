"""What a type looks like on the wire: one plan per class, made from its fields and annotations."""

import collections
import collections.abc
import dataclasses
import enum
import sys
import threading
import types
import typing

import msgpack

from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy

from fastmm.errors import SchemaError
from fastmm.schema import EngineCoreRequest, MmFieldElem, MmFlatField, PlaceholderRange, SamplingParams, TensorLike
from fastmm.schema.profile import moved_layouts

from .decode_state cimport (
    FMM_KIND_ARRAY,
    FMM_KIND_BIN,
    FMM_KIND_BOOL,
    FMM_KIND_EXT,
    FMM_KIND_FLOAT,
    FMM_KIND_INT,
    FMM_KIND_MAP,
    FMM_KIND_NIL,
    FMM_KIND_STR,
)
from .record cimport class_attribute, slot_offset

cdef DecodePlan* any_plan = NULL
cdef dict plans = {}  # annotation -> address of its plan
cdef dict records = {}  # class -> address of its record
cdef object lock = threading.RLock()
cdef list keepalive = []  # Python objects that plans point to

# Annotations say too little of these: the wire's own rules, by class and field.
cdef dict FIELD_RULES = {
    (MmFieldElem, "data"): "nested",
    (MmFlatField, "slices"): "slices",
    (EngineCoreRequest, "prompt_token_ids"): "tokens",
    (SamplingParams, "prompt_logprob_token_ids"): "ids or tensor",
}
# vLLM's struct has nine fields without a default where ours has two.
cdef dict MIN_ELEMENTS = {EngineCoreRequest: 9}
cdef dict adopted = {}  # class of another package -> (its rules, the name before its map or None, whether it is closed)


cdef void* allocate(size_t nbytes) except NULL:
    cdef void* memory = calloc(1, nbytes)
    if memory is NULL:
        raise MemoryError()
    return memory


cdef PyObject* keep(object obj):
    keepalive.append(obj)
    return <PyObject*>obj


cdef DecodePlan* decode_plan_of(object hint) except NULL:
    cdef DecodePlan* plan
    try:
        hash(hint)
    except TypeError:
        raise SchemaError(f"cannot decode into {hint!r}: expected a schema class or built-in types") from None
    with lock:  # asking for annotations runs Python: another thread must not see a record that is half filled
        before = (plans.copy(), records.copy())
        try:
            plan = plan_for(hint)
        except BaseException:
            # What was made on the way may point to the record that failed.
            for kept, saved in zip((plans, records), before):
                kept.clear()
                kept.update(saved)
            raise
    return plan


cdef DecodePlan* plan_for(object hint) except NULL:
    cdef DecodePlan* plan
    known = plans.get(hint)
    if known is not None:
        return <DecodePlan*><size_t>known
    plan = plan_new(hint)
    plans[hint] = <size_t>plan
    return plan


cdef DecodePlan* plan_new(object hint) except NULL:
    cdef DecodePlan* plan = <DecodePlan*>allocate(sizeof(DecodePlan))
    words = []
    plan_add(plan, hint, words)
    if plan.accepts & (1 << FMM_KIND_INT | 1 << FMM_KIND_FLOAT) == 1 << FMM_KIND_FLOAT:
        plan.accepts |= 1 << FMM_KIND_INT
        plan.int_as_float = True
    plan.expected = keep(" or ".join(dict.fromkeys(words)))
    return plan


cdef int plan_add(DecodePlan* plan, object hint, list words) except -1:
    """Adds one arm of a union."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is None or hint is type(None):
        plan.accepts |= 1 << FMM_KIND_NIL
        words.append("nil")
    elif hint is typing.Any or hint is object:
        plan_any(plan)
        words.append("a value")
    elif origin is typing.Union or origin is types.UnionType:
        factories = [arm for arm in args if factory_of(arm) is not None]
        if factories:
            plan_factories(plan, factories)
            words.append("[name, fields]")
        for arm in args:
            if arm not in factories:
                plan_add(plan, arm, words)
    elif hint is TensorLike or isinstance(hint, type) and (hint.__module__, hint.__qualname__) == ("torch", "Tensor"):
        plan_array(plan, ARRAY_TENSOR, hint)
        words.append("a tensor [dtype, shape, data]")
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        plan_enum(plan, hint)
        words.append(hint.__name__)
    elif factory_of(hint) is not None:
        plan_factories(plan, [hint])
        words.append("[name, fields]")
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        plan.record = record_of(hint)
        if plan.record.as_array:
            plan_array(plan, ARRAY_RECORD, hint)
        else:
            plan_map(plan, MAP_RECORD, hint)
        words.append(f"{'an array' if plan.record.as_array else 'a map'} ({hint.__name__})")
    elif hint in adopted and issubclass(hint, collections.UserDict):
        plan_map(plan, MAP_USER_DICT, hint)
        one_item(plan, hint)
        plan.wrapper = <PyTypeObject*>hint
        plan.key = plan_for(str)
        plan.item = plan_for(adopted[hint][0][""])
        words.append(f"a map ({hint.__name__})")
    elif hint in (bool, int, float, str, bytes):
        plan.accepts |= 1 << {
            bool: FMM_KIND_BOOL, int: FMM_KIND_INT, float: FMM_KIND_FLOAT, str: FMM_KIND_STR, bytes: FMM_KIND_BIN}[hint]
        words.append(hint.__name__)
    elif origin in (dict, collections.abc.Mapping) or hint in (dict, collections.abc.Mapping):
        plan_map(plan, MAP_DICT, hint)
        one_item(plan, hint)
        plan.key = plan_for(args[0] if args else typing.Any)
        plan.item = plan_for(args[1] if args else typing.Any)
        words.append("a map")
    else:
        plan_sequence(plan, hint, origin or hint, args)
        words.append("an array")
    return 0


cdef int plan_sequence(DecodePlan* plan, object hint, object origin, tuple args) except -1:
    cdef int i
    if origin is tuple and args and args[-1] is not Ellipsis:
        plan_array(plan, ARRAY_FIXED_TUPLE, hint)
        plan.nitems = len(args)
        plan.items = <DecodePlan**>allocate(len(args) * sizeof(void*))
        for i in range(plan.nitems):
            plan.items[i] = plan_for(args[i])
        return 0
    if origin in (set, frozenset):
        if args and args[0] not in (int, str, float, bool, bytes):
            raise SchemaError(f"cannot decode into {hint}: a set's items must be plain values")
        plan_array(plan, ARRAY_SET if origin is set else ARRAY_FROZENSET, hint)
        plan.item = plan_for(args[0] if args else str)
        return 0
    if origin is tuple:
        plan_array(plan, ARRAY_TUPLE, hint)
    elif origin in (list, collections.abc.Sequence):
        plan_array(plan, ARRAY_IDS if args and args[0] is int else ARRAY_LIST, hint)
    else:
        raise SchemaError(f"cannot decode into {hint}: expected a schema class or built-in types")
    one_item(plan, hint)
    plan.item = plan_for(args[0] if args else typing.Any)
    return 0


cdef int one_item(DecodePlan* plan, object hint) except -1:
    if plan.item is not NULL:
        raise SchemaError(f"cannot decode into a union with {hint}: another arm has items, too")
    return 0


cdef int plan_array(DecodePlan* plan, ArrayRule rule, object hint) except -1:
    if plan.array != ARRAY_REFUSED:
        raise SchemaError(f"cannot decode into a union with {hint}: another arm is an array, too")
    plan.accepts |= 1 << FMM_KIND_ARRAY
    plan.array = rule
    return 0


cdef int plan_map(DecodePlan* plan, MapRule rule, object hint) except -1:
    if plan.map != MAP_REFUSED:
        raise SchemaError(f"cannot decode into a union with {hint}: another arm is a map, too")
    plan.accepts |= 1 << FMM_KIND_MAP
    plan.map = rule
    return 0


cdef int plan_any(DecodePlan* plan) except -1:
    plan_array(plan, ARRAY_LIST, typing.Any)
    plan_map(plan, MAP_DICT, typing.Any)
    plan.accepts |= (1 << FMM_KIND_NIL | 1 << FMM_KIND_BOOL | 1 << FMM_KIND_INT | 1 << FMM_KIND_FLOAT
                     | 1 << FMM_KIND_STR | 1 << FMM_KIND_BIN | 1 << FMM_KIND_EXT)
    plan.item = any_plan if any_plan is not NULL else plan
    plan.key = plan.item
    return 0


cdef int plan_enum(DecodePlan* plan, object cls) except -1:
    members = {member.value: member for member in cls}
    for value in members:
        if type(value) is int:
            plan.accepts |= 1 << FMM_KIND_INT
        elif type(value) is str:
            plan.accepts |= 1 << FMM_KIND_STR
        else:
            raise SchemaError(f"cannot decode into {cls}: the value of a member must be int or str")
    plan.members = keep(members)
    return 0


cdef int plan_factories(DecodePlan* plan, list classes) except -1:
    cdef int i
    plan_array(plan, ARRAY_FACTORY, classes[0])
    plan.nitems = len(classes)
    plan.factories = <DecodeRecord**>allocate(len(classes) * sizeof(void*))
    for i in range(plan.nitems):
        plan.factories[i] = record_of(classes[i])
    return 0


cdef DecodePlan* rule_plan(str rule, object hint) except NULL:
    """The plan of a field whose annotation is not enough."""
    cdef DecodePlan* plan
    if rule == "tokens":
        plan = plan_new(hint)
        plan.array = ARRAY_TOKENS
        return plan
    plan = <DecodePlan*>allocate(sizeof(DecodePlan))
    if rule == "ids or tensor":  # vLLM 0.31 had a list there
        plan_array(plan, ARRAY_NESTED, hint)
        plan.accepts |= 1 << FMM_KIND_NIL
        plan.expected = keep("a tensor [dtype, shape, data], a list of int or nil")
        plan.item = plan_for(int)
        return plan
    if rule == "slices":
        plan_array(plan, ARRAY_SLICES, hint)
        plan.expected = keep("a list of slices")
        return plan
    plan_array(plan, ARRAY_NESTED, hint)
    plan.accepts |= 1 << FMM_KIND_NIL | 1 << FMM_KIND_BOOL | 1 << FMM_KIND_INT | 1 << FMM_KIND_FLOAT
    plan.expected = keep("nil, a number, a tensor or a list of them")
    plan.item = <DecodePlan*>allocate(sizeof(DecodePlan))
    plan.item[0] = plan[0]
    plan.item.item = plan.item
    plan.item.accepts &= ~(1 << FMM_KIND_NIL)  # within a list there is no nil
    plan.item.expected = keep("a number, a tensor or a list of them")
    return plan


cdef DecodeRecord* record_of(object cls) except NULL:
    cdef DecodeRecord* record
    known = records.get(cls)
    if known is not None:
        return <DecodeRecord*><size_t>known
    if not hasattr(cls, "__wire__") and cls not in adopted:
        raise SchemaError(f"cannot decode into {cls.__module__}.{cls.__qualname__}: it has no __wire__")
    fields = dataclasses.fields(cls)
    if len(fields) > MAX_FIELDS:
        raise SchemaError(f"cannot decode into {cls.__qualname__}: more than {MAX_FIELDS} fields")
    record = <DecodeRecord*>allocate(sizeof(DecodeRecord))
    records[cls] = <size_t>record  # before its fields: a class may hold itself
    record_fill(record, cls, fields)
    return record


cdef object factory_of(object hint):
    """The name before a class's map, None where there is none."""
    if isinstance(hint, type) and hint in adopted:
        return adopted[hint][1]
    return getattr(hint, "__wire_factory__", None)


cdef int adopt(object cls, dict rules, str factory, bint closed) except -1:
    if getattr(cls, "__post_init__", None) is not None or cls.__new__ is not object.__new__:
        raise SchemaError(f"cannot decode into {cls.__module__}.{cls.__qualname__}: it is more than a plain dataclass")
    adopted[cls] = (rules, factory, closed)
    return 0


cdef bint has_slots(object cls) except -1:
    return all([slot_offset(<PyTypeObject*>cls, class_attribute(cls, spec.name)) for spec in dataclasses.fields(cls)])


cdef int record_fill(DecodeRecord* record, object cls, tuple fields) except -1:
    cdef DecodeField* field
    cdef bytes key
    cdef int i
    record.cls = <PyTypeObject*>keep(cls)
    rules, factory, closed = adopted.get(cls, ({}, getattr(cls, "__wire_factory__", None), cls is MmFieldElem))
    record.as_array = cls not in adopted and cls.__wire__ == "array"
    record.in_dict = cls in adopted and not has_slots(cls)
    record.nfields = len(fields)
    record.fields = <DecodeField*>allocate(max(1, len(fields)) * sizeof(DecodeField))
    hints = typing.get_type_hints(cls)
    for i in range(record.nfields):
        field = &record.fields[i]
        spec = fields[i]
        field.offset = slot_offset(record.cls, class_attribute(cls, spec.name))
        if field.offset == 0 and not record.in_dict:
            raise SchemaError(f"cannot decode into {cls.__qualname__}: {spec.name} is not a slot")
        field.name = keep(sys.intern(spec.name))
        key = msgpack.packb(spec.name)
        if len(key) > 255:
            raise SchemaError(f"cannot decode into {cls.__qualname__}: the name {spec.name} is too long")
        field.key = <const uint8_t*><char*><object>keep(key)
        field.key_nbytes = len(key)
        memcpy(&field.key_head, field.key, min(8, len(key)))
        field.key_head_mask = ~<uint64_t>0
        if len(key) < 8:
            field.key_head_mask = 0
            memcpy(&field.key_head_mask, <char*>b"\xff\xff\xff\xff\xff\xff\xff\xff", len(key))
        if spec.default is not dataclasses.MISSING:
            field.default_value = keep(spec.default)
        elif spec.default_factory is not dataclasses.MISSING:
            field.default_factory = keep(spec.default_factory)
        else:
            record.min_nelem = i + 1
        rule = rules.get(spec.name, FIELD_RULES.get((cls, spec.name), hints[spec.name]))
        field.plan = rule_plan(rule, hints[spec.name]) if type(rule) is str else plan_for(rule)
    record.min_nelem = MIN_ELEMENTS.get(cls, record.min_nelem)
    # vLLM passes these maps on as keyword arguments: a name that is none of them is an error there.
    record.closed = closed or factory is not None
    if cls.__name__ == PlaceholderRange.__name__:
        record.check = CHECK_PLACEHOLDER
        if [spec.name for spec in fields[:3]] != ["offset", "length", "is_embed"]:
            raise SchemaError(f"expected {cls.__qualname__} to begin with offset, length, is_embed")
    if factory is not None:
        key = factory.encode()
        record.factory = <const uint8_t*><char*><object>keep(key)
        record.factory_nbytes = len(key)
    post_init = getattr(cls, "__post_init__", None)
    if post_init is not None:
        record.post_init = keep(post_init)
    record_moved(record, moved_layouts(cls))
    return 0


cdef int record_moved(DecodeRecord* record, tuple layouts) except -1:
    cdef DecodeLayout* layout
    cdef DecodeLayout* before = NULL
    cdef int i, position
    if not layouts:
        return 0
    places = {<object>record.fields[i].name: i for i in range(record.nfields)}
    record.nmoved = len(layouts)
    record.moved = <DecodeLayout**>allocate(record.nmoved * sizeof(void*))
    for i in range(record.nmoved):
        if i and layouts[i] == layouts[i - 1]:
            record.moved[i] = before
        elif layouts[i]:
            layout = <DecodeLayout*>allocate(sizeof(DecodeLayout))
            layout.nelem = len(layouts[i])
            layout.fields = <int*>allocate(layout.nelem * sizeof(int))
            for position in range(layout.nelem):
                layout.fields[position] = places.get(layouts[i][position], -1)
            record.moved[i] = layout
        before = record.moved[i]
    return 0


any_plan = decode_plan_of(typing.Any)
