"""Only cdef functions: everything here is for the other compiled modules."""
