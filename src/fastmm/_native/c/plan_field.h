/* One field of a struct, as the walk reads it: where it lies, its encoded key, when it is left out. */
#ifndef FASTMM_PLAN_FIELD_H
#define FASTMM_PLAN_FIELD_H

#include <Python.h>

typedef struct {
    Py_ssize_t offset;       /* of the slot in the object, 0: in the instance's dict */
    PyObject *identical;     /* a value that is this object is left out; never a value's address when there is none */
    const char *key;         /* the encoded map key, padded so that 16 bytes can be read; owned by the plan */
    int key_nbytes;
    int mode;                /* FMM_MODE_* for what the field holds */
    PyObject *empty;         /* list, dict or set: an empty one is left out; or NULL */
    PyObject *name;          /* attribute, interned, counted by the plan */
    int features;            /* the list that requests of one prompt may share */
} fmm_field_t;

/* The engine holds a torch tensor here: numpy arrays are named as torch names them. */
#define FMM_MODE_TENSOR 1
/* Floating tensors are cast to the target dtype. */
#define FMM_MODE_PAYLOAD 2
/* One of the classes that say how items are joined: batched, flat or shared. */
#define FMM_MODE_FIELD 4

#endif
