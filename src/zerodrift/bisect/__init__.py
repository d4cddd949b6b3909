"""Which release, or which flag, changed a policy: audits of engines in a row, halved until two neighbours differ."""
