"""Ops for CPUs, fp32, out of what torch ships: oneDNN's prepacked linear, MKL's bmm, and safe elementwise ops."""
