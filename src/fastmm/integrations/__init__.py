"""fastmm inside other systems. Each integration imports the system it is for, and nobody else does."""
