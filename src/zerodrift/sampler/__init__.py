"""From logits to a token: processing in a documented order, and counter-based noise."""
