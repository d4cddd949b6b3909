"""How far two policies are apart, as values: what audit, blame and a monitor judge by. Torch-free."""
