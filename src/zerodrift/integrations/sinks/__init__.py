"""Places that decisions are sent to, one file each; `base` says what a sink is."""
