"""What will go wrong with these settings? Asked of a command line, a file or a server, before anything is generated."""
