"""Other machines: how their engines and shells are reached, several at once, and what was put on them."""
