"""Ops for CUDA in Triton, 16-bit weights, fp32 accumulation. Imported only when a model lies on a GPU."""
