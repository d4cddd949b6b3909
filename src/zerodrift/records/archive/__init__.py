"""Batches of a training run on disk: every acknowledged one survives kill -9, and blame reads them without the monitor."""
