"""What a new user gets wrong: every answer is one readable sentence and exit code 2, never a traceback."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from iwopd import cli, hub
from iwopd.commands.methods import _toml
from iwopd.config import ConfigError, load_config, make_config
from iwopd.data.chat import ChatError, encode
from iwopd.devices import DeviceError, check_device
from iwopd.methods import catalogue
from iwopd.models import ModelError, ModelSource, load_configs, load_tokenizer
from iwopd.runs.directory import RunDirectory
from iwopd.runs.logs import RunError
from iwopd.tiny import build_tokenizer
from iwopd.train.doctor import examine_recipe
from iwopd.train.doctor.findings import DoctorError, failure, refuse, warning
from models import save_pair

RECIPES = Path(__file__).parents[2] / "src" / "iwopd" / "recipes"
PAPER = next(RECIPES.glob("paper/qwen3-0.6b-from-qwen3-30b-a3b*-iw-opd-math.toml"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a newcomer leaves it."""
    folder = tmp_path_factory.mktemp("newcomer")
    texts = {
        "empty.toml": "",
        "broken.toml": "steps = = 1",
        "section.toml": 'models = "clean"',
        "pair.toml": '[models]\nstudent = "models/student"\nteacher = "models/teacher"\n[data]\nprompts = "p.jsonl"\n'
        "[rollout]\nmax_tokens = 16\n",
        "world.toml": '[models]\nworld = "clean"\n',
        "x.txt": "not JSON",
        "tests.json": "[[[1, 2], 3]]",
        "program.py": "def add(a, b): return a + b",
        "run/run.json": '{"format": 1}',
        "models/student/notes.txt": "",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "folder").mkdir()
    return folder


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that does not answer, and the questions that it was asked."""
    asked: list[str] = []

    class Session:
        def head(self, url: str, **_: object) -> None:
            asked.append(url)
            raise OSError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils.get_session", Session)
    hub.silence.cache_clear()
    yield asked
    hub.silence.cache_clear()


BAD: list[tuple[str, str]] = [
    ("train empty.toml", "give models.world, or both models.student and models.teacher"),
    ("train broken.toml", "broken.toml is not TOML"),
    ("train binary.toml", "not text in UTF-8"),
    ("train section.toml", "'models' is a section, not a setting"),
    ("train folder", "is a folder, and neither a recipe nor a run directory"),
    ("train runs/nothing --resume", "there is no run to resume: runs/nothing does not exist"),
    ("train folder --resume", "folder is not a run directory"),
    ("train run --resume", "there is no run/config.toml"),
    ("train pair.toml --steps many", 'steps: must be a whole number (given: "many")'),
    ("train pair.toml --steps 1.5", "steps: must be a whole number"),
    ("train pair.toml --steps -1", "steps: must be at least 1 (given: -1)"),
    ("train pair.toml --seed 99999999999", "seed: must be below 4294967296"),
    ("train pair.toml --optim.lr nan", "optim.lr: must be a finite number"),
    ("train pair.toml --optim.lr ''", "optim.lr: must be a number"),
    ("train pair.toml --optim.shard maybe", "optim.shard: must be true or false"),
    ("train pair.toml --optim.betas 3", "optim.betas: must be a list of numbers"),
    ("train pair.toml --rollout.top_p 3", "rollout.top_p: must be at most 1 (given: 3)"),
    ("train pair.toml --rollout.thinking mak", "did you mean 'mask'?"),
    ("train pair.toml --rollout.stop_tokens foo", "rollout.stop_tokens: must be a list, such as ['a', 'b']"),
    ("train pair.toml --method.params 3", "params: must be a table of names and values"),
    ("train pair.toml --method.weights survival --method.params '{tau = true}'", "tau must be a number, got True"),
    ("train pair.toml --rollout.horizon.type fixed --rollout.horizon.tokens x", "tokens: must be a whole number"),
    ("train pair.toml --models.student", "--models.student needs a value"),
    ("train tiny/opd --device cuda", "iwopd: tiny/opd: unknown setting 'device'; training takes the accelerator"),
    ("train tiny/opd --every 3", "did you mean 'eval.every' or 'checkpoint.every'?"),
    ("train pair.toml --models.student '' --models.teacher ''", "give models.world, or both"),
    ("train world.toml --models.world cleen", "did you mean 'clean'?"),
    ("train pair.toml --models.student ./models/studnt", "there is no such folder (did you mean models/student?)"),
    ("train pair.toml --models.student models/student", "it is not the folder of a model"),
    ("train pair.toml --models.student x.txt", "it is a file, not a folder"),
    ("train pair.toml --out x.txt", "x.txt is not a folder that you can write to"),
    ("doctor world.toml --ranks 0", "--ranks is 0"),
    ("plan world.toml --nodes 99999999", "a plan is made for at most"),
    ("plan world.toml --price nan", "--price is nan"),
    ("eval --model '' --tasks tiny", "no model is named"),
    ("eval --model run --tasks tiny", "there is no run/config.toml"),
    ("eval --model folder --tasks tiny", "it is not the folder of a model"),
    ("eval --model folder --tasks tiny,tiny", "names 'tiny' twice"),
    ("eval --model folder --tasks tiny --device cdua", "--device is 'cdua', which is no device"),
    ("eval --model folder --tasks tiny --temperature nan", "--temperature must be at least 0"),
    ("eval --model folder --tasks tiny --temperature inf", "--temperature must be at least 0"),
    ("eval --model folder --tasks tiny --top-p 0", "--top-p must be above 0"),
    ("eval --model folder --tasks tiny --top-k -1", "--top-k must be at least 0"),
    ("eval --model folder --tasks tiny --max-tokens 0", "--max-tokens must be at least 1"),
    ("eval --model folder --tasks tiny --seed -1", "--seed must be at least 0"),
    ("compare run run", "run was never evaluated"),
    ("probe --world clean --bins 99999999", "--bins must be at most 1000"),
    ("probe --world clean --lineage -1", "--lineage must be at least 0"),
    ("probe --world clean -o folder", "folder is a folder: name a file"),
    ("probe --world clean -o x.txt/probe.json", "x.txt is a file, not a folder"),
    ("report run --probe nowhere", "--probe nowhere: there is no such file"),
    ("report run --handoff nowhere.json", "--handoff nowhere.json: there is no such file"),
    ("reproduce p1 --read-only --results x.txt", "--results x.txt is a file"),
    ("serve-teacher folder --threads 0", "--threads must be at least 1"),
    ("serve-teacher folder --token-budget 0", "--token-budget must be at least 1"),
    ("serve-teacher folder --max-length -1", "--max-length must be at least 1"),
    ("check-math a 3 --timeout inf", "--timeout must be a positive number"),
    ("check-code program.py add tests.json --atol nan", "--atol must be a number"),
    ("demo --lineage -1", "--lineage must be at least 0"),
    ("demo --out x.txt", "x.txt: Not a directory"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_answered_in_a_sentence(
    line: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(line))
    answer = capsys.readouterr().err
    assert ended.value.code == 2
    assert re.search(r"^iwopd: ", answer, re.MULTILINE)  # a run is announced first
    assert said in answer
    assert "Input should" not in answer
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    "line",
    [
        "train world.toml --out ''",
        "demo --out ' '",
        "eval --model m --tasks tiny --out ''",
        "report run -o ''",
        "export run ''",
    ],
)
def test_an_empty_name_is_not_the_folder_one_is_in(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(line))
    assert ended.value.code == 2
    assert "the name is empty: name a file or folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_here() -> None:
    with pytest.raises(DeviceError, match=r"--device is 'cuda', but torch .* finds no such device here: use cpu"):
        check_device("cuda", "--device")
    check_device("cpu", "--device")


def test_letters_that_the_tokenizer_does_not_know() -> None:
    with pytest.raises(ChatError, match=r"cannot encode the letter 'h' .*take it out"):
        encode(build_tokenizer(), "1+2 hello".replace(" ", ""))


def test_a_silent_hub_is_asked_once_and_the_mistyped_folder_comes_first(
    nobody: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for load in (load_configs, load_tokenizer):
        with pytest.raises(ModelError) as refused:
            load("models/studnt")
        words = str(refused.value)
        assert "models/studnt is not a folder here (did you mean models/student?), and the hub cannot be asked" in words
        assert "Name or service not known" in words
    assert len(nobody) == 1
    assert constants.HF_HUB_OFFLINE  # the cache is used without further questions


def test_what_is_a_hub_id(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    ids = {
        "Qwen/Qwen3-0.6B": True,
        "gpt2": True,
        "models/student": False,
        "./a/b": False,
        "a/b/c": False,
        "/a": False,
        "": False,
    }
    assert {path: ModelSource.of(path).is_hub_id for path in ids} == ids
    assert ModelSource.of("owner/name/file.gguf").is_hub_id
    assert not ModelSource.of("nowhere/file.gguf").is_hub_id


def test_a_refusal_shows_the_warning_that_explains_it() -> None:
    found = [warning("files", "the student was not checked", "reach the hub"), failure("context", "no room", "lower it")]
    with pytest.raises(DoctorError) as refused:
        refuse(found)
    assert "the student was not checked" in str(refused.value)
    assert "--no-doctor trains all the same" in str(refused.value)
    with pytest.raises(DoctorError) as refused:
        refuse([failure("files", "no such folder", "correct it")])
    assert "--no-doctor" not in str(refused.value)
    refuse(found[:1])


@pytest.mark.parametrize(("more", "extra"), [({}, "lora"), ({"quantize": "4bit"}, "qlora")])
def test_a_missing_extra_is_answered_with_one_command(
    more: dict[str, str], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("peft", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    config = make_config({**save_pair(tmp_path), "lora": {"rank": 2, **more}})
    said = "\n".join(finding.text() for finding in examine_recipe(config, tmp_path / "run", static=True))
    assert re.findall(r"pip install '(.*?)'", said) == [f"iwopd[{extra}]"]


def test_settings_can_be_emptied() -> None:
    from iwopd.commands.options import parse_overrides

    given = parse_overrides(["--models.world", "", "--models.student=2024", "--models.teacher", "b", "--data.prompts", "p"])
    config = load_config(RECIPES / "tiny" / "opd.toml", given)
    assert (config.models.world, config.models.student) == (None, "2024")
    emptied = load_config(None, {**given, **parse_overrides(["--rollout.stop_tokens=", "--teacher.system="])})
    assert emptied.rollout.stop_tokens == []
    assert emptied.teacher.system is None
    with pytest.raises(ConfigError, match=r"unknown setting 'optim\.lrr'"):
        load_config(None, parse_overrides(["--optim.lrr", ""]))


def test_methods_are_printed_as_toml() -> None:
    for one in catalogue()["methods"]:
        printed = _toml(one["method"], "\n")
        assert tomllib.loads(printed) == one["method"]
        assert "'" not in printed


def test_a_run_without_a_step_does_not_block_its_correction(tmp_path: Path) -> None:
    folder, config = tmp_path / "run", make_config({"models": {"world": "clean"}})
    RunDirectory(folder).create(config, "data")
    (folder / "evals.jsonl").write_text('{"step": 0}\n')
    again = RunDirectory(folder)
    assert "finished no step: it is begun anew" in again.check_free()
    again.create(make_config({"models": {"world": "clean"}, "seed": 3}), "data")
    assert RunDirectory(folder).config().seed == 3
    assert not (folder / "evals.jsonl").exists()
    late = RunDirectory(folder)  # it never looked: somebody else's
    with pytest.raises(RunError, match="holds a run already"):
        late.create(config, "data")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(RunError, match="holds a run already: continue it with --resume"):
        RunDirectory(folder).check_free()


def test_plan_and_launcher_take_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """61 GB of weights and their cache in 80 % of 80 GB: no. Without a word the plan chooses 2 GPUs for a copy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def said(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([words[0], str(PAPER), *words[1:], "--nodes", "4"])
        return ended.value.code, *capsys.readouterr()

    code, out, _ = said("plan", "--cluster.teacher_tensor_parallel", "1")
    assert code == 1
    assert "copies of 1)" in out
    assert "Will it fit? No. teacher: 64.9 GB needed, 64.0 GB there" in out
    assert "it fits with --cluster.teacher_tensor_parallel 2" in out
    code, out, _ = said("plan")
    assert (code, "--cluster.teacher_tensor_parallel 2" in out) == (0, True)

    code, out, err = said("train", "--engine", "verl", "--dry-run")
    assert code == 0
    assert out.startswith("RAY_ADDRESS=auto ")
    assert "4 machines need a Ray cluster" in err
    assert "has no train.parquet and val.parquet yet" in err
    assert torch.cuda.is_available() or "teacher: 64.9 GB needed (weights 61.1" in err
    _, out, err = said(
        "train", "--engine", "verl", "--dry-run", "--cluster.teacher_tensor_parallel", "2", "--ray-address", "h:1"
    )
    assert out.startswith("RAY_ADDRESS=h:1 ")
    assert "GB needed" not in err
    assert "Ray cluster" not in err
