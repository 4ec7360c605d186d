"""Schema objects made and filled by their slots: c/slots.h for Cython.  Needs the GIL.

There is no module behind this file: it is all inline.
"""

from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject

cdef extern from "slots.h":
    # The offset of a slot in instances of `cls`, by what the class has under its name; 0 when that is no slot of theirs.
    Py_ssize_t slot_offset "fmm_slot_offset"(PyTypeObject* cls, object descriptor) noexcept
    # An instance whose slots are all unset.
    object record_new "fmm_slots_new"(PyTypeObject* cls)
    # What a slot holds, borrowed; NULL when it is unset.
    PyObject* record_get "fmm_slot_get"(object record, Py_ssize_t offset) noexcept
    # Fills an unset slot.
    void record_set "fmm_slot_set"(object record, Py_ssize_t offset, object value) noexcept
    # Fills a slot that may hold something.
    void record_replace "fmm_slot_replace"(object record, Py_ssize_t offset, object value) noexcept


cdef inline object class_attribute(object cls, str name):
    """What `cls` or a base has under a name, as it is: no descriptor and no metaclass is asked.  None for nothing."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


cdef inline Py_ssize_t record_offset(type cls, str name) except 0:
    """The offset of a slot that must be there."""
    cdef Py_ssize_t offset = slot_offset(<PyTypeObject*>cls, class_attribute(cls, name))
    if offset == 0:
        raise TypeError(f"{cls!r} has no slot {name}")
    return offset
