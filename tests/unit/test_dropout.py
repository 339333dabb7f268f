"""What is random in training mode only is switched off in every architecture, and what is left is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from iwopd.algo.objectives import make_objective
from iwopd.config import ConfigError, Optim
from iwopd.lm import ResponseModel, Sequences
from iwopd.train.assembly import check_training_mode
from iwopd.train.learner import Learner
from iwopd.train.ranks import Ranks
from iwopd.types import Prompt
from models import COMMON, make_model

IDS = {"vocab_size": 21, **COMMON}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2, **IDS}
WIDE = {**SMALL, "intermediate_size": 64}
RATE = 0.3
MODELS: dict[str, Any] = {
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, dropout=RATE, attention_dropout=RATE)
    ),
    "opt, layers dropped": lambda: OPTForCausalLM(
        OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0, layerdrop=0.5)
    ),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, hidden_dropout=RATE, **IDS)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, resid_pdrop=RATE, **IDS)
    ),
    "gptj": lambda: GPTJForCausalLM(
        GPTJConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=8, initializer_range=0.2, resid_pdrop=RATE, **IDS)
    ),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SMALL, hidden_dropout=RATE, attention_dropout=RATE, alibi=False)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**WIDE, hidden_dropout=RATE, attention_dropout=RATE)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**WIDE, resid_pdrop=RATE, attention_dropout=RATE)),
    "stablelm": lambda: StableLmForCausalLM(StableLmConfig(**WIDE, num_key_value_heads=4, hidden_dropout=RATE)),
    "persimmon": lambda: PersimmonForCausalLM(PersimmonConfig(**WIDE, hidden_dropout=RATE, attention_dropout=RATE)),
    "mixtral, noisy router": lambda: MixtralForCausalLM(
        MixtralConfig(**WIDE, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=RATE, sliding_window=None)
    ),
}
PROMPTS = [Prompt(str(number), tuple(range(2, 12 + number))) for number in range(3)]


def trial() -> Sequences:
    return Sequences.build([torch.tensor(p.token_ids[:1]) for p in PROMPTS], [torch.tensor(p.token_ids[1:]) for p in PROMPTS])


def passes(lm: ResponseModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of two passes in training mode and of one in eval mode, all with gradients."""
    lm.model.train()
    one, two = lm.logprobs(trial()).detach(), lm.logprobs(trial()).detach()
    lm.model.eval()
    return one, two, lm.logprobs(trial()).detach()


@pytest.mark.parametrize("kind", MODELS)
def test_two_passes_in_training_mode_agree_with_each_other_and_with_eval_mode(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    lm = ResponseModel(model, vocab_size=21)
    one, two, _ = passes(lm)
    if "layers dropped" not in kind:  # which by chance may be none
        assert float((one - two).abs().max()) > 1e-2, "nothing is random in it: the test would be void"
    Learner(lm, Optim(), make_objective({}), Ranks())
    one, two, still = passes(lm)
    assert torch.equal(one, two)
    torch.testing.assert_close(one, still, rtol=0, atol=1e-5)
    check_training_mode(lm, PROMPTS)


class Noise(nn.Module):
    """Random in training mode, under a name that says nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out + 0.5 * torch.randn_like(out) if self.training else out


@pytest.mark.parametrize("half", [False, True])
def test_what_cannot_be_switched_off_is_refused(half: bool) -> None:
    model = make_model("qwen3")
    model.model.layers[0].mlp = Noise(model.model.layers[0].mlp)
    context: Any = (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if half else None
    lm = ResponseModel(model, vocab_size=21, **({"autocast": context} if half else {}))
    Learner(lm, Optim(), make_objective({}), Ranks())
    model.eval()
    with pytest.raises(ConfigError, match="the student, a Qwen3ForCausalLM, has other log-probs in training mode"):
        check_training_mode(lm, PROMPTS)
    assert not any(module.training for module in model.modules())


def test_a_mode_that_depends_on_nothing_random_is_refused_too() -> None:
    """Two passes in training mode agree, and yet the update would see another policy than the rollouts."""

    class Scale(Noise):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return 1.5 * out if self.training else out

    model = make_model("qwen3")
    model.model.layers[0].mlp = Scale(model.model.layers[0].mlp)
    with pytest.raises(ConfigError, match="in training mode"):
        check_training_mode(ResponseModel(model, vocab_size=21), PROMPTS)
