"""Which change between a stack that works and one that does not is to blame."""
