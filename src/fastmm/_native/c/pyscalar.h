/* Python scalars into msgpack without a call per object. Needs the GIL; runs no Python code. */
#ifndef FASTMM_PYSCALAR_H
#define FASTMM_PYSCALAR_H

#include <Python.h>
#if PY_VERSION_HEX < 0x030b0000
#include <longintrepr.h>
#endif
#include <stdint.h>
#include <string.h>

#include "fastmm/msgpack_write.h"
#include "plan_field.h"
#include "slots.h"

/* Since 3.12 the digits lie behind a tag that holds their number and the sign. */
#if PY_VERSION_HEX >= 0x030c0000
#define FMM_PYLONG_SIZE(o) (((PyLongObject *)(o))->long_value.lv_tag & ~(uintptr_t)4) /* bit 2: immortal, since 3.14 */
#define FMM_PYLONG_DIGIT(o) (((PyLongObject *)(o))->long_value.ob_digit[0])
#define FMM_PYLONG_ONE_DIGIT ((uintptr_t)1 << 3) /* one digit, positive */
#else
#define FMM_PYLONG_SIZE(o) ((uintptr_t)Py_SIZE(o))
#define FMM_PYLONG_DIGIT(o) (((PyLongObject *)(o))->ob_digit[0])
#define FMM_PYLONG_ONE_DIGIT ((uintptr_t)1)
#endif

/* Whether an int is a plain id: zero, or one positive digit. Zero has no digits, and in every version of CPython the digit
 * of its one object is 0. */
static inline int fmm_is_plain_id(PyObject *item, PyObject *zero)
{
    return FMM_PYLONG_SIZE(item) == FMM_PYLONG_ONE_DIGIT || item == zero;
}

/* Copies ids out of a list's items, up to the first that is no plain int from 0 to 2^30 - 1; returns how many. Four at a
 * time with two branches: first that all are ints, for what is no int has no digit to read, then that all have one digit. */
static inline Py_ssize_t fmm_gather_ids(PyObject *const *items, Py_ssize_t nelem, uint32_t *ids)
{
    PyObject *zero = PyLong_FromLong(0); /* cached by the interpreter, which keeps it alive */
    Py_ssize_t i = 0;
    Py_XDECREF(zero);
    while (i < nelem) {
        for (; i + 4 <= nelem; i += 4) {
            PyObject *a = items[i], *b = items[i + 1], *c = items[i + 2], *d = items[i + 3];
            if (!Py_IS_TYPE(a, &PyLong_Type) | !Py_IS_TYPE(b, &PyLong_Type) | !Py_IS_TYPE(c, &PyLong_Type) |
                !Py_IS_TYPE(d, &PyLong_Type))
                break;
            if ((FMM_PYLONG_SIZE(a) ^ FMM_PYLONG_ONE_DIGIT) | (FMM_PYLONG_SIZE(b) ^ FMM_PYLONG_ONE_DIGIT) |
                (FMM_PYLONG_SIZE(c) ^ FMM_PYLONG_ONE_DIGIT) | (FMM_PYLONG_SIZE(d) ^ FMM_PYLONG_ONE_DIGIT))
                break;
            ids[i] = FMM_PYLONG_DIGIT(a);
            ids[i + 1] = FMM_PYLONG_DIGIT(b);
            ids[i + 2] = FMM_PYLONG_DIGIT(c);
            ids[i + 3] = FMM_PYLONG_DIGIT(d);
        }
        /* A zero, the end, or the first that is no plain id. */
        for (Py_ssize_t stop = i + 4 < nelem ? i + 4 : nelem; i < stop; i++) {
            if (!Py_IS_TYPE(items[i], &PyLong_Type) || !fmm_is_plain_id(items[i], zero)) return i;
            ids[i] = FMM_PYLONG_DIGIT(items[i]);
        }
    }
    return i;
}

/* A plain int as int64_t: 1, or 0 when it has more than one digit (ask Python then). */
static inline int fmm_pylong_small(PyObject *item, int64_t *value)
{
#if PY_VERSION_HEX >= 0x030c0000
    if (!PyUnstable_Long_IsCompact((PyLongObject *)item)) return 0;
    *value = PyUnstable_Long_CompactValue((PyLongObject *)item);
    return 1;
#else
    const Py_ssize_t size = Py_SIZE(item);
    if (size == 0) {
        *value = 0;
    } else if (size == 1) {
        *value = FMM_PYLONG_DIGIT(item);
    } else if (size == -1) {
        *value = -(int64_t)FMM_PYLONG_DIGIT(item);
    } else {
        return 0;
    }
    return 1;
#endif
}

/* memcpy of a short string: for a length below 256 gcc writes `rep movs`, which takes longer to start than this to end. */
static inline void fmm_copy_short(uint8_t *to, const uint8_t *from, size_t nbytes)
{
    if (nbytes >= 16) {
        for (size_t at = 0; at + 16 < nbytes; at += 16) memcpy(to + at, from + at, 16);
        memcpy(to + nbytes - 16, from + nbytes - 16, 16);
    } else if (nbytes >= 8) {
        memcpy(to, from, 8);
        memcpy(to + nbytes - 8, from + nbytes - 8, 8);
    } else if (nbytes >= 4) {
        memcpy(to, from, 4);
        memcpy(to + nbytes - 4, from + nbytes - 4, 4);
    } else {
        for (size_t at = 0; at < nbytes; at++) to[at] = from[at];
    }
}

/* The longest scalar that fmm_put_scalar writes: a string header and 255 bytes. */
#define FMM_PUT_SCALAR_MAX_NBYTES 258

/* Writes None, a bool, a small int, a float or a short ASCII string at p, which has room for the longest of them; returns
 * where the next byte goes. NULL: the object is something else, nothing was written. */
static inline uint8_t *fmm_put_scalar(uint8_t *p, PyObject *obj)
{
    int64_t value;
    if (obj == Py_None) return fmm_write_nil(p);
    if (Py_IS_TYPE(obj, &PyLong_Type)) return fmm_pylong_small(obj, &value) ? fmm_write_int(p, value) : NULL;
    if (Py_IS_TYPE(obj, &PyUnicode_Type)) {
        if (!PyUnicode_IS_COMPACT_ASCII(obj)) return NULL;
        const Py_ssize_t nbytes = PyUnicode_GET_LENGTH(obj);
        if (nbytes > 255) return NULL;
        p = fmm_write_str_header(p, (uint32_t)nbytes);
        fmm_copy_short(p, PyUnicode_1BYTE_DATA(obj), (size_t)nbytes);
        return p + nbytes;
    }
    if (Py_IS_TYPE(obj, &PyBool_Type)) return fmm_write_bool(p, obj == Py_True);
    if (Py_IS_TYPE(obj, &PyFloat_Type)) return fmm_write_float(p, PyFloat_AS_DOUBLE(obj));
    return NULL;
}

/* Whether a value is an empty container that its field leaves out: exactly of that type, no subclass. */
static inline int fmm_is_left_out_empty(PyObject *obj, const fmm_field_t *field)
{
    switch (field->empty) {
    case FMM_EMPTY_LIST: return Py_IS_TYPE(obj, &PyList_Type) && PyList_GET_SIZE(obj) == 0;
    case FMM_EMPTY_DICT: return Py_IS_TYPE(obj, &PyDict_Type) && PyDict_GET_SIZE(obj) == 0;
    case FMM_EMPTY_SET: return Py_IS_TYPE(obj, &PySet_Type) && PySet_GET_SIZE(obj) == 0;
    default: return 0;
    }
}

static inline PyObject *fmm_slot_value(PyObject *obj, const fmm_field_t *field)
{
    return fmm_slot_get(obj, field->offset);
}

/* A field that holds tensors takes None and no other scalar; one that says how items are joined takes not even that. */
static inline int fmm_takes_scalar(const fmm_field_t *field, const PyObject *value)
{
    return !field->mode || (value == Py_None && !(field->mode & FMM_MODE_FIELD));
}

/* The longest key and scalar of one field in a run: longer keys end the run. */
#define FMM_PUT_KEY_MAX_NBYTES 255
#define FMM_PUT_FIELD_MAX_NBYTES (16 + FMM_PUT_KEY_MAX_NBYTES + FMM_PUT_SCALAR_MAX_NBYTES)

static inline uint8_t *fmm_put_key(uint8_t *p, const char *keys, const fmm_field_t *field)
{
    const char *key = keys + field->key;
    memcpy(p, key, 16);
    if (field->key_nbytes > 16) memcpy(p + 16, key + 16, (size_t)field->key_nbytes - 16);
    return p + field->key_nbytes;
}

/* Writes the slots from *index on that hold scalars; stops at the first other one, *index then says which. */
static inline uint8_t *fmm_put_array_run(uint8_t *p, PyObject *obj, const fmm_field_t *fields, int nfields, int *index)
{
    int i = *index;
    for (; i < nfields; i++) {
        PyObject *value = fmm_slot_value(obj, &fields[i]);
        if (value == Py_None) { /* most of them */
            if (fields[i].mode & FMM_MODE_FIELD) break;
            *p++ = 0xc0;
            continue;
        }
        if (value == NULL || fields[i].mode) break;
        uint8_t *after = fmm_put_scalar(p, value);
        if (after == NULL) break;
        p = after;
    }
    *index = i;
    return p;
}

/* The same for a map: keys and values, leaving out what the field says. *count goes up with each pair. */
static inline uint8_t *fmm_put_map_run(uint8_t *p, PyObject *obj, const char *keys, const fmm_field_t *fields, int nfields,
                                       int *index, int *count, PyObject *unset)
{
    int i = *index;
    for (; i < nfields; i++) {
        const fmm_field_t *field = &fields[i];
        PyObject *value = fmm_slot_value(obj, field);
        if (value == field->identical) continue; /* most of them */
        if (value == NULL || value == unset || field->key_nbytes > FMM_PUT_KEY_MAX_NBYTES) break;
        if (!fmm_takes_scalar(field, value)) break;
        if (field->empty && fmm_is_left_out_empty(value, field)) continue;
        uint8_t *after = fmm_put_scalar(fmm_put_key(p, keys, field), value);
        if (after == NULL) break;
        p = after;
        ++*count;
    }
    *index = i;
    return p;
}

/* The same for attributes that live in the instance's dict, where they lie in the order of the fields, as a rule: *position
 * walks with them. *value is that of the field that ends the run, borrowed; NULL when the instance lacks it. */
static inline uint8_t *fmm_put_attributes_run(uint8_t *p, PyObject *dict, PyObject *const *names, const char *keys,
                                              const fmm_field_t *fields, int nfields, Py_ssize_t *position, int *index,
                                              int *count, PyObject *unset, PyObject **value)
{
    int i = *index;
    for (; i < nfields; i++) {
        const fmm_field_t *field = &fields[i];
        const Py_ssize_t before = *position;
        PyObject *name;
        if (!PyDict_Next(dict, position, &name, value) || name != names[i]) {
            *position = before;
            *value = PyDict_GetItem(dict, names[i]);
        }
        if (*value == NULL || *value == unset || field->key_nbytes > FMM_PUT_KEY_MAX_NBYTES) break;
        if (!fmm_takes_scalar(field, *value)) break;
        uint8_t *after = fmm_put_scalar(fmm_put_key(p, keys, field), *value);
        if (after == NULL) break;
        p = after;
        ++*count;
    }
    *index = i;
    return p;
}

/* Writes a slice's bound; NULL when it is neither None nor a small int. */
static inline uint8_t *fmm_put_bound(uint8_t *p, PyObject *bound)
{
    int64_t value;
    if (bound == Py_None) return fmm_write_nil(p);
    if (!Py_IS_TYPE(bound, &PyLong_Type) || !fmm_pylong_small(bound, &value)) return NULL;
    return fmm_write_int(p, value);
}

/* `[start, stop, step]`; NULL when a bound is not plain. */
static inline uint8_t *fmm_put_slice(uint8_t *p, PyObject *obj)
{
    const PySliceObject *slice = (const PySliceObject *)obj;
    p = fmm_put_bound(fmm_write_array_header(p, 3), slice->start);
    if (p != NULL) p = fmm_put_bound(p, slice->stop);
    return p != NULL ? fmm_put_bound(p, slice->step) : NULL;
}

#define FMM_PUT_SLICE_MAX_NBYTES 28
/* Tuples of more slices than this are written the general way. */
#define FMM_PUT_SLICES_MAX_NDIM 8
#define FMM_PUT_SLICES_MAX_NBYTES (1 + FMM_PUT_SLICES_MAX_NDIM * FMM_PUT_SLICE_MAX_NBYTES)

/* A slice or a tuple of slices, one per dimension; NULL when it is something else. */
static inline uint8_t *fmm_put_slices_item(uint8_t *p, PyObject *item)
{
    if (Py_IS_TYPE(item, &PySlice_Type)) return fmm_put_slice(p, item);
    if (!Py_IS_TYPE(item, &PyTuple_Type)) return NULL;
    const Py_ssize_t ndim = PyTuple_GET_SIZE(item);
    if (ndim > FMM_PUT_SLICES_MAX_NDIM) return NULL;
    p = fmm_write_array_header(p, (uint32_t)ndim);
    for (Py_ssize_t axis = 0; axis < ndim && p != NULL; axis++) {
        PyObject *slice = PyTuple_GET_ITEM(item, axis);
        p = Py_IS_TYPE(slice, &PySlice_Type) ? fmm_put_slice(p, slice) : NULL;
    }
    return p;
}

/* Writes the slices that `items` begins with, as far as they are plain; *index goes up with each. */
static inline uint8_t *fmm_put_slices(uint8_t *p, PyObject *const *items, Py_ssize_t nelem, Py_ssize_t *index)
{
    for (Py_ssize_t i = 0; i < nelem; i++) {
        uint8_t *after = fmm_put_slices_item(p, items[i]);
        if (after == NULL) break;
        p = after;
        ++*index;
    }
    return p;
}

/* How many of the items, from the first on, are the very same object: a placeholder's token, repeated. */
static inline Py_ssize_t fmm_same_run(PyObject *const *items, Py_ssize_t nelem)
{
    const Py_ssize_t step = 128; /* equal to itself, one item further on: all are the same */
    Py_ssize_t run = 1;
    while (run + step <= nelem && memcmp(&items[run - 1], &items[run], (size_t)step * sizeof *items) == 0) run += step;
    while (run < nelem && items[run] == items[0]) run++;
    return run;
}

/* Repeats the nbytes at p until there are `times` of them; needs times * nbytes of room. */
static inline uint8_t *fmm_repeat(uint8_t *p, size_t nbytes, size_t times)
{
    const size_t total = nbytes * times;
    size_t done = nbytes;
    while (done < total) {
        const size_t step = done < total - done ? done : total - done;
        memcpy(p + done, p, step);
        done += step;
    }
    return p + total;
}

#endif
