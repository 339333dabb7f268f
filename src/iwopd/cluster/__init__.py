"""Beyond one machine."""
