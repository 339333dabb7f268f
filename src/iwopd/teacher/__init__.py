"""Scorers: from `Rollout` to log-probs."""
