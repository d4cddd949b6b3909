"""One controlled difference each, and a check that it was not vacuous."""
