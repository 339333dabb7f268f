"""Students that write: from `Prompt` to `Rollout`, through an engine (`engine.py`)."""
