"""The objective `divergence`: exact against plain autograd, the expectation of OPD's gradient, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import Divergence, TokenStates, make_objective
from iwopd.config import ConfigError, Optim, make_config
from iwopd.lm import ResponseModel
from iwopd.teacher.local import LocalScorer
from iwopd.train.learner import Learner
from iwopd.train.micro_batch import Distributions
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch
from models import make_model

N, V = 7, 11


def states(seed: int, hidden: int, bias: bool) -> TokenStates:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(V, (N,), generator=generator)
    return TokenStates(draw(N, hidden), targets, draw(V + 2, hidden), draw(V + 2) if bias else None, 0.8, V)


def by_hand(kind: str, student: TokenStates, teacher: TokenStates) -> Tensor:
    """[N] from whole softmaxes."""

    def logprobs(one: TokenStates) -> Tensor:
        logits = one.hidden @ one.weight.T + (0.0 if one.bias is None else one.bias)
        return (logits[:, :V] / one.temperature).log_softmax(-1)

    p, q = logprobs(student), logprobs(teacher)
    return (p.exp() * (p - q)).sum(-1) if kind == "reverse-kl" else (q.exp() * (q - p)).sum(-1)


@pytest.mark.parametrize("kind", ["reverse-kl", "forward-kl"])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_whole_softmaxes(kind: str, bias: bool) -> None:
    student, teacher = states(1, 5, bias), states(2, 3, not bias)
    columns = {"supervised": torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool(), "weights": torch.rand(N, dtype=torch.float64)}
    student.hidden.requires_grad_()
    student.weight.requires_grad_()
    out = Divergence(divergence=kind).loss(student, columns, 5.0, teacher)
    wanted = (by_hand(kind, student, teacher) * columns["weights"])[columns["supervised"]].sum() / 5.0
    torch.testing.assert_close(out.loss, wanted)
    for one, other in zip(*(torch.autograd.grad(x, [student.hidden, student.weight]) for x in (out.loss, wanted)), strict=True):
        torch.testing.assert_close(one, other)
    mean = by_hand(kind, student, teacher)[columns["supervised"]].detach().mean()
    assert out.stats.as_dict()["mean"] == pytest.approx(float(mean))


def test_the_reverse_kl_is_opd_without_the_noise_of_the_draw() -> None:
    """Its gradient by the logits is the expectation of `-A grad lp` over the next token, with A the gap."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(V, dtype=torch.float64, requires_grad=True), torch.randn(V, dtype=torch.float64)
    p, q = logits.log_softmax(-1), teacher.log_softmax(-1)
    (kl,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    expected = torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        (gradient,) = torch.autograd.grad(p[token], logits, retain_graph=True)
        expected += p[token].exp().detach() * -(q[token] - p[token]).detach() * gradient
    torch.testing.assert_close(kl, expected)
    # The KL itself as an advantage of the sampled token: the same for every token, so nothing is left in expectation.
    advantage = -(p.exp() * (p - q)).sum().detach()
    useless = sum(p[k].exp().detach() * advantage * torch.autograd.grad(p[k], logits, retain_graph=True)[0] for k in range(V))
    assert float(torch.as_tensor(useless).abs().max()) < 1e-12


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, length in enumerate([9, 3, 14, 1, 9]):
        prompt = Prompt(f"p{number}", tuple(torch.randint(2, 21, (2 + number,), generator=generator).tolist()))
        made.append(Rollout(prompt, torch.randint(1, 21, (length,), generator=generator), torch.zeros(length), "length"))
    return made


def gradients(
    budget: int, *, weights: str = "survival", ahead: bool = False, keep: bool = False, **method: Any
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one update; `keep`: the teacher's states are those of its scores, not computed again."""
    items, model, teacher = rollouts(), make_model("qwen3"), LocalScorer(make_model("llama", seed=5), vocab_size=21)
    objective = make_objective({"objective": "divergence", "weights": weights, **method})
    optim = Optim(lr=1e-9, grad_clip=1e9, token_budget=budget)
    lm = ResponseModel(model, vocab_size=21)
    learner = Learner(lm, optim, objective, Ranks(), Distributions.of(teacher))
    asked = objective.asks
    forward = learner.forward(items, asked.student) if ahead else None
    student = forward.scores if forward else LocalScorer(model, vocab_size=21).look(items, asked.student)
    chosen = [scores.top_ids for scores in student if scores.top_ids is not None] if asked.student_first else None
    taught = teacher.look(items, replace(asked.teacher, states=keep), chosen)
    batch = TokenBatch.collate(
        [
            ScoredRollout(item, ours.logprobs, theirs.logprobs, None, objective.further_evidence(ours, theirs), theirs.states)
            for item, ours, theirs in zip(items, student, taught, strict=True)
        ]
    )
    update = learner.update(batch, loss_columns(objective, batch, evidence_of(batch)), seed=0, step=1, forward=forward)
    return update.loss, {name: learner.optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}


def test_the_learner_gives_it_both_models_whatever_the_micro_batches() -> None:
    loss, whole = gradients(10_000, ahead=True)
    for budget in (10_000, 20):
        other, parts = gradients(budget)
        assert other == pytest.approx(loss, rel=1e-5)
        for name, gradient in whole.items():
            torch.testing.assert_close(gradient, parts[name], rtol=1e-4, atol=1e-6, msg=name)
    assert gradients(10_000, weights="uniform")[0] != pytest.approx(loss, rel=1e-2)
    other, parts = gradients(20, keep=True)
    assert other == pytest.approx(loss, rel=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, parts[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("support_of", ["teacher", "student", "union"])
@pytest.mark.parametrize("kind", ["reverse-kl", "jsd"])
def test_a_support_of_all_ids_is_the_whole_vocabulary(kind: str, support_of: str) -> None:
    loss, whole = gradients(10_000, divergence=kind)
    for ahead, budget in ((True, 10_000), (False, 20)):
        other, parts = gradients(budget, ahead=ahead, divergence=kind, support="top-k", k=21, support_of=support_of)
        assert other == pytest.approx(loss, rel=1e-4)
        for name, gradient in whole.items():
            torch.testing.assert_close(gradient, parts[name], rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.parametrize("support_of", ["teacher", "student", "union"])
def test_fewer_ids_see_less_of_the_divergence(support_of: str) -> None:
    """Merging outcomes never raises a divergence; a few ids of a vocabulary of 21 leave something in the bucket."""
    losses = [gradients(10_000, support="top-k", k=k, support_of=support_of)[0] for k in (1, 4, 12, 21)]
    assert losses == sorted(losses)
    assert losses[0] < 0.9 * losses[-1]


def test_what_it_says_of_itself() -> None:
    objective = make_objective({"objective": "divergence"})
    assert objective.needs_teacher_distribution
    assert not objective.needs_reference
    gap = torch.tensor([[-1.0, 2.0]])
    evidence = Evidence(gap, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert torch.equal(objective.signal(evidence).advantages, gap)
    with pytest.raises(ValueError, match="needs the teacher's hidden states"):
        objective.loss(states(1, 5, False), {}, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": {"divergence": "jeffreys"}}, "divergence: must be one of 'reverse-kl', 'forward-kl', 'jsd'"),
        ({"method": {"beta": 0.3}}, "beta is not used .* it belongs to objective 'divergence' with divergence = 'jsd'"),
        ({"method": {"divergence": "jsd", "beta": 1.2}}, r"beta of divergence 'jsd' must lie in \[0, 1\], got 1.2"),
        ({"method": {"divergence": "skew-forward-kl", "alpha": 1.0}}, r"alpha .* must lie in \[0, 1\), got 1.0"),
        ({"method": {"k": 4}}, "k is not used .* it belongs to objective 'divergence' with support = 'top-k'"),
        ({"method": {"support": "top-k", "k": 0}}, "k must be at least 1, got 0"),
        ({"method": {"clip": 0.2}}, "clip is not used by objective 'divergence': it belongs to objective 'policy-gradient'"),
        ({"teacher": {"urls": ["http://gpu1:8000"]}}, "such servers give .*top-k.*, but not hidden states"),
        (
            {"method": {"support": "top-k", "support_of": "union"}, "teacher": {"urls": ["http://gpu1:8000"]}},
            "not log-probs of ids that the student chose. Serve the teacher with `iwopd serve-teacher`",
        ),
        (
            {
                "method": {"support": "top-k", "support_of": "student", "k": 1025},
                "teacher": {"urls": ["http://gpu1:8000"], "dialect": "iwopd"},
            },
            "asks for 1025 ids of a token, and teacher servers give at most 1024",
        ),
        ({"teacher": {"others": {"code": {"model": "x"}}}}, "leave teacher.others out"),
    ],
)
def test_what_it_cannot_use_is_refused_before_anything_is_loaded(settings: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"models": {"world": "clean"}, "method": {"objective": "divergence"}}
    method = {**base["method"], **settings.get("method", {})}
    with pytest.raises(ConfigError, match=message):
        make_config({**base, **settings, "method": method})
