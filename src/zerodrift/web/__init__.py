"""What servers of ours share: who may ask, and by which name."""
