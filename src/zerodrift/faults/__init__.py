"""Faults planted on purpose. Shares no code with the counterfactuals that must find them.

A fault in an engine of our own still runs that engine: its generation, and the processing in it, are not the fault's.
"""
