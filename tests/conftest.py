"""How hard Hypothesis tries: HYPOTHESIS_PROFILE=dev while writing, ci by default, long before a release."""

import os

from hypothesis import settings

# No deadline: a busy machine must not fail a test.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None)
settings.register_profile("long", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
