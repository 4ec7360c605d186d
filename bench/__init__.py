"""Measurements beside vLLM, msgspec, torch, numpy and ml_dtypes: `make bench`. The peers live here and in tests only."""
