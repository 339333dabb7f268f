"""Small tokenizers of the usual families, trained in the test."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models import make_model

Family = Literal["byte-level", "sentencepiece-bpe", "sentencepiece-unigram", "sentencepiece-first"]
FAMILIES: tuple[Family, ...] = ("byte-level", "sentencepiece-bpe", "sentencepiece-unigram", "sentencepiece-first")

TEXTS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not, does it?",
    "Let x = 12 and y = 34. Then x + y = 46, and the answer is 46.\n\nSo the answer is \\boxed{46}.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # three",
    "naïve café, Ελληνικά, 日本語の文, emoji 🎉🎉 and 👩‍🚀, cafe\u0301",
)


@cache
def trained(family: Family, size: int = 400, texts: tuple[str, ...] = TEXTS, end: str = "</s>") -> Any:
    """A tokenizer of a family with roles and an end of its own; `size` ids at most."""
    special = ["<unk>", "<pad>", end, "<|user|>", "<|assistant|>", "<|system|>"]
    raw = _byte_level(special, size, texts) if family == "byte-level" else _sentencepiece(family, special, size, texts)
    roles = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}" + end + "{% endfor %}"
    template = roles + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", eos_token=end, chat_template=template
    )
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special[3:]])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def save_model(folder: Path, tokenizer: Any, *, seed: int = 0, hidden: int = 32) -> Path:
    """A small random model of this tokenizer, with its files."""
    make_model("qwen3", vocab=len(tokenizer), seed=seed, hidden=hidden).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _byte_level(special: list[str], size: int, texts: tuple[str, ...]) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    return raw


def _sentencepiece(family: Family, special: list[str], size: int, texts: tuple[str, ...]) -> Tokenizer:
    """As Llama's and Gemma's are: ▁ for spaces, a dummy one in front (always, or at the very beginning), bytes as fallback."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    ascii_only = [text.encode("ascii", "ignore").decode() for text in texts]
    if family == "sentencepiece-unigram":
        raw = Tokenizer(models.Unigram())
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
        raw.train_from_iterator(
            ascii_only,
            trainers.UnigramTrainer(vocab_size=size - 256, special_tokens=special, unk_token="<unk>", show_progress=False),
        )
        pieces = _unigram(raw) + [(one, -20.0) for one in fallback]
        raw.model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    else:
        plain = Tokenizer(models.BPE(unk_token="<unk>"))
        plain.normalizer = normalizers.Replace(" ", "▁")
        plain.train_from_iterator(
            ascii_only, trainers.BpeTrainer(vocab_size=size - 256, special_tokens=special, show_progress=False)
        )
        made = json.loads(plain.to_str())["model"]
        vocab = dict(made["vocab"])
        for one in fallback:
            vocab[one] = len(vocab)
        merges = [tuple(pair) for pair in made["merges"]]
        raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        if family == "sentencepiece-bpe":
            raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return raw


def _unigram(raw: Tokenizer) -> list[tuple[str, float]]:
    return [(piece, score) for piece, score in json.loads(raw.to_str())["model"]["vocab"]]
