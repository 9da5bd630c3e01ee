"""From a bug report to the stack on which the bug shows: what is known, what it leaves open, what follows, and why it fails."""
