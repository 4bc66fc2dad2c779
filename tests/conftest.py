"""Settings of all tests."""

from hypothesis import settings

# A time limit for each example is a timing assertion: on a busy machine it fails for no fault of the code.
settings.register_profile("headway", deadline=None)
settings.load_profile("headway")
