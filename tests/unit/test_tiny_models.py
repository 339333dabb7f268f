"""Recipes, schedules, untrained models and the batches of pretraining."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from iwopd.tiny import task
from iwopd.tiny.architecture import STUDENT_SIZES, TEACHER_SIZES, ModelRecipe, ModelSize, Stage, new_model
from iwopd.tiny.pretrain import IGNORED, pretrain, solution_loss, training_batches
from iwopd.tiny.tokenizer import PIECES, TOKENIZERS, build_tokenizer
from iwopd.tiny.world import WORLDS, world_recipe


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes_are_three_students_and_two_teachers_in_order() -> None:
    students = [parameters(new_model(size, "x")) for size in STUDENT_SIZES.values()]
    teachers = [parameters(new_model(size, "x")) for size in TEACHER_SIZES.values()]
    assert students == sorted(set(students))
    assert len(students) >= 3
    assert teachers == sorted(set(teachers))
    assert len(teachers) == 2
    assert students[-1] < teachers[-1]
    assert STUDENT_SIZES["medium"].hidden == 64
    assert students[list(STUDENT_SIZES).index("medium")] == 112_480
    assert teachers[-1] == 251_664


def test_new_models_depend_on_their_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    a, b, c = (new_model(ModelSize(16, 1), seed).state_dict() for seed in ("a", "a", "c"))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert abs(float(a["model.embed_tokens.weight"][1:].std()) - 0.8 / 4) < 0.03


def test_trapezoid_warms_up_holds_and_falls_to_a_twentieth() -> None:
    stage = Stage(1000, 6, 1.0, learning_rate=1.0)
    rates = [stage.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 50)
    assert set(rates[49:600]) == {1.0}
    assert rates[600:] == sorted(set(rates[600:]), reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=0.005)


def test_cosine_falls_from_the_full_rate_to_nothing() -> None:
    rates = [Stage(100, 6, 1.0, learning_rate=2.0, schedule="cosine").learning_rate_at(step) for step in range(100)]
    assert rates[0] == 2.0
    assert rates[50] == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.01
    assert rates == sorted(rates, reverse=True)


def test_a_stage_begins_with_its_shorter_expressions() -> None:
    stage = Stage(10, 8, 1.0, shorter=((3, 4), (2, 6)))
    assert [stage.operands_at(step) for step in range(10)] == [4, 4, 4, 6, 6, 8, 8, 8, 8, 8]
    shapes = [(tuple(ids.shape), targets.shape[1]) for ids, targets in training_batches(stage, random.Random(0))]
    for step, operands in ((0, 4), (3, 6), (9, 8)):
        answer = task.response_tokens(operands)
        assert shapes[step] == ((32, 2 * operands + answer), answer)


@pytest.mark.parametrize(
    "values", [{"steps": 0}, {"batch": 0}, {"right": 1.5}, {"shorter": ((5, 4), (6, 5))}], ids=lambda v: next(iter(v))
)
def test_impossible_stages_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Stage(**{"steps": 10, "operands": 6, "right": 1.0, **values})  # type: ignore[arg-type]


def test_training_rows_are_the_chat_template_with_solutions_of_training_problems() -> None:
    tokenizer = build_tokenizer()
    ids, targets = next(training_batches(Stage(1, 6, right=0.5, batch=200), random.Random(0)))
    prompt_tokens = ids.shape[1] - targets.shape[1]
    assert torch.equal(targets, ids[:, prompt_tokens:])
    kinds = []
    for row in ids.tolist():
        expression = str(tokenizer.decode(row[: prompt_tokens - 1]))
        solution = str(tokenizer.decode(row[prompt_tokens:], skip_special_tokens=True))
        messages = [{"role": "user", "content": expression}, {"role": "assistant", "content": solution}]
        assert tokenizer.encode(str(tokenizer.apply_chat_template(messages, tokenize=False))) == row
        assert task.split_of(expression) == "train"
        assert solution in (task.right_solution(expression), task.left_to_right_solution(expression))
        kinds.append(solution == task.right_solution(expression))
    assert 70 < sum(kinds) < 130


def test_line_stages_mix_within_a_solution() -> None:
    ids, targets = next(training_batches(Stage(1, 6, right=0.5, unit="line", batch=200), random.Random(0)))
    prompt_tokens, tokenizer = ids.shape[1] - targets.shape[1], build_tokenizer()
    mixed = 0
    for row in ids.tolist():
        expression = str(tokenizer.decode(row[: prompt_tokens - 1]))
        solution = str(tokenizer.decode(row[prompt_tokens:-1]))
        mixed += solution not in (task.right_solution(expression), task.left_to_right_solution(expression))
    assert mixed > 50


def test_loss_is_the_cross_entropy_of_response_tokens_only() -> None:
    model = new_model(ModelSize(16, 1), "loss")
    ids, targets = next(training_batches(Stage(1, 3, 1.0, batch=2), random.Random(0)))
    logprobs = model(input_ids=ids).logits.double().log_softmax(-1)
    terms = [-logprobs[b, t - 1, ids[b, t]] for b in range(2) for t in range(6, ids.shape[1])]
    expected = torch.stack(terms).mean().item()
    assert solution_loss(model, ids, targets).item() == pytest.approx(expected, rel=1e-5)


def test_rows_of_pieces_are_the_same_texts_and_padding_is_not_learnt() -> None:
    """Pieces differ in number: the loss of a padded batch is that of its rows one by one."""
    stage, pieces, characters = Stage(1, 6, 0.5, batch=4), build_tokenizer(PIECES), build_tokenizer()
    ids, targets = next(training_batches(stage, random.Random(0), PIECES))
    others, _ = next(training_batches(stage, random.Random(0)))
    texts = [str(pieces.decode(row, skip_special_tokens=True)) for row in ids]
    assert texts == [str(characters.decode(row, skip_special_tokens=True)) for row in others]
    model = new_model(ModelSize(16, 1), "loss", PIECES)
    terms = []
    for text in texts:
        prompt, _, solution = text.partition("?")
        front, answer = pieces.encode(prompt + "?"), [*pieces.encode(solution), pieces.eos_token_id]
        logprobs = model(input_ids=torch.tensor([front + answer])).logits[0].double().log_softmax(-1)
        terms += [-logprobs[len(front) + place - 1, i] for place, i in enumerate(answer)]
    assert len({len(pieces.encode(text)) for text in texts}) > 1  # there is padding
    assert int((targets != IGNORED).sum()) == len(terms)
    assert solution_loss(model, ids, targets).item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)


def recipe() -> ModelRecipe:
    return ModelRecipe("r", ModelSize(16, 1), (Stage(10, 6, 1.0, shorter=((2, 4),)), Stage(5, 6, 0.5, unit="line")))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_recipes_survive_json(tokenizer: str) -> None:
    one = dataclasses.replace(recipe(), tokenizer=tokenizer)
    assert ModelRecipe.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_models_that_were_cached_before_there_was_another_tokenizer_keep_their_keys() -> None:
    assert world_recipe("clean").teacher.key == "clean-teacher-strong-0-cf8d998a94838e17"
    assert world_recipe("drift", lineage=3).teacher.key == "drift-teacher-strong-3-edc1c0bfb3460bac"


def test_a_teacher_of_pieces_differs_from_the_other_in_its_tokenizer_alone() -> None:
    one, other = world_recipe("clean"), world_recipe("clean", teacher_tokenizer=PIECES)
    assert other.student == one.student
    assert dataclasses.replace(other.teacher, tokenizer=one.teacher.tokenizer) == one.teacher
    assert other.teacher.seed == one.teacher.seed
    assert other.teacher.key.startswith("clean-teacher-strong-pieces-0-")


def test_a_stage_ends_once_its_loss_on_full_lengths_is_low_enough() -> None:
    stage = Stage(100, 8, 1.0, shorter=((3, 4), (2, 6)), until=0.5)
    short, high, low = [0.0] * 5, [1.0] * 10, [0.1] * 25
    assert not stage.is_far_enough(short + low[:-1])  # a window of full lengths is wanted
    assert stage.is_far_enough(short + low)
    assert not stage.is_far_enough(short + high + low[:13])  # 12 of 25 are high
    assert stage.is_far_enough(short + high + low)
    assert not dataclasses.replace(stage, until=None).is_far_enough(short + low)


def test_pretraining_ends_with_the_stage() -> None:
    heard: list[tuple[int, int]] = []
    easy = Stage(60, 3, 1.0, batch=2, warmup=0, until=100.0)
    pretrain(
        ModelRecipe("easy", ModelSize(16, 1), (easy, Stage(4, 3, 1.0, batch=2))),
        lambda _, done, of, __: heard.append((done, of)),
    )
    assert heard == [(10, 64), (20, 64), (25, 64)]  # 25 steps, and the four of the next stage: told every ten


def test_every_field_of_a_recipe_changes_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    base = recipe()
    first = base.stages[0]
    changed = [
        dataclasses.replace(base, name="s"),
        dataclasses.replace(base, lineage=1),
        dataclasses.replace(base, tokenizer=PIECES),
        dataclasses.replace(base, size=ModelSize(24, 1)),
        dataclasses.replace(base, size=ModelSize(16, 2)),
        dataclasses.replace(base, stages=base.stages[:1]),
        dataclasses.replace(base, stages=(dataclasses.replace(first, shorter=((2, 5),)), *base.stages[1:])),
    ]
    for name, value in {"steps": 11, "operands": 7, "right": 0.9, "unit": "line", "learning_rate": 1e-3}.items():
        changed.append(dataclasses.replace(base, stages=(dataclasses.replace(first, **{name: value}), *base.stages[1:])))  # type: ignore[arg-type]
    for name, value in {"schedule": "cosine", "batch": 16, "warmup": 5, "stop": 3, "until": 0.5}.items():
        changed.append(dataclasses.replace(base, stages=(dataclasses.replace(first, **{name: value}), *base.stages[1:])))  # type: ignore[arg-type]
    keys = {base.key, *(r.key for r in changed)}
    assert len(keys) == 1 + len(changed)
    assert recipe().key == base.key
    monkeypatch.setattr("iwopd.tiny.architecture.RECIPE_VERSION", 10**6)
    assert base.key not in keys


@pytest.mark.parametrize("name", list(WORLDS))
def test_named_worlds_have_a_key_for_every_teacher_student_and_lineage(name: str) -> None:
    recipes = [
        world_recipe(name, teacher=teacher, student=student, lineage=lineage)
        for teacher in TEACHER_SIZES
        for student in STUDENT_SIZES
        for lineage in (0, 1)
    ]
    assert len({r.teacher.key for r in recipes}) == 2 * len(TEACHER_SIZES)
    assert len({r.student.key for r in recipes}) == 2 * len(STUDENT_SIZES)
    assert all(stage.operands == r.operands for r in recipes for m in (r.teacher, r.student) for stage in m.stages)


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        *(("name", "claen", "clean"), ("teacher", "storng", "strong"), ("student", "huge", "")),
        ("teacher_tokenizer", "peices", "pieces"),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(kind: str, name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r};.* choices: .*{near}"):
        world_recipe(**{kind: name})  # type: ignore[arg-type]
