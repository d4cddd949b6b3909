"""Which weights are these? Names, shapes, dtypes and content, compared bit for bit."""
