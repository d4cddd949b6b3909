"""What goes to disk, with a schema version in every file."""
