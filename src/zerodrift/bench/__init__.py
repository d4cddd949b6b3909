"""How fast is the engine, beside others and beside itself without exactness? Contenders take turns in one run."""
