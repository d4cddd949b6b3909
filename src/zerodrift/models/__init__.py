"""Loading models safely, and building tiny ones on the spot."""
