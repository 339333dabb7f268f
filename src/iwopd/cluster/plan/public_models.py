"""The shapes of models: from a folder's config.json, from a table of public ones, or from the hub."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from iwopd.cluster.plan.gpus import PlanError
from iwopd.models import ModelError, ModelSource, load_configs
from iwopd.train.memory import ModelShape


@dataclass(frozen=True, kw_only=True)
class PublicShape:
    """The numbers of a public config.json that decide size and work."""

    hidden: int
    inner: int
    """Of an expert, where there are experts."""
    layers: int
    heads: int
    experts: bool = False
    vocabulary: int = 151936
    key_heads: int = 8
    tied: bool = True


PUBLIC = {
    "Qwen3-0.6B": PublicShape(hidden=1024, inner=3072, layers=28, heads=16),
    "Qwen3-1.7B": PublicShape(hidden=2048, inner=6144, layers=28, heads=16),
    "Qwen3-4B": PublicShape(hidden=2560, inner=9728, layers=36, heads=32),
    "Qwen3-30B-A3B": PublicShape(hidden=2048, inner=768, layers=48, heads=32, experts=True, key_heads=4, tied=False),
    "Qwen3-235B-A22B": PublicShape(hidden=4096, inner=1536, layers=94, heads=64, experts=True, key_heads=4, tied=False),
}
"""The paper's models (sources: docs/plan.md). The Instruct-2507 ones have the shape of the model they are named after."""

SUFFIXES = ("-Instruct-2507", "-Thinking-2507", "-Base")


def read_model(source: ModelSource, setting: str, *, trust_remote_code: bool = False) -> ModelShape:
    """Shape of the model that a setting names, without its weights: a local folder first, then the table, then the hub."""
    public = None if source.is_local or source.gguf_file else public_config(source.path)
    if public is not None:
        return ModelShape.of(public, str(source), "table of public shapes")
    try:
        config, _ = load_configs(source, trust_remote_code=trust_remote_code)
        return ModelShape.of(config, str(source), "its config.json" if source.is_local else "config.json on the hub")
    except (ModelError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0][:500] if str(error) else type(error).__name__
        raise PlanError(
            f"{setting} = {source}: its shape cannot be read ({reason}). Name a local folder that holds its "
            f"config.json (weights are not needed), or one of the models that are known without a network: {', '.join(PUBLIC)}"
        ) from None


@cache
def public_config(path: str) -> Any:
    """The config of one of the public models by hub id or name; None if it is none of them."""
    owner, _, name = path.rpartition("/")
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    shape = PUBLIC.get(name)
    return None if shape is None or owner not in ("", "Qwen") else make_config(shape)


def make_config(shape: PublicShape) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": 128,  # read by the MoE model, too, although its config class does not declare it
        "tie_word_embeddings": shape.tied,
    }
    if not shape.experts:
        return Qwen3Config(intermediate_size=shape.inner, **sizes)
    return Qwen3MoeConfig(moe_intermediate_size=shape.inner, num_experts=128, num_experts_per_tok=8, **sizes)
