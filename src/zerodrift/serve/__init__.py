"""`zerodrift serve`: the exact engine behind the routes that RL clients speak."""
