"""What the engine would have reported if … : accounts, their evaluation, and the hypotheses that change them."""
