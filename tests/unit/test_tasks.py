"""Tasks: where their problems come from, how they are rendered, and what is said when something is wrong with them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from iwopd.config import make_config
from iwopd.data.sources import Hub, Release, records
from iwopd.errors import UserError
from iwopd.eval.catalog import MATH_SUFFIX, TASKS, find_task, load_task
from iwopd.eval.checkers import exact_checker, math_checker
from iwopd.eval.problems import TaskError
from iwopd.tiny import build_tokenizer
from iwopd.train.prompts import load_tasks
from iwopd.types import Prompt
from models import byte_tokenizer
from shared_data import shared


def write(path: Path, *items: Any) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
    return path


GOOD = {"id": "p/1", "problem": "What is 1+1?", "answer": "2"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def test_every_named_task_is_there() -> None:
    names = {"aime24", "aime25", "hmmt25", "math500", "gsm8k", "humaneval+", "mbpp+", "tiny"}
    assert names <= TASKS.keys()
    for name in ("aime24", "aime25", "hmmt25"):
        assert (TASKS[name].samples, TASKS[name].temperature) == (32, 1.0)  # the paper's mean@32
    for name in ("humaneval+", "mbpp+"):
        assert TASKS[name].temperature == 0.0  # greedy, as in the paper


def test_a_math_prompt_ends_with_the_papers_words(tokenizer: Any, tmp_path: Path) -> None:
    task = load_task(find_task("aime25"), tokenizer, data=write(tmp_path / "a.jsonl", GOOD))
    (prompt,) = task.prompts
    assert prompt.text == f"user: What is 1+1?{MATH_SUFFIX}\nassistant: "
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert (prompt.id, prompt.answer) == ("p/1", "2")
    assert MATH_SUFFIX.endswith("Please reason step by step, and put your final answer within \\boxed{}.")


@pytest.mark.parametrize(("name", "file", "count"), [("aime24", "aime24.jsonl", 30), ("gsm8k", "gsm8k_test.jsonl", 1319)])
def test_real_math_files(name: str, file: str, count: int, tokenizer: Any) -> None:
    task = load_task(find_task(name), tokenizer, data=shared(file))
    assert len(task.prompts) == count
    assert all(prompt.answer and "####" not in prompt.answer for prompt in task.prompts)


@pytest.mark.parametrize(
    ("name", "file", "count"), [("humaneval+", "HumanEvalPlus.jsonl", 164), ("mbpp+", "MbppPlus.jsonl", 378)]
)
def test_real_code_files(name: str, file: str, count: int, tokenizer: Any) -> None:
    task = load_task(find_task(name), tokenizer, data=shared(file))
    assert len(task.prompts) == count
    assert all("```python" in prompt.text for prompt in task.prompts)


def test_gsm8k_as_the_hub_has_it(tokenizer: Any, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"question": "2+3?", "answer": "We add.\n#### 5"}, {"question": "1+1?", "answer": "#### 1,000"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    task = load_task(find_task("gsm8k"), tokenizer, data=tmp_path / "test.parquet")
    assert [(prompt.id, prompt.answer) for prompt in task.prompts] == [("gsm8k/0", "5"), ("gsm8k/1", "1,000")]


def test_a_folder_of_files_comes_before_the_network(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IWOPD_DATA", str(tmp_path))
    write(tmp_path / "hmmt25.jsonl", {"problem_idx": 7, "problem": "x", "answer": 12})
    (prompt,) = load_task(find_task("hmmt25"), tokenizer).prompts
    assert (prompt.id, prompt.answer) == ("7", "12")


def test_limit_takes_the_first_problems(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", *({**GOOD, "id": str(i)} for i in range(9)), "this line is never read")
    assert [prompt.id for prompt in load_task(find_task("aime24"), tokenizer, data=data, limit=3).prompts] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([GOOD, {"id": "2", "answer": "3"}], "line 2: needs a string 'problem'; it has the fields answer, id"),
        ([GOOD, {"id": "2", "problem": "x", "answer": None}], "line 2: needs a string 'answer'"),
        ([GOOD, {"id": "2", "problem": " ", "answer": "1"}], "line 2: the problem is empty"),
        ([GOOD, {**GOOD}], "line 2: the id 'p/1' occurs twice"),
        ([GOOD, "{not json"], "line 2 is not JSON"),
        ([GOOD, "[1]"], "line 2: expected an object, got list"),
        ([], "has no problems"),
    ],
)
def test_wrong_schema_names_line_and_field(lines: list[Any], words: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_task(find_task("aime24"), tokenizer, data=write(tmp_path / "bad.jsonl", *lines))
    assert words in str(caught.value)
    assert "bad.jsonl" in str(caught.value)


def test_bad_files(tokenizer: Any, tmp_path: Path) -> None:
    spec = find_task("aime24")
    with pytest.raises(UserError, match=r"no data file .*nowhere\.jsonl"):
        load_task(spec, tokenizer, data=tmp_path / "nowhere.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"problem": "\xe9", "answer": "1"}\n')
    with pytest.raises(UserError, match="not UTF-8"):
        load_task(spec, tokenizer, data=tmp_path / "latin.jsonl")
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="as parquet"):
        load_task(spec, tokenizer, data=tmp_path / "x.parquet")


def test_a_model_without_chat_template(tmp_path: Path) -> None:
    plain = byte_tokenizer(chat=False)
    data = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(UserError, match=r"no chat template.*--no-chat"):
        load_task(find_task("aime24"), plain, data=data)
    (prompt,) = load_task(find_task("aime24"), plain, data=data, chat=False).prompts
    assert prompt.text == "What is 1+1?" + MATH_SUFFIX


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        find_task("gsm8")
    with pytest.raises(UserError, match=r"no task file nowhere\.toml"):
        find_task("nowhere.toml")


def test_a_task_of_ones_own(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl", {"uid": 5, "question": "Say hi", "target": "hi"})
    toml = tmp_path / "mine.toml"
    toml.write_text(
        'checker = "exact"\nfile = "mine.jsonl"\nproblem = "question"\nanswer = "target"\n'
        'id = "uid"\nsuffix = "!"\nsamples = 4\n'
    )
    task = load_task(find_task(str(toml)), tokenizer)
    assert (task.name, task.samples, task.prompts[0].text) == ("mine", 4, "user: Say hi!\nassistant: ")
    assert [v.status for v in task.check([task.prompts[0]] * 2, [" hi\n", "ho"])] == ["correct", "wrong"]
    for text, words in [
        ('cheker = "math"', "unknown key 'cheker'; did you mean 'checker'"),
        ('checker = "maths"', "mine.toml: unknown checker 'maths'; did you mean 'math'"),
        ('checker = "poetry"', "unknown checker 'poetry'; choices: math, exact, code, tiny"),
        ("samples = true", "samples must be a int"),
        ('hub = "a/b"', "hub_file must name"),
        ("= 3", "cannot read the task file"),
    ]:
        toml.write_text(text)
        with pytest.raises(UserError, match=words.replace("(", r"\(")):
            find_task(str(toml))


def test_data_that_no_task_would_read_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(UserError, match=r"task 'tiny-drift' makes its own problems: leave its data file .*a\.jsonl out"):
        load_task(find_task("tiny-drift"), build_tokenizer(), data=data)
    config = make_config({"models": {"world": "clean"}, "eval": {"tasks": ["aime24"], "data": {"aime25": str(data)}}})
    with pytest.raises(UserError, match=r"eval\.data names 'aime25', which is not among eval\.tasks \(aime24\)"):
        load_tasks(config, None, tokenizer, 10)


def test_votes_of_the_math_checker() -> None:
    """All right answers vote for one class; wrong ones for what they say; no answer casts no vote."""
    prompt = Prompt("p", (1,), answer="\\frac{1}{2}")
    texts = ["\\boxed{0.5}", "\\boxed{\\frac{2}{4}}", "\\boxed{ 3 }", "I give up"]
    verdicts = math_checker([prompt] * 4, texts)
    assert [v.score for v in verdicts] == [1.0, 1.0, 0.0, 0.0]
    assert [v.answer for v in verdicts] == ["\\frac{1}{2}", "\\frac{1}{2}", "3", None]
    assert [v.status for v in verdicts] == ["correct", "correct", "wrong", "unparsed"]


def test_the_exact_checker_ignores_white_space_only() -> None:
    prompt = Prompt("p", (1,), answer="a b")
    assert [v.score for v in exact_checker([prompt] * 3, ["a  b\n", "ab", ""])] == [1.0, 0.0, 0.0]


def test_a_released_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a file address here: the network is closed in tests."""
    import gzip

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "Released.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"a": 1}\n'))
    release = Release(source.as_uri())
    first = release.fetch()
    assert [item for _, item in records(first)] == [{"a": 1}]
    source.unlink()
    assert release.fetch() == first
    with pytest.raises(UserError, match="--data TASK=FILE"):
        Release((tmp_path / "gone.jsonl.gz").as_uri()).fetch()
    assert not list(first.parent.glob("*.part"))


def test_a_released_file_with_other_content_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "Released.jsonl"
    source.write_bytes(b'{"a": 1}\n')
    release = Release(source.as_uri(), hashlib.sha256(source.read_bytes()).hexdigest())
    kept = release.fetch()
    kept.write_bytes(b'{"a": 2}\n')
    with pytest.raises(UserError, match=r"Released.jsonl, once loaded from .* has SHA-256 .*Delete it and try again"):
        release.fetch()
    kept.unlink()
    source.write_bytes(b'{"a": 3}\n')
    with pytest.raises(UserError, match=r"has SHA-256 .*somebody changed it"):
        release.fetch()
    assert list(kept.parent.iterdir()) == []


def test_every_file_that_we_name_by_address_has_a_hash() -> None:
    sources = {name: TASKS[name].source for name in TASKS}
    released = {name: source for name, source in sources.items() if isinstance(source, Release)}
    assert released.keys() == {"humaneval+", "mbpp+"}
    assert all(re.fullmatch(r"[0-9a-f]{64}", str(source.sha256)) for source in released.values())


@pytest.mark.parametrize("given", ["abc", 5])
def test_a_task_can_name_the_hash_of_its_file(tmp_path: Path, given: Any) -> None:
    task = {"checker": "exact", "hub": "org/name", "hub_file": "test.jsonl"}
    path = tmp_path / "own.toml"
    path.write_text(tomli_w.dumps({**task, "sha256": "0" * 64}))
    source = find_task(str(path)).source
    assert isinstance(source, Hub)
    assert source.sha256 == "0" * 64
    path.write_text(tomli_w.dumps({**task, "sha256": given}))
    with pytest.raises(TaskError, match="sha256 is that of the file on the hub"):
        find_task(str(path))
