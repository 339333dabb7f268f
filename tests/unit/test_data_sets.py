"""Training sets: field mapping, filters, the paper's two sets, files of a hub data set, and mixtures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from hub_server import COMMIT, hub_server
from iwopd.config import ConfigError, config_toml, load_config, make_config
from iwopd.data.chat import Chat
from iwopd.data.fields import parse_filter
from iwopd.data.prompts import MixedOrder, PromptOrder, load_prompts, share_out
from iwopd.data.sets import NAMED, LoadedPrompts, PromptSet, load_set, prompt_set
from iwopd.data.sources import data_files, pick_files
from iwopd.errors import UserError
from iwopd.types import Prompt
from models import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def jsonl(path: Path, *items: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def table(path: Path, *items: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(items)), path)
    return path


def deepmath(number: int, difficulty: float, question: str | None = None) -> dict[str, Any]:
    """A record with the schema of DeepMath-103K."""
    solutions = {f"r1_solution_{k}": "long " * 100 for k in (1, 2, 3)}
    question = question or f"Question {number}?"
    return {"question": question, "final_answer": str(number), "difficulty": difficulty, "topic": "Algebra", **solutions}


def eurus(number: int, ability: str) -> dict[str, Any]:
    """A record with the schema of Eurus-2-RL-Data."""
    messages = [{"role": "system", "content": "[ASSESS]"}, {"role": "user", "content": f"Task {number}"}]
    truth = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    more = {"reward_model": {"ground_truth": truth, "style": "rule"}, "extra_info": {"index": number, "split": "train"}}
    return {"data_source": "taco", "prompt": messages, "ability": ability, **more}


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_field_mapping_reads_any_names(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"uid": 7, "task": {"text": "1+1?"}, "gold": 2, "who": "math", "level": 3},
        {"uid": 8, "task": {"text": "2+2?"}, "gold": 4, "level": 1},
    ]
    mapping = {"prompt_field": "task.text", "answer_field": "gold", "id_field": "uid", "teacher_field": "who"}
    for file in (jsonl(tmp_path / "a.jsonl", *rows), table(tmp_path / "a.parquet", *rows)):
        chosen = prompt_set(str(file), **mapping, suffix=" Think.", teacher="code")
        loaded = load_set(chosen, Chat(tokenizer), 100)
        assert [(p.id, p.text, p.answer, p.teacher) for p in loaded.prompts] == [
            ("a/7", "user: 1+1? Think.\nassistant: ", "2", "math"),
            ("a/8", "user: 2+2? Think.\nassistant: ", "4", "code"),
        ]
        assert load_set(prompt_set(str(file), **mapping, filter="level >= 2"), Chat(tokenizer), 100).filtered == 1
        first = load_set(prompt_set(str(file), **mapping, keep_fields=["level"]), Chat(tokenizer), 100).prompts[0]
        assert first.metadata["messages"] == [{"role": "user", "content": "1+1?"}]
        assert first.metadata["level"] == 3


def test_the_short_form_keeps_ids_and_counts_long_prompts(tokenizer: Any, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"id": "q", "prompt": "y" * 50}, {"id": "r", "prompt": "z"})
    loaded = load_prompts(file, Chat(tokenizer), 40)
    assert [prompt.id for prompt in loaded.prompts] == ["1", "r"]
    assert loaded.too_long == 1
    assert all(tokenizer.decode(prompt.token_ids) == prompt.text for prompt in loaded.prompts)  # nothing was cut
    assert "2 prompts, 1 left out with more than 40 tokens" in loaded.summary(40)


def test_a_prompt_may_be_a_list_of_messages(tokenizer: Any, tmp_path: Path) -> None:
    file = table(tmp_path / "a.parquet", eurus(1, "code"))
    (prompt,) = load_set(prompt_set(str(file)), Chat(tokenizer), 100).prompts
    assert prompt.text == "system: [ASSESS]\nuser: Task 1\nassistant: "


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{"id": "1", "question": "x"}], {}, "row 1: needs a string 'prompt' or a list 'messages'; it has ['id', 'question']"),
        ([{"id": "1", "prompt": "x"}] * 2, {}, "row 2: the id 'a/1' occurs twice"),
        ([{"prompt": "x"}], {"filter": "level > 3"}, "the filter asks for the field 'level'; the record has ['prompt']"),
        ([{"prompt": "x", "level": "3"}], {"filter": "level > 3"}, "level = '3' (str) with 3 (int)"),
        ([{"prompt": "x", "level": 3}], {"filter": "level > 3"}, "none of 1 records meets 'level > 3'"),
        ([{"prompt": "x" * 200}], {}, "all 1 are longer than 100 tokens"),
        ([{"prompt": "x", "teacher": 3}], {}, "'teacher' must be the name of a teacher, got 3"),
        ([{"prompt": [{"role": "system", "content": "x"}]}], {"suffix": "!"}, "no user message that the suffix could follow"),
        ([{"prompt": [{"role": "user"}]}], {}, "must be a list of objects with 'role' and 'content'"),
    ],
)
def test_what_is_wrong_with_a_record_is_named(
    rows: list[Any], settings: dict[str, Any], words: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        load_set(prompt_set(str(table(tmp_path / "a.parquet", *rows)), **settings), Chat(tokenizer), 100)
    assert words in str(caught.value)
    assert "a.parquet" in str(caught.value)


def test_filters() -> None:
    item = {"difficulty": 6.0, "ability": "code", "extra": {"split": "train"}, "empty": None}

    def kept(text: str) -> bool:
        return all(condition.holds(item, "here") for condition in parse_filter(text))

    assert kept("difficulty >= 6")
    assert not kept("difficulty > 6")
    assert kept("difficulty == 6 and ability in ['code', 'math'] and extra.split != 'test'")
    assert not kept("empty <= 3")
    for text, words in [
        ("difficulty", "cannot read the filter"),
        ("ability == code", "texts need quotes"),
        ("ability in 'code'", r"'in' needs a list, e.g. ability in \['code'\]"),
        ("ability == 'code' or difficulty > 3", "conditions are joined by 'and' only"),
        ("difficulty >= __import__('os')", "not a number, quoted text or list"),
    ]:
        with pytest.raises(UserError, match=words):
            parse_filter(text)


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("topic == 'sets and logic'", [("topic", "==", "sets and logic")]),
        ("topic == 'sets and logic' and level > 3", [("topic", "==", "sets and logic"), ("level", ">", 3)]),
        ("topic in [\"this and that\", 'now or never']", [("topic", "in", ["this and that", "now or never"])]),
        ("""topic != "it's and isn't" and a == 'x'""", [("topic", "!=", "it's and isn't"), ("a", "==", "x")]),
        (r"a == 'it\'s and so' and b == '\\' and c == 1", [("a", "==", "it's and so"), ("b", "==", "\\"), ("c", "==", 1)]),
        ("a == ' and ' and b == 'and'", [("a", "==", " and "), ("b", "==", "and")]),
        ("a == 'x == 1 and y in []'and b <= 2", [("a", "==", "x == 1 and y in []"), ("b", "<=", 2)]),
        ("  a-b.c>=-1.5\n and\tandroid in[1]  ", [("a-b.c", ">=", -1.5), ("android", "in", [1])]),
    ],
)
def test_a_filter_is_not_cut_inside_quotes(text: str, conditions: list[tuple[str, str, Any]]) -> None:
    assert [(c.field, c.operator, c.value) for c in parse_filter(text)] == conditions


PIECES = st.sampled_from(["'", '"', "\\", " and ", "and", " or ", " == 1", "[", "x", "\n"])
VALUES = st.text() | st.lists(PIECES).map("".join) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
CONDITIONS = st.tuples(st.sampled_from(["a", "b.c", "d-e", "band"]), st.sampled_from(["==", "!=", ">", "<=", "in"]), VALUES)


@given(st.lists(CONDITIONS, min_size=1, max_size=4))
def test_every_filter_reads_as_it_was_written(conditions: list[tuple[str, str, Any]]) -> None:
    wanted = [(name, sign, [value] if sign == "in" else value) for name, sign, value in conditions]
    text = " and ".join(f"{name} {sign} {value!r}" for name, sign, value in wanted)
    assert [(c.field, c.operator, c.value) for c in parse_filter(text)] == wanted


@pytest.mark.parametrize(
    "text", ["", "a == 1 and", "and a == 1", "a == 1 and and b == 2", "a == 'x", "a == 'x' b == 1", "a == " + "[" * 9999]
)
def test_a_filter_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="filter"):
        parse_filter(text)


# --- the paper's sets ------------------------------------------------------------------------------------------------


def test_deepmath_in_the_hubs_layout(tokenizer: Any, tmp_path: Path) -> None:
    table(tmp_path / "data/train-00000-of-00002.parquet", deepmath(1, 5.5), deepmath(2, 6.0), deepmath(3, 9.0))
    table(tmp_path / "data/train-00001-of-00002.parquet", deepmath(4, 6.5), deepmath(5, 7.0, "Question 2?"), deepmath(6, -1.0))
    named = NAMED["deepmath"]
    loaded = load_set(prompt_set(str(tmp_path), **settings_of(named)), Chat(tokenizer), 2048)
    assert [(p.id, p.answer) for p in loaded.prompts] == [("deepmath/2", "2"), ("deepmath/3", "3"), ("deepmath/4", "4")]
    assert (loaded.filtered, loaded.duplicates, loaded.too_long) == (2, 1, 0)
    ending = "Please reason step by step, and put your final answer within \\boxed{}."
    assert loaded.prompts[0].text == f"user: Question 2?\n{ending}\nassistant: "
    assert named.source == "hub:zwhe99/DeepMath-103K"


def test_eurus_code_from_a_local_copy(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IWOPD_DATA", str(tmp_path))
    table(tmp_path / "eurus-code.parquet", eurus(1, "math"), eurus(2, "code"), eurus(3, "code"))
    loaded = load_set(prompt_set("eurus-code", teacher="coder"), Chat(tokenizer), 2048)
    assert [(p.id, p.answer, p.teacher) for p in loaded.prompts] == [
        ("eurus-code/2", None, "coder"),
        ("eurus-code/3", None, "coder"),
    ]
    assert loaded.prompts[0].text == "user: Task 2\nYou need to think first then write the Python code.\nassistant: "
    answers = load_set(prompt_set("eurus-code", answer_field="reward_model.ground_truth"), Chat(tokenizer), 2048)
    assert json.loads(str(answers.prompts[0].answer)) == {"inputs": ["1"], "outputs": ["2"]}
    with pytest.raises(UserError, match="did you mean 'eurus-code'"):
        prompt_set("eurus_code")


def settings_of(chosen: PromptSet) -> dict[str, Any]:
    """A named set's settings without its address on the hub."""
    given = {name: getattr(chosen, name) for name in ("name", "files", "prompt_field", "answer_field", "filter", "suffix")}
    return {**given, "unique": chosen.unique}


def test_large_columns_are_not_read(tmp_path: Path) -> None:
    from iwopd.data.sources import records

    file = table(tmp_path / "a.parquet", deepmath(1, 6.0))
    ((_, item),) = records(file, ["question", "difficulty"], needed=["question"])
    assert sorted(item) == ["difficulty", "question"]


# --- files of a data set ---------------------------------------------------------------------------------------------


def test_the_training_split_is_found_or_asked_for() -> None:
    shards = ["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet"]
    assert pick_files([*shards, "README.md", "data/test-00000-of-00001.parquet"], None, "x") == sorted(shards)
    assert pick_files(["train.parquet", "validation.parquet"], None, "x") == ["train.parquet"]
    assert pick_files(["only.jsonl", ".gitattributes"], None, "x") == ["only.jsonl"]
    assert pick_files(["a/train.parquet", "b/train.parquet"], "b/*", "x") == ["b/train.parquet"]
    for names in (["a.parquet", "b.parquet"], ["a/train.parquet", "b/train.parquet"], ["train.jsonl", "train.parquet"], []):
        with pytest.raises(UserError, match="x does not say which files are its training split"):
            pick_files(names, None, "x")
    with pytest.raises(UserError, match=r"matches 'c/\*'; there are: a/train.parquet"):
        pick_files(["a/train.parquet"], "c/*", "x")
    with pytest.raises(UserError, match="no file or folder org/name; a data set of the hub is written hub:org/name"):
        data_files("org/name")


def test_a_hub_data_set_over_the_hubs_own_protocol(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client against a server on this machine."""
    from huggingface_hub import constants

    root = tmp_path / "hub" / "org" / "maths"
    table(root / "data/train-00000-of-00002.parquet", deepmath(1, 7.0))
    table(root / "data/train-00001-of-00002.parquet", deepmath(2, 5.0), deepmath(3, 8.0))
    (root / "README.md").write_text("a card")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server(tmp_path / "hub") as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
        chosen = prompt_set("hub:org/maths", prompt_field="question", filter="difficulty >= 6", revision=COMMIT)
        loaded = load_set(chosen, Chat(tokenizer), 100)
        assert [prompt.id for prompt in loaded.prompts] == ["maths/1", "maths/3"]
        assert not any("README" in path for path in asked)
        assert all(f"/resolve/{COMMIT}/" in path for path in asked if path.startswith("/datasets"))  # the pin reached the hub
        assert sum("/resolve/" in path for path in asked) >= 2
        with pytest.raises(UserError, match=r"cannot list hub:org/none@main .*source = FILE"):
            load_set(prompt_set("hub:org/none"), Chat(tokenizer), 100)


# --- mixtures --------------------------------------------------------------------------------------------------------


def loaded(name: str, count: int, teacher: str | None = None) -> LoadedPrompts:
    return LoadedPrompts([Prompt(f"{name}/{k}", (k + 1,), teacher=teacher) for k in range(count)], 0, name=name)


def test_every_step_has_its_share_of_each_set() -> None:
    order = MixedOrder([(loaded("math", 100), 3), (loaded("code", 7), 1)], 16, seed=5)
    again = MixedOrder([(loaded("math", 100), 3), (loaded("code", 7), 1)], 16, seed=5)
    seen: Counter[str] = Counter()
    for step in range(1, 9):
        batch = order.batch(step)
        ids = [prompt.id for prompt in batch]
        assert Counter(id_.partition("/")[0] for id_ in ids) == {"math": 12, "code": 4}
        assert len(set(ids)) == 16
        assert [prompt.id for prompt in again.batch(step)] == ids  # a function of the step: a resumed run sees the same
        assert [id_.partition("/")[0] for id_ in ids] != ["math"] * 12 + ["code"] * 4  # mini-batches are mixed, too
        seen.update(ids)
    # 100 prompts in portions of 12: the first epoch lasts 8 steps and repeats nothing.
    assert max(count for id_, count in seen.items() if id_.startswith("math")) == 1
    # 7 prompts in portions of 4: an epoch is one step, so every step is a new shuffle of the small set.
    assert sum(count for id_, count in seen.items() if id_.startswith("code")) == 32
    assert len([id_ for id_ in seen if id_.startswith("code")]) == 7
    assert [p.id for p in MixedOrder([(loaded("math", 100), 3), (loaded("code", 7), 1)], 16, seed=6).batch(1)] != [
        p.id for p in order.batch(1)
    ]


def test_the_fingerprint_knows_sets_shares_and_teachers() -> None:
    def of(*sets: tuple[LoadedPrompts, float]) -> str:
        return MixedOrder(sets, 4, seed=0).fingerprint()

    base = of((loaded("a", 9), 1), (loaded("b", 9), 1))
    assert base == of((loaded("a", 9), 2), (loaded("b", 9), 2))
    assert base != of((loaded("a", 9), 3), (loaded("b", 9), 1))
    assert base != of((loaded("a", 9), 1), (loaded("b", 8), 1))
    assert base != of((loaded("a", 9), 1), (loaded("b", 9, teacher="t"), 1))
    prompts = loaded("a", 3).prompts
    assert PromptOrder(prompts, 1, 0).fingerprint() != PromptOrder(prompts[::-1], 1, 0).fingerprint()


def test_shares_add_up() -> None:
    assert share_out(16, [3, 1]) == [12, 4]
    assert share_out(10, [1, 1, 1]) == [4, 3, 3]
    assert share_out(7, [0.5, 0.25, 0.25]) == [3, 2, 2]
    assert sum(share_out(1024, [57046, 25276, 1])) == 1024
    with pytest.raises(UserError, match=r"'b' has weight 0\.01 and so no prompt in a step of 8"):
        MixedOrder([(loaded("a", 9), 1), (loaded("b", 9), 0.01)], 8, seed=0)
    with pytest.raises(UserError, match="'b' has 3 training prompts, fewer than the 4 of one step"):
        MixedOrder([(loaded("a", 9), 1), (loaded("b", 3), 1)], 8, seed=0)


# --- settings --------------------------------------------------------------------------------------------------------

MODELS = {"student": "s", "teacher": "t"}


def test_sets_in_a_recipe_and_back(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[models]\nstudent = "s"\nteacher = "t"\n[[data.sets]]\nsource = "deepmath"\nweight = 2\n'
        '[[data.sets]]\nsource = "x.jsonl"\nfilter = "level > 1"\nsuffix = "\\nBe brief."\nunique = false\n'
    )
    config = load_config(recipe)
    assert [(item.source, item.weight) for item in config.data.sets] == [("deepmath", 2.0), ("x.jsonl", 1.0)]
    (tmp_path / "again.toml").write_text(config_toml(config))
    assert load_config(tmp_path / "again.toml") == config
    other = load_config(recipe, {"data.sets": [{"source": "y.jsonl"}]})
    assert [item.source for item in other.data.sets] == ["y.jsonl"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sets": [{"source": "a", "fitler": "x > 1"}]}, "data.sets.0.fitler: there is no such setting; did you mean 'filter'"),
        ({"sets": [{"source": "a", "filter": "x"}]}, "data.sets.0: cannot read the filter 'x'"),
        ({"sets": [{"weight": 1}]}, "data.sets.0.source: is needed and not there"),
        ({"sets": [{"source": "a", "weight": 0}]}, "data.sets.0.weight: must be above 0"),
        ({"sets": [{"source": "a"}], "prompts": "b"}, "data.prompts is the short form: leave one of them out"),
    ],
)
def test_wrong_sets_are_answered(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"models": MODELS, "data": values})
    assert words in str(caught.value)
