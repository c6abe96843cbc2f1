"""What every test starts from."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A shell starts its background jobs with Ctrl-C ignored, and children inherit that: tests that send it need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something about who else uses the machine, and nothing about the code.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
