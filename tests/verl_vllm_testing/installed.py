"""Importing this registers the platform with verl, before anything asks verl for it. vLLM's patches stand in `worker.py`."""

from verl_testing import platform

platform.install()

from verl.utils.tokenizer import continuous_token_wiring as wiring  # noqa: E402  # imports modules that ask for the platform

# verl expects Qwen's own tokens for every Qwen architecture; the tiny models' tokenizer of 21 ids has none of them.
wiring._MODEL_TYPE_TO_FAMILY["qwen3"] = wiring.ContinuousTokenModelFamily.DEFAULT
