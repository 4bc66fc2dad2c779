"""Settings of all tests."""

import os

from hypothesis import settings

# A time limit for each example is a timing assertion: on a busy machine it fails for no fault of the code. CI tries the
# same examples every time, so that what it says depends on the commit alone; at a desk they are new ones each time.
settings.register_profile("headway", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("headway")
