"""Accounts of a weight update that went wrong: which part of it arrived, which rows, and how much of it."""
