"""Reference of tensor_make.  Every function here needs the GIL."""

from libc.stdint cimport int64_t

from .tensor cimport Family, fmm_dl_exchange_api_t


# A new tensor of the given family over dense memory that `owner` keeps.  numpy has no bfloat16 or float8 of its own: with
# ml_dtypes installed its types are taken, else the result is a WireTensor.
cdef object tensor_make(Family family, void* data, int dtype, int ndim, const int64_t* shape, object owner, bint readonly)

# numpy's type of an fmm_dtype_t: ml_dtypes' for bfloat16 and float8 where that is installed, else None.
cdef object numpy_descr(int dtype)

# A numpy array of a dtype object over memory that `owner` keeps; without strides it is dense.  Without data it has memory of
# its own, for the caller to fill.
cdef object make_numpy(void* data, object descr, int ndim, const int64_t* shape, const int64_t* strides_nbytes, object owner,
                       bint readonly)

# torch's exchange table; imports torch on first use.
cdef const fmm_dl_exchange_api_t* torch_api() except NULL

# Whether any of these bytes belong to memory that a torch tensor of ours shows although it must not be written to: torch
# has no read-only tensors, so this is the only place that knows.
cdef bint is_exported_readonly(const void* data, size_t nbytes) noexcept
