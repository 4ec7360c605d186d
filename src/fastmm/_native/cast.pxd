"""Reference of the casts for the other compiled modules: pick a table once, under the GIL; run it with or without.

The C files behind this (cpu detection, kernels, registry) are linked into this extension alone.
"""

from libc.stdint cimport uint64_t

cdef extern from "fastmm/status.h" nogil:
    ctypedef enum fmm_status_t:
        FMM_OK
        FMM_ERR_OVERFLOW
        FMM_ERR_OVERLAP
        FMM_ERR_UNSUPPORTED

cdef extern from "fastmm/cast.h" nogil:
    ctypedef struct fmm_cast_table_t:
        const char* name

# The table that this process uses: FASTMM_ISA's, else the best this machine can run.  Decided on the first call and kept.
# Raises CompatError when FASTMM_ISA names what this build or this machine does not have.  Needs the GIL.
cdef const fmm_cast_table_t* selected_table() except NULL

# The FMM_CPU_* bits of cpu.h that this machine has; asked once.  Needs the GIL.
cdef uint64_t cpu_features() noexcept

# The table of an instruction set by name, None for the selected one.  Raises CompatError.  Needs the GIL.
cdef const fmm_cast_table_t* table_named(object isa) except NULL

# `fmm_cast_run` and `fmm_cast_run_swapped` of cast.h: dtypes are fmm_dtype_t codes; dst equals src or is disjoint.
cdef fmm_status_t cast_run(const fmm_cast_table_t* table, int src_dtype, int dst_dtype, const void* src, void* dst,
                           size_t nelem, bint swapped) noexcept nogil

# Whether `cast_run` converts the pair; and whether it may do so with dst equal to src.
cdef bint cast_supported(int src_dtype, int dst_dtype) noexcept nogil
cdef bint cast_supported_inplace(int src_dtype, int dst_dtype) noexcept nogil

# The fmm_dtype_t that a caller means: a name ("bfloat16"), a torch dtype or anything numpy takes for a dtype.  Raises
# SchemaError for what is no target of a cast: a target is bfloat16, float16 or float32.  Needs the GIL.
cdef int cast_target(object dtype) except -1

cdef enum:
    # From this many source bytes on a cast lets go of the GIL: below, the cast is over before another thread could wake.
    CAST_RELEASE_GIL_MIN_NBYTES = 1 << 18
