"""Answers of others: who is chosen, what is refused, how answers become ids, and the loss of both kinds together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from iwopd import tiny
from iwopd.algo import NonFiniteError
from iwopd.algo.objectives import OF_OTHERS, OTHERS, Mixture, TokenStates, make_objective
from iwopd.cluster.verl.checks import check_settings
from iwopd.cluster.verl.errors import VerlError
from iwopd.config import ConfigError, config_toml, load_config, make_config
from iwopd.data.answers import AnswerTokens, answer_text, check_answers, end_of_answer
from iwopd.data.chat import Chat
from iwopd.data.fields import DataError
from iwopd.train.mix import chosen_places
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch
from models import byte_tokenizer

RECIPES = Path(__file__).parents[2] / "src" / "iwopd" / "recipes"


@pytest.mark.parametrize(("count", "share"), [(64, 0.25), (100, 0.29), (7, 0.1), (3, 0.5), (5, 1.0), (5, 0.0), (1, 0.3)])
def test_the_share_holds_on_average_and_a_step_is_a_function_of_seed_and_step(count: int, share: float) -> None:
    steps = [chosen_places(count, share, 3, step) for step in range(1, 101)]
    assert sum(map(len, steps)) == round(100 * count * share)
    assert max(map(len, steps)) - min(map(len, steps)) <= 1
    assert all(len(set(places)) == len(places) and all(0 <= place < count for place in places) for places in steps)
    assert chosen_places(count, share, 3, 57) == steps[56]
    if 0 < share < 1 and count > 1:
        assert len({tuple(places) for places in steps}) > 1
        assert [chosen_places(count, share, 4, step) for step in range(1, 101)] != steps


WORLD: dict[str, Any] = {"models": {"world": "clean"}}
SERVED = {"models": {"student": "a/b", "teacher": "c/d"}, "data": {"prompts": "x"}, "teacher": {"urls": ["http://h:1"]}}
SEVERAL = {**SERVED, "teacher": {"others": {"two": {"model": "e/f"}}}}


@pytest.mark.parametrize(
    ("settings", "mix", "words"),
    [
        (WORLD, {"share": 1.5}, "rollout.mix.share: must be at most 1"),
        (WORLD, {"share": -0.1}, "rollout.mix.share: must be at least 0"),
        (WORLD, {"share": 0.5, "coefficient": 0}, "coefficient: must be above 0"),
        (WORLD, {"share": 0.5, "afterwards": 0.1}, "steps, after which it holds, is empty: set steps"),
        (WORLD, {"share": 0.5, "source": "somebody"}, "rollout.mix.source: must be 'data' or 'teacher'"),
        (WORLD, {"share": 0.5, "objective": "opd"}, "rollout.mix.objective: must be 'likelihood' or 'forward-kl'"),
        (WORLD, {"share": 0.5, "field": "solution"}, "it writes its own solutions: leave it out"),
        (WORLD, {"share": 0.5, "source": "teacher", "field": "solution"}, "the teacher writes: set source = 'data'"),
        (WORLD, {"share": 0.5, "temperature": 0.5}, "nothing is drawn: set source = 'teacher'"),
        (
            SERVED,
            {"share": 0.5, "source": "teacher"},
            "teacher servers (teacher.urls) only score answers: load the",
        ),
        (SEVERAL, {"share": 0.5, "source": "teacher"}, "there are several teachers (teacher.others), and one must write"),
        (SERVED, {"share": 0.5, "objective": "forward-kl"}, "teacher.dialect is 'vllm'"),
        (SERVED, {"share": 0.5, "objective": "forward-kl"}, "or set 'likelihood'"),
        (SEVERAL, {"steps": 3, "afterwards": 0.5, "objective": "forward-kl"}, "have several output matrices"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    settings: dict[str, Any], mix: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_config({**settings, "rollout": {"mix": mix}})
    assert words in str(error.value)


def test_a_budget_of_tokens_is_the_students() -> None:
    horizon = {"type": "budget", "tokens": 4000}
    with pytest.raises(ConfigError, match="counts the tokens that the student writes"):
        make_config({**WORLD, "rollout": {"horizon": horizon, "mix": {"share": 0.5}}})
    make_config({**WORLD, "rollout": {"horizon": horizon, "mix": {"share": 0.0, "source": "teacher"}}})


def test_verl_refuses_it_by_name() -> None:
    with pytest.raises(VerlError, match=r"rollout\.mix\.share is 0\.5: verl trains on what the student itself wrote"):
        check_settings(make_config({**WORLD, "rollout": {"mix": {"share": 0.5}}}))


def test_settings_are_written_out_only_where_somebody_else_answers() -> None:
    assert "mix" not in config_toml(make_config(WORLD))
    assert "afterwards = 0.25" in config_toml(make_config({**WORLD, "rollout": {"mix": {"steps": 3, "afterwards": 0.25}}}))


def test_the_recipes_differ_from_opd_in_the_mix_only() -> None:
    plain = load_config(RECIPES / "tiny" / "opd.toml").model_dump()
    for path in (RECIPES / "mix").glob("*.toml"):
        config = load_config(path)
        assert config.rollout.mix.active
        given = config.model_dump()
        assert {**given, "rollout": {**given["rollout"], "mix": plain["rollout"]["mix"]}} == plain


def test_shares_follow_the_steps() -> None:
    mix = make_config({**WORLD, "rollout": {"mix": {"share": 1.0, "steps": 2, "afterwards": 0.25}}}).rollout.mix
    assert [mix.share_at(step) for step in (1, 2, 3, 99)] == [1, 1, 0.25, 0.25]
    assert not make_config(WORLD).rollout.mix.active


def prompt(**more: Any) -> Prompt:
    return Prompt("p", (5, 6), answer=more.pop("answer", None), metadata={"messages": [], **more})


def test_answers_are_read_from_their_field() -> None:
    one = prompt(answer="7", solution="3+4=7", extra={"whole": "four"}, empty=" ", number=7)
    assert [answer_text(one, field) for field in (None, "solution", "extra.whole", "number")] == ["7", "3+4=7", "four", "7"]
    assert [answer_text(one, field) for field in ("empty", "gone", "extra")] == [None, None, None]
    check_answers([one], "solution")
    with pytest.raises(DataError, match=r"1 of 2 training prompts have no text in the field 'solution', .* are steps, topic"):
        check_answers([one, prompt(steps="1", topic="x")], "solution")
    with pytest.raises(DataError, match="1 of 1 training prompts have no reference answer"):
        check_answers([prompt()], None)


def test_an_answer_is_tokenised_as_the_assistants_turn() -> None:
    tokenizer = tiny.build_tokenizer()
    tokens = AnswerTokens.of(Chat(tokenizer), {1})
    (one,) = tiny.World(tiny.world_recipe("clean"), *[None] * 2).prompts(1)  # type: ignore[arg-type]
    solution = tiny.right_solution(one)
    assert tiny.check(one.text, solution)
    turns = [{"role": "user", "content": one.metadata["expression"]}, {"role": "assistant", "content": solution}]
    whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert [*one.token_ids, *tokens.ids(one, solution)] == list(whole)
    with pytest.raises(DataError, match="the answer to prompt 'p' cannot be tokenised"):
        tokens.ids(prompt(), "words")


def test_the_end_of_an_answer_is_the_templates_and_nothing_follows_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    assert end_of_answer(Chat(tokenizer), {1, turn}) == 1  # a template that does not say it
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<turn>\n{% endfor %}"
    assert end_of_answer(Chat(tokenizer), {1, turn}) == turn
    assert end_of_answer(Chat(tokenizer), {1}) == 1  # one at which sampling does not stop is none
    tokens = AnswerTokens.of(Chat(tokenizer, prefill="so "), {1, turn})
    assert tokenizer.decode(tokens.ids(prompt(), "so be it")) == "be it<turn>"
    assert tokenizer.decode(tokens.ids(prompt(), "be<eos> it")) == "be<eos>"


def test_no_correction_for_answers_of_others() -> None:
    rollout = Rollout(prompt(), torch.tensor([3, 1]), torch.zeros(2), "eos", writer="data")
    scored = ScoredRollout(rollout, torch.zeros(2), torch.zeros(2))
    assert TokenBatch.collate([scored]).rollout_logprobs is None
    with pytest.raises(ValueError, match="the answer to 'p' is of the data"):
        TokenBatch.collate([scored], correct_rollouts=True)


def mixture(method: dict[str, Any], others: str, coefficient: float = 1.0) -> Mixture:
    return Mixture(make_objective(method), OF_OTHERS[others], coefficient)


def states(seed: int, count: int = 6) -> TokenStates:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(0, 9, (count,), generator=torch.Generator().manual_seed(7))
    return TokenStates(draw(count, 4).requires_grad_(), targets, draw(9, 4).requires_grad_(), temperature=0.8)


COLUMNS = {
    "old_logprobs": torch.tensor([-1.0, -2.0, -3.0, 0.0, 0.0, 0.0], dtype=torch.float64),
    "advantages": torch.tensor([0.5, -1.0, 2.0, 0.0, 0.0, 0.0], dtype=torch.float64),
    "supervised": torch.tensor([True, False, True, True, True, False]),
    "weights": torch.tensor([1.5, 1.0, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64),
    OTHERS: torch.tensor([False, False, False, True, True, True]),
}


@pytest.mark.parametrize("method", [{}, {"objective": "divergence"}])
@pytest.mark.parametrize("others", ["likelihood", "forward-kl"])
def test_the_loss_is_the_sum_of_both_over_one_denominator(method: dict[str, Any], others: str) -> None:
    made, student, teacher = mixture(method, others, 0.25), states(1), states(2)
    out = made.loss(student, COLUMNS, 4, teacher)
    logits = student.hidden @ student.weight.T / 0.8
    lp, lp_t = logits.log_softmax(-1), (teacher.hidden @ teacher.weight.T / 0.8).log_softmax(-1).detach()
    own = {name: values[:3] for name, values in COLUMNS.items() if name != OTHERS}
    mine = made.own.loss(student.take(~COLUMNS[OTHERS]), own, 4, teacher.take(~COLUMNS[OTHERS]))
    rows = torch.tensor([3, 4])
    by_hand = -lp[rows, student.targets[rows]] if others == "likelihood" else (lp_t.exp() * (lp_t - lp))[rows].sum(-1)
    torch.testing.assert_close(out.loss, mine.loss + 0.25 * by_hand.sum() / 4)
    assert out.stats.others_mean == pytest.approx(float(by_hand.detach().mean()))
    assert out.stats.as_dict() == mine.stats.as_dict()
    wanted = torch.autograd.grad(mine.loss + 0.25 * by_hand.sum() / 4, [student.hidden, student.weight])
    for found, right in zip(torch.autograd.grad(out.loss, [student.hidden, student.weight]), wanted, strict=True):
        torch.testing.assert_close(found, right)
    # The teacher's states of those tokens alone that need them, as the trainer gives them.
    taught = made.taught(COLUMNS)
    if taught.any():
        some = made.loss(student, COLUMNS, 4, teacher.take(taught))
        torch.testing.assert_close(some.loss, out.loss)


def test_a_step_in_parts_has_the_loss_and_the_statistics_of_the_whole() -> None:
    made, student = mixture({}, "likelihood"), states(1)
    whole = made.loss(student, COLUMNS, 4)
    parts = []
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        here = torch.zeros(6, dtype=torch.bool)
        here[rows] = True
        parts.append(made.loss(student.take(here), {name: values[rows] for name, values in COLUMNS.items()}, 4))
    torch.testing.assert_close(torch.stack([part.loss for part in parts]).sum(), whole.loss)
    merged = type(whole.stats).merge([part.stats.cpu() for part in parts])
    assert merged.as_dict() == pytest.approx(whole.stats.as_dict())
    assert merged.others_mean == pytest.approx(whole.stats.others_mean)


def test_log_probs_alone_are_enough_for_the_likelihood() -> None:
    made, student = mixture({}, "likelihood"), states(1)
    logprobs = (student.hidden @ student.weight.T / 0.8).log_softmax(-1).gather(1, student.targets[:, None]).squeeze(1)
    torch.testing.assert_close(made.logprobs_loss(logprobs, COLUMNS, 4).loss, made.loss(student, COLUMNS, 4).loss)
    with pytest.raises(NonFiniteError):
        made.logprobs_loss(logprobs * float("nan"), COLUMNS, 4)


def test_no_supervised_token_gives_a_loss_of_nothing_that_has_a_backward_pass() -> None:
    student = states(1)
    out = mixture({}, "likelihood").loss(student, {**COLUMNS, "supervised": torch.zeros(6, dtype=torch.bool)}, 4)
    out.loss.backward()
    assert float(out.loss.detach()) == 0
    assert student.hidden.grad is not None
    assert not student.hidden.grad.any()
