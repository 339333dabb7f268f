"""Prompts: their sources and their order."""
