"""One frozen struct per part of the product, and the profiles that ship with it."""
