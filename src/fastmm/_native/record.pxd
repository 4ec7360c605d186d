"""Schema objects made and filled by their slots: no constructor runs, no attribute is looked up.  Needs the GIL.

There is no module behind this file: it is all inline.
"""

from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject

cdef extern from *:
    """
    #include <structmember.h>

    /* The offset of a slot of instances of `cls`; -1 with an error when it has none. */
    static Py_ssize_t fmm_record_offset(PyObject *cls, const char *name)
    {
        PyObject *descriptor = PyObject_GetAttrString(cls, name);
        Py_ssize_t offset = -1;
        if (descriptor == NULL) return -1;
        if (Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
            PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
            if (member->type == T_OBJECT_EX) offset = member->offset;
        }
        Py_DECREF(descriptor);
        if (offset < 0) PyErr_Format(PyExc_TypeError, "%R has no slot %s", cls, name);
        return offset;
    }

    /* A new reference to an instance whose slots are all unset. */
    static inline PyObject *fmm_record_new(PyTypeObject *cls) { return cls->tp_alloc(cls, 0); }

    /* Fills an unset slot; keeps a reference of its own. */
    static inline void fmm_record_set(PyObject *record, Py_ssize_t offset, PyObject *value)
    {
        Py_INCREF(value);
        *(PyObject **)((char *)record + offset) = value;
    }

    /* What a slot holds, borrowed; NULL when it is unset. */
    static inline PyObject *fmm_record_get(PyObject *record, Py_ssize_t offset)
    {
        return *(PyObject **)((char *)record + offset);
    }
    """
    Py_ssize_t record_offset "fmm_record_offset"(object cls, const char* name) except -1
    object record_new "fmm_record_new"(PyTypeObject* cls)
    void record_set "fmm_record_set"(object record, Py_ssize_t offset, object value) noexcept
    PyObject* record_get "fmm_record_get"(object record, Py_ssize_t offset) noexcept
