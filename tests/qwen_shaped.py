"""Random models with a tokenizer of Qwen's shape: byte-level BPE, Qwen's special tokens, a ChatML template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models import make_model

CORPUS = ["<|im_start|>user\nWhat is the sum of one and two, the answer of the other, and so on?<|im_end|>\n"] * 8
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
ROWS = 320
"""Of the models' matrices: more than ids, as Qwen's have."""


def qwen_tokenizer(*, end: str = "<|im_end|>") -> Any:
    """Trained here on a few words. `end`: what stands for Qwen's end of a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", end)])
    raw.add_tokens([AddedToken(name, special=False) for name in ("<think>", "</think>")])
    template = TEMPLATE.replace("<|im_end|>", end)
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=raw, pad_token="<|endoftext|>", eos_token=end, chat_template=template)


def save_qwen_model(folder: Path, *, seed: int, tokenizer: Any = None) -> Path:
    """A random Qwen3 in bfloat16's numbers, with the tokenizer."""
    import torch
    from transformers import GenerationConfig

    tokenizer = tokenizer or qwen_tokenizer()
    assert len(tokenizer) <= ROWS
    model = make_model("qwen3", vocab=ROWS, seed=seed).to(torch.bfloat16).float()
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for place in (model.config, model.generation_config):
        place.eos_token_id, place.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    make: Any = GenerationConfig
    model.generation_config = make(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
