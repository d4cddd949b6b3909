"""Linear response: is Δ what a small change of one part of the model would do to every logprob?"""
