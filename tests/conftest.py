"""What every test may rely on."""

from __future__ import annotations

import signal

# A shell without job control starts what it puts into the background with SIGINT ignored, and children inherit that:
# tests that interrupt one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
