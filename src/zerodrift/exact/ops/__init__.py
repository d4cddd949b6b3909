"""One set of ops per device, each op beside its plain twin."""
