"""What is made of rewards: one objective per file, each a function of per-token logprobs."""
