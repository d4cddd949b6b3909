"""One file for each kind of server: what is particular to it, as data."""
