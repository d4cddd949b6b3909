"""Engines behind one protocol. Adapters translate; they never decide."""
