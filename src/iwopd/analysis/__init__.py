"""Position-bias probes."""
