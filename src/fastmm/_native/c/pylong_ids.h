/* Reading small Python ints without a call per int. Needs the GIL; makes no Python call that could run code. */
#ifndef FASTMM_PYLONG_IDS_H
#define FASTMM_PYLONG_IDS_H

#include <Python.h>
#if PY_VERSION_HEX < 0x030b0000
#include <longintrepr.h>
#endif
#include <stdint.h>

/* Since 3.12 the digits lie behind a tag that holds their number and the sign. */
#if PY_VERSION_HEX >= 0x030c0000
#define FMM_PYLONG_SIZE(o) (((PyLongObject *)(o))->long_value.lv_tag)
#define FMM_PYLONG_DIGIT(o) (((PyLongObject *)(o))->long_value.ob_digit[0])
#define FMM_PYLONG_ONE_DIGIT ((uintptr_t)1 << 3) /* one digit, positive */
#else
#define FMM_PYLONG_SIZE(o) ((uintptr_t)Py_SIZE(o))
#define FMM_PYLONG_DIGIT(o) (((PyLongObject *)(o))->ob_digit[0])
#define FMM_PYLONG_ONE_DIGIT ((uintptr_t)1)
#endif

/* Copies nelem ids out of a list's items. Returns 1 when all are plain ints of one digit (1 to 2^30 - 1; with zero and
 * anything else the caller takes the general way); `ids` is rubbish otherwise. No branch inside: one test per call. */
static inline int fmm_gather_ids(PyObject *const *items, Py_ssize_t nelem, uint32_t *ids)
{
    uintptr_t other = 0;
    for (Py_ssize_t i = 0; i < nelem; i++) {
        PyObject *item = items[i];
        if (!Py_IS_TYPE(item, &PyLong_Type)) return 0; /* what is no int has no digit to read */
        other |= FMM_PYLONG_SIZE(item) ^ FMM_PYLONG_ONE_DIGIT;
        ids[i] = FMM_PYLONG_DIGIT(item);
    }
    return other == 0;
}

/* A plain int as int64_t: 1, or 0 when it has more than two digits (ask Python then). */
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

#endif
