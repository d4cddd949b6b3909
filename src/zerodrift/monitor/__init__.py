"""While training runs: is it the engine, old weights, or learning? Torch-free, inside any trainer's process."""
