"""Is this engine the same policy as the trainer, and if not, why?"""
