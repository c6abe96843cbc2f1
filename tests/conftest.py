"""What every test starts from."""

from __future__ import annotations

import signal

# A shell starts its background jobs with Ctrl-C ignored, and children inherit that: tests that send it need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)
