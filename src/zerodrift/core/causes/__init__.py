"""The causes as data, one entry each, by the layer that they live in."""
