"""Small random models in folders, for tests of everything that loads models by path."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from iwopd.tiny import build_tokenizer

COMMON = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def make_model(kind: str, *, hidden: int = 32, layers: int = 2, vocab: int = 21, seed: int = 0) -> Any:
    """A random causal LM of an architecture; its output matrix may have more rows than the tokenizer has ids."""
    import torch

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        **COMMON,
    }
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    if kind == "gemma2":  # caps its logits: hidden @ weight.T is not what it says
        return Gemma2ForCausalLM(Gemma2Config(**sizes, final_logit_softcapping=2.0, query_pre_attn_scalar=8))
    if kind == "gpt2":
        config = GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=4, vocab_size=vocab, n_positions=256, initializer_range=0.2, **COMMON
        )
        return GPT2LMHeadModel(config)
    raise ValueError(kind)


def save_pair(folder: Path, *, prompts: int = 48, student: str = "qwen3", teacher: str = "qwen3") -> dict[str, Any]:
    """Student, teacher and a prompt file under `folder`; returns the settings that use them."""
    for name, kind, seed in (("student", student, 1), ("teacher", teacher, 2)):
        make_model(kind, seed=seed).save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)
    rng = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(prompts):
            expression = "+".join(str(rng.randrange(10)) for _ in range(rng.randint(2, 6)))
            file.write(json.dumps({"id": f"p{number}", "prompt": expression}) + "\n")
    return {
        "steps": 6,
        "threads": 1,
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher")},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rollout": {"prompts_per_step": 16, "max_tokens": 24},
        "optim": {"lr": 1e-3},
        "checkpoint": {"every": 2},
        "method": {"weights": "cumulative-share"},
        "tracking": {"console": "plain"},
    }


def byte_tokenizer(*, chat: bool = True) -> Any:
    """A tokenizer for any text: the 256 bytes and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1, **{letter: number + 2 for number, letter in enumerate(alphabet)}}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", chat_template=template if chat else None
    )


def save_byte_model(folder: Path, *, chat: bool = True, seed: int = 0) -> Path:
    """A random model that reads and writes bytes, with room for long prompts."""
    import torch

    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=258,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=True,
        **COMMON,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(chat=chat).save_pretrained(folder)
    return folder


def save_gguf(folder: Path, *, quantised: bool = False, seed: int = 0) -> tuple[Any, Any]:
    """A random Llama that reads and writes bytes as `folder/tiny.gguf`; returns the model and its tokenizer.

    Written with the format's own package, in the layout of llama.cpp (rotary pairs side by side).
    """
    import gguf
    from tokenizers import AddedToken

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<bos>", special=True, normalized=False)])
    pairs = ["he", "hel"]  # a file with less than two merges is not understood
    model = make_model("llama", hidden=64, vocab=len(tokenizer) + len(pairs), seed=seed).eval()
    config = model.config
    folder.mkdir(parents=True, exist_ok=True)
    file = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_rope_dimension_count(config.head_dim)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("gpt2")
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    file.add_token_list([*tokens, *pairs])
    file.add_token_types([3 if token in ("<pad>", "<eos>", "<bos>") else 1 for token in [*tokens, *pairs]])
    file.add_token_merges(["h e", "he l"])
    file.add_bos_token_id(tokens.index("<bos>"))
    file.add_eos_token_id(1)
    file.add_pad_token_id(0)
    file.add_unk_token_id(0)
    file.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        values = _llama_cpp_order(name, tensor.float(), config).numpy().copy()
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantised and values.ndim == 2:
            file.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            file.add_tensor(_gguf_name(name), values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model, tokenizer


def _llama_cpp_order(name: str, tensor: Any, config: Any) -> Any:
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _gguf_name(name: str) -> str:
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
    }
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name
