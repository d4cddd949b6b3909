"""The statistics of drift, in numpy and scipy. Torch-free; non-finite input is refused."""
