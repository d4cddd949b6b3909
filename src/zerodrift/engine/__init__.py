"""Rollouts whose logprobs are those of the trainer's forward: plan a step, run it, commit it."""
