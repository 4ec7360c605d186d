/* Python objects by their slots: no constructor runs, no attribute is looked up. Needs the GIL. */
#ifndef FASTMM_SLOTS_H
#define FASTMM_SLOTS_H

#include <Python.h>
#include <structmember.h>

/* The offset of a slot in instances of cls; 0 when `descriptor` is no member descriptor of a plain object slot, or one of a
 * class whose instances cls's are not. */
static inline Py_ssize_t fmm_slot_offset(PyTypeObject *cls, PyObject *descriptor)
{
    if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type) || !PyType_IsSubtype(cls, PyDescr_TYPE(descriptor))) return 0;
    const PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
    return member->type == T_OBJECT_EX ? member->offset : 0;
}

/* A new reference to an instance whose slots are all unset. */
static inline PyObject *fmm_slots_new(PyTypeObject *cls) { return cls->tp_alloc(cls, 0); }

/* What a slot holds, borrowed; NULL when it is unset. */
static inline PyObject *fmm_slot_get(PyObject *obj, Py_ssize_t offset) { return *(PyObject **)((char *)obj + offset); }

/* Fills an unset slot; keeps a reference of its own. */
static inline void fmm_slot_set(PyObject *obj, Py_ssize_t offset, PyObject *value)
{
    Py_INCREF(value);
    *(PyObject **)((char *)obj + offset) = value;
}

/* The same where the slot may hold something, which is let go of: its own code may run then. */
static inline void fmm_slot_replace(PyObject *obj, Py_ssize_t offset, PyObject *value)
{
    PyObject *old = fmm_slot_get(obj, offset);
    fmm_slot_set(obj, offset, value);
    Py_XDECREF(old);
}

#endif /* FASTMM_SLOTS_H */
