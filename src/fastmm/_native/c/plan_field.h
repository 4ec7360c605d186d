/* One field of a struct, as the walk reads it: where it lies, its encoded key, when it is left out.
 *
 * Sixteen bytes, four to a cache line: on a busy server the caches are cold, and a request has some seventy fields.
 */
#ifndef FASTMM_PLAN_FIELD_H
#define FASTMM_PLAN_FIELD_H

#include <Python.h>
#include <stdint.h>

typedef struct {
    PyObject *identical;  /* a value that is this object is left out; an object nobody has, when there is none */
    uint16_t offset;      /* of the slot in the object, 0: in the instance's dict */
    uint16_t key;         /* offset of the encoded map key in the plan's keys, which end in 16 bytes of padding */
    uint16_t key_nbytes;
    uint8_t mode;         /* FMM_MODE_* for what the field holds */
    uint8_t empty;        /* FMM_EMPTY_*: an empty container of that type is left out */
} fmm_field_t;

/* The engine holds a torch tensor here: numpy arrays are named as torch names them. */
#define FMM_MODE_TENSOR 1
/* Floating tensors are cast to the target dtype. */
#define FMM_MODE_PAYLOAD 2
/* One of the classes that say how items are joined: batched, flat or shared. */
#define FMM_MODE_FIELD 4
/* The list of features that requests of one prompt may share. */
#define FMM_MODE_FEATURES 8
/* Token ids: an array of integers is written as the list that the engine reads. */
#define FMM_MODE_IDS 16

#define FMM_EMPTY_KEPT 0
#define FMM_EMPTY_LIST 1
#define FMM_EMPTY_DICT 2
#define FMM_EMPTY_SET 3

#endif
