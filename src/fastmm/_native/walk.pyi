"""Only cdef functions: everything here is for the other compiled modules."""

from fastmm.schema.profile import PROFILES as PROFILES
