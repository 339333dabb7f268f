"""Beyond one machine: the same recipe on frameworks that bring their own distribution."""
