"""Faults planted on purpose. Shares no code with the counterfactuals that must find them."""
