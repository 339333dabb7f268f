"""The doctor on real folders: healthy pairs pass, mismatched ones are refused with the remedy, before and in training."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from iwopd.cli import main
from iwopd.config import make_config
from iwopd.models import ModelSource
from iwopd.teacher.scorer import ScoringPath
from iwopd.train.assembly import assemble
from iwopd.train.doctor import check_echo, examine_models, examine_recipe, machine, own_logprobs, working
from iwopd.train.doctor.case import Member, open_case
from iwopd.train.doctor.chat import check_template
from iwopd.train.doctor.findings import Finding
from iwopd.train.doctor.identity import check_files, check_special_tokens, check_vocabularies
from iwopd.train.doctor.machine import check_packages, check_processor
from iwopd.train.doctor.resources import check_resources
from iwopd.train.doctor.working import check_sampler, known_rollouts
from iwopd.train.parts import Parts
from iwopd.types import Rollout
from mismatched import MISMATCHES, healthy, permuted_vocabulary
from models import make_model, save_pair

LINES = [
    "files",
    "vocabulary",
    "stop ids",
    "output rows",
    "thinking",
    "chat template",
    "prompt ids",
    "temperature",
    "data",
    "rendering",
]
LINES += ["context", "memory", "disk", "masks", "fused head", "sampler", "echo", "noise floor"]


def doctor(
    folder: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str], *options: str, command: str = "doctor"
) -> tuple[int, str]:
    """Exit code and what was said."""
    recipe = folder / "recipe.toml"
    recipe.write_text(tomli_w.dumps(settings))
    capsys.readouterr()  # what making the models said
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit) as end:
            main([command, str(recipe), "--out", str(folder / "run"), *options])
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out + said.err


def test_a_healthy_recipe_passes_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = doctor(tmp_path, save_pair(tmp_path), capsys)
    assert code == 0, said
    lines = re.findall(r"^(?:pass|warn|fail)  .*|^\d+ passed.*", said, re.MULTILINE)  # progress is on stderr
    assert {line[:4] for line in lines[:-1]} == {"pass"}, said
    assert lines[-1].endswith("0 warnings, 0 failed")
    checks = [line[6:20].strip() for line in lines[:-1]]
    assert set(checks) == set(LINES)
    steps = ("reading tokenizer and config of the student", "loading the models", "the student writes", "the teacher's plain")
    assert all(words in said for words in steps), said


def test_what_only_the_models_show_is_a_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = save_pair(tmp_path) | {"method": {"objective": "divergence", "support": "top-k", "k": 5000}}
    code, said = doctor(tmp_path, settings, capsys)
    assert code == 1, said
    assert re.search(r"^fail  models +method\.k is 5000, but the vocabulary has \d+ ids", said, re.MULTILINE), said
    assert re.search(r"^\d+ passed, \d+ warnings, 1 failed \(nothing more could be looked at\)$", said, re.MULTILINE), said


def test_frequencies_that_follow_the_batch_are_chosen_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pair whose RoPE transformers chooses anew for every batch: every path of the run has the same one."""
    settings = save_pair(tmp_path, student="llama", teacher="llama")
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 9.0, 20.0], "factor": 16.0}
    for name in ("student", "teacher"):
        file = tmp_path / name / "config.json"
        written = json.loads(file.read_text())
        rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16, **factors}
        file.write_text(json.dumps({**written, "rope_parameters": rope}))
    code, said = doctor(tmp_path, settings, capsys)
    assert code == 0, said
    assert "pass  rope" in said
    assert "the teacher's longrope: the long factors for all lengths, since 256 tokens exceed 16" in said
    for name, scorer in (parts := assemble(make_config(settings), print)).student_scorer.local("student").items():
        assert scorer.lm.model.model.rotary_emb.rope_type == "fixed", name
    rollouts = parts.sampler.sample(parts.order.batch(1), seed=0, step=1)
    assert len({len(rollout) for rollout in rollouts}) > 1
    together, alone = parts.teacher_scorer.score(rollouts), [parts.teacher_scorer.score([one])[0] for one in rollouts]
    torch.testing.assert_close(torch.cat(together), torch.cat(alone), atol=1e-4, rtol=0)
    written_down = torch.cat([rollout.rollout_logprobs for rollout in rollouts])
    torch.testing.assert_close(written_down, torch.cat(parts.student_scorer.score(rollouts)), atol=1e-4, rtol=0)


def test_static_loads_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = healthy(tmp_path)
    for name in ("student", "teacher"):
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    code, said = doctor(tmp_path, settings, capsys, "--static")
    assert code == 0, said
    assert "pass  memory" in said
    assert "echo" not in said
    code, said = doctor(tmp_path, settings, capsys)  # the weights are needed now, and are none
    assert code == 1
    assert "fail  models" in said


@pytest.mark.parametrize(("spoil", "message", "remedy"), MISMATCHES, ids=[item[0].__name__ for item in MISMATCHES])
def test_a_mismatch_is_refused_with_the_remedy(
    spoil: Callable[[Path, dict[str, Any]], None],
    message: str,
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = healthy(tmp_path)
    assert doctor(tmp_path, settings, capsys)[0] == 0  # nothing else is wrong with it
    spoil(tmp_path, settings)
    code, said = doctor(tmp_path, settings, capsys)
    assert code == 1
    failed = [line for line in said.splitlines() if line.startswith("fail")]
    assert any(message in line and remedy.lower() in line.lower() for line in failed), said
    code, refused = doctor(tmp_path, settings, capsys, command="train")
    assert code == 2
    assert message in refused
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_stop_token_from_the_recipe_is_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil = next(item[0] for item in MISMATCHES if item[0].__name__ == "answers_end_otherwise")
    settings = healthy(tmp_path)
    spoil(tmp_path, settings)
    code, said = doctor(tmp_path, settings, capsys, "--rollout.stop_tokens", "['<|im_end|>']")
    assert code == 0, said
    parts = assemble(make_config({**settings, "rollout": {**settings["rollout"], "stop_tokens": ["<|im_end|>"]}}), print)
    assert parts.sampler.settings.stop_ids == {1, 258}  # type: ignore[attr-defined]


def test_no_doctor_trains_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = healthy(tmp_path)
    spoil = MISMATCHES[0][0]
    spoil(tmp_path, settings)
    code, said = doctor(tmp_path, settings, capsys, "--no-doctor", command="train")
    assert code == 0, said
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_hub_that_does_not_answer_is_no_failure_of_the_static_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = healthy(tmp_path)
    settings["models"] |= {"teacher": "Nobody/no-such-model-here", "teacher_revision": "abc"}
    code, said = doctor(tmp_path, settings, capsys, "--static")
    assert code == 0, said
    assert "warn  files           the teacher Nobody/no-such-model-here@abc was not checked" in said


def findings(settings: dict[str, Any], folder: Path) -> list[Finding]:
    return list(examine_recipe(make_config(settings), folder / "run"))


def warned(settings: dict[str, Any], folder: Path) -> str:
    return "\n".join(finding.text() for finding in findings(settings, folder) if finding.level == "warn")


def test_other_templates_are_shown_as_a_diff(tmp_path: Path) -> None:
    settings = healthy(tmp_path)
    thinking = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
        "{% if not enable_thinking %}<think>\n</think>{% endif %}"
    )
    (tmp_path / "student" / "chat_template.jinja").write_text(thinking)
    said = "\n".join(finding.text() for finding in findings(settings, tmp_path))
    assert "warn  chat template   the teacher sees the student's rendering, which is not its own" in said
    assert "-'assistant: <think>'" in said
    assert "+'assistant: '" in said
    assert "pass  thinking        the student's template has a thinking mode; prompts are rendered with thinking off" in said


def test_data_that_one_would_not_train_on(tmp_path: Path) -> None:
    settings = healthy(tmp_path)
    lines = [
        {"prompt": "What is 6 * 7? The answer is 42", "answer": "42"},
        {"prompt": "Who wrote Faust? Goethe, says the key: Johann Goethe", "answer": "Johann Goethe"},
        {"prompt": "What is 1 + 1 when 2 is a number?", "answer": "2"},
        {"prompt": "  "},
        {"prompt": "Say hello."},
        {"prompt": "Say hello."},
        {"prompt": "x" * 3000},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    said = warned(settings, tmp_path)
    assert "2 of 6 prompts hold their own answer, such as '1'" in said
    assert "1 prompts are empty, such as '4'" in said
    assert "1 of 6 prompts occur more than once, such as '5'" in said
    assert "1 left out with more than 2048 tokens" in said


def test_what_the_users_settings_leave_out_is_no_surprise(tmp_path: Path) -> None:
    settings = healthy(tmp_path)
    settings["rollout"] |= {"prompts_per_step": 2}
    lines = [{"prompt": f"Say {word}.", "level": level} for word, level in (("a", 1), ("b", 2), ("b", 2), ("c", 2), ("d", 2))]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    chosen = {"source": str(tmp_path / "prompts.jsonl"), "unique": True, "filter": "level >= 2"}
    said = [finding for finding in findings({**settings, "data": {"sets": [chosen]}}, tmp_path) if finding.check == "data"]
    assert [finding.level for finding in said] == ["pass", "pass"]
    words = "3 prompts, 1 left out by its filter, 1 left out as duplicates, as `filter` and `unique = true` of the set asks"
    assert words in said[0].message


def test_too_few_prompts_for_a_step_are_not_called_wrong_data(tmp_path: Path) -> None:
    settings = healthy(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"Say {n}."}) for n in range(8)))
    settings["rollout"] |= {"prompts_per_step": 100}
    (finding,) = (finding for finding in findings(settings, tmp_path) if finding.level == "fail")
    assert finding.check == "data"
    assert finding.text().endswith("fewer than the 100 of one step: add prompts, or lower rollout.prompts_per_step to 8")


def test_ids_of_another_vocabulary_are_not_said_to_mean_the_same(tmp_path: Path) -> None:
    """One failure says that the vocabularies differ; no line compares ids that have nothing to do with each other."""
    settings = healthy(tmp_path)
    permuted_vocabulary(tmp_path, settings)
    found = findings(settings, tmp_path)
    assert {finding.check for finding in found if finding.level == "fail"} == {"vocabulary"}
    assert not [finding for finding in found if finding.check == "prompt ids"]
    assert "same meaning" not in "".join(finding.text() for finding in found)


def test_a_student_that_caps_its_logits_is_a_warning_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = save_pair(tmp_path, student="gemma2") | {"steps": 1}
    code, said = doctor(tmp_path, settings, capsys)
    assert code == 0, said
    assert "warn  fused head      the student's own logits differ from its output matrix" in said
    assert doctor(tmp_path, settings, capsys, command="train")[0] == 0


def test_settings_that_move_the_policy_are_named(tmp_path: Path) -> None:
    settings = healthy(tmp_path)
    settings["rollout"] |= {"temperature": 0.7}
    assert "scored, at temperature 0.7" in warned(settings, tmp_path)
    settings["rollout"] |= {"top_p": 0.9, "top_k": 5}
    assert "with top_p 0.9 and top_k 5 the student samples from fewer ids" in warned(settings, tmp_path)


def test_too_little_memory_or_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = healthy(tmp_path)
    monkeypatch.setattr("iwopd.train.doctor.resources.accelerators", lambda _: None)
    monkeypatch.setattr("iwopd.train.doctor.resources.main_memory", lambda: 10**6)
    monkeypatch.setattr("iwopd.train.doctor.resources.shutil.disk_usage", lambda _: type("Disk", (), {"free": 10**5}))
    failed = {finding.check: finding.text() for finding in findings(settings, tmp_path) if finding.level == "fail"}
    assert failed.keys() == {"memory", "disk"}
    assert "lower optim.token_budget" in failed["memory"].lower()
    assert "lower checkpoint.keep" in failed["disk"].lower()


def test_a_processor_that_dies_of_bfloat16_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real process each time; the one that dies does so by hand, because most machines are healthy."""
    config = make_config({**healthy(tmp_path), "precision": "bf16"})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    (finding,) = check_processor(config)
    assert finding.level in ("pass", "warn")  # as fast as the machine is
    assert re.search(r"(\d+\.\d times as long as|in \d+\.\d of) (in )?float32", finding.text())
    monkeypatch.setattr(machine, "BFLOAT16", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    (finding,) = check_processor(config)
    assert finding.level == "fail"
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in finding.text()
    assert list(check_processor(make_config(healthy(tmp_path)))) == []


def test_a_processor_without_bfloat16_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = healthy(tmp_path)
    config = make_config({**settings, "models": {**settings["models"], "teacher_dtype": "bfloat16"}, "precision": "bf16"})
    monkeypatch.setattr(machine, "BFLOAT16", "print(3.04)")
    (finding,) = check_processor(config)
    assert finding.level == "warn"
    assert "take 3.0 times as long as in float32" in finding.message
    assert "models.teacher_dtype = 'float32' and precision = 'no'" in finding.remedy
    monkeypatch.setattr(machine, "BFLOAT16", "print(0.6)")
    assert [finding.level for finding in check_processor(config)] == ["pass"]


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({**healthy(tmp_path), "lora": {"rank": 4, "quantize": "4bit"}})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = " ".join(finding.text() for finding in check_packages(config))
    assert "pip install 'iwopd[qlora]'" in said.lower()
    assert "iwopd[lora]" not in said  # it comes with the other: one command
    assert "gguf" not in said
    config = make_config({**healthy(tmp_path), "lora": {"rank": 4}})
    assert "pip install 'iwopd[lora]'" in " ".join(finding.text() for finding in check_packages(config)).lower()


def test_a_teacher_behind_a_server_needs_no_files_here(tmp_path: Path) -> None:
    case = open_case(make_config(healthy(tmp_path)), tmp_path / "run")
    served = Member("teacher", ModelSource("some-name"), problem="there is no such folder", elsewhere=True)
    for members in ({"student": case.student, "teacher": served}, {"student": case.student}):
        other = replace(case, members=members)
        found = [*check_files(other), *check_vocabularies(other), *check_special_tokens(other), *check_template(other)]
        assert "fail" not in {finding.level for finding in found}, [finding.text() for finding in found]
        memory = next(finding for finding in check_resources(other) if finding.check == "memory")
        assert "teacher" not in memory.message


# --- the echo test --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """A pair whose output matrices have rows beyond the real ids."""
    folder = tmp_path_factory.mktemp("padded")
    settings = save_pair(folder)
    make_model("qwen3", seed=1, vocab=24).save_pretrained(folder / "student")
    make_model("llama", seed=2, vocab=32).save_pretrained(folder / "teacher")
    threads = torch.get_num_threads()
    return assemble(make_config({**settings, "threads": threads}), print)


@pytest.fixture(scope="module")
def rollouts(parts: Parts) -> list[Rollout]:
    return parts.sampler.sample(parts.order.batch(1)[:3], seed=0, step=1)


class Remote:
    """The teacher's scores as some server would return them."""

    def __init__(self, parts: Parts, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        self.parts, self.change = parts, change

    def score(self, rollouts: Any) -> list[torch.Tensor]:
        return self.change(self.parts.teacher_scorer.score(rollouts))


def late(scores: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([values[1:], values[-1:]]) for values in scores]


def early(scores: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([values[:1], values[:-1]]) for values in scores]


FAULTS: dict[str, tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], str]] = {
    "late": (late, "off by one, the scores are those of the token after"),
    "early": (early, "off by one, the scores are those of the token before"),
    "short": (lambda scores: [values[1:] for values in scores], "scores of shape"),
    "lost": (lambda scores: scores[1:], "2 answers for 3 rollouts"),
    "nan": (lambda scores: [values * torch.nan for values in scores], "no log-probs"),
    "probabilities": (lambda scores: [values.exp() for values in scores], "no log-probs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_echo_test_finds_a_faulty_path(fault: str, parts: Parts, rollouts: list[Rollout]) -> None:
    change, words = FAULTS[fault]
    own = {"teacher": own_logprobs(parts.teacher_scorer.lm.model, rollouts, 1.0, 21)}  # type: ignore[attr-defined]
    paths = [ScoringPath("teacher (local)", "teacher", parts.teacher_scorer)]
    paths.append(ScoringPath("teacher (server)", "teacher", Remote(parts, change)))
    good, bad = check_echo(paths, own, rollouts)
    assert good.level == "pass", good.text()
    assert bad.level == "fail"
    assert words in bad.text()


def test_the_echo_test_finds_another_model(parts: Parts, rollouts: list[Rollout]) -> None:
    paths = [ScoringPath("teacher (server)", "teacher", parts.student_scorer)]
    own = {"teacher": own_logprobs(parts.teacher_scorer.lm.model, rollouts, 1.0, 21)}  # type: ignore[attr-defined]
    (finding,) = check_echo(paths, own, rollouts)
    assert finding.level == "fail"
    assert "another model" in finding.text()


def test_answers_in_another_order_are_told_apart_from_another_model(parts: Parts, rollouts: list[Rollout]) -> None:
    """Also where not all answers are of one length."""
    short = [replace(r, response_ids=r.response_ids[:3], rollout_logprobs=r.rollout_logprobs[:3]) for r in rollouts[:2]]
    items = [*short, rollouts[2]]
    own = {"teacher": own_logprobs(parts.teacher_scorer.lm.model, items, 1.0, 21)}  # type: ignore[attr-defined]
    exchanged = Remote(parts, lambda scores: [scores[1], scores[0], scores[2]])
    (finding,) = check_echo([ScoringPath("teacher (server)", "teacher", exchanged)], own, items)
    assert "the answers come back in another order" in finding.text()


def test_without_a_local_copy_off_by_one_is_found_and_replicas_are_compared(parts: Parts, rollouts: list[Rollout]) -> None:
    good = ScoringPath("teacher (one)", "teacher", Remote(parts, lambda scores: scores))
    twin = ScoringPath("teacher (two)", "teacher", Remote(parts, lambda scores: scores))
    wrong = ScoringPath("teacher (three)", "teacher", parts.student_scorer)
    shifted = ScoringPath("teacher (four)", "teacher", Remote(parts, late))
    assert [finding.level for finding in check_echo([good, twin, wrong], {}, rollouts)] == ["pass", "pass", "fail"]
    (finding,) = check_echo([shifted], {}, rollouts)
    assert finding.level == "fail"
    assert "off by one" in finding.text()


def test_padded_rows_are_masked_by_everybody(parts: Parts, tmp_path: Path) -> None:
    config = make_config({**save_pair(tmp_path), "threads": torch.get_num_threads()})
    found = list(examine_models(config, parts, tmp_path))
    assert {finding.level for finding in found} == {"pass"}, [finding.text() for finding in found]
    assert any("21 real ids (output rows: student 24, teacher 32)" in finding.message for finding in found)
    lm = parts.teacher_scorer.lm  # type: ignore[attr-defined]
    lm.vocab_size = None
    try:
        failed = {finding.check for finding in examine_models(config, parts, tmp_path) if finding.level == "fail"}
    finally:
        lm.vocab_size = 21
    assert failed == {"masks", "echo"}


def test_a_few_tokens_are_written_and_far_ones_among_them(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not whole answers, which may have 16,384 tokens; and a path that goes wrong at far positions only is found."""
    monkeypatch.setattr(working, "TOKENS", 6, raising=False)
    monkeypatch.setattr(working, "FAR_TOKENS", 3, raising=False)
    config = make_config({**save_pair(tmp_path), "threads": torch.get_num_threads()})
    *near, far = known_rollouts(config, parts, 1)
    assert len(near) == 2
    assert all(len(rollout) <= 6 for rollout in near)
    assert len(far) <= 3
    assert len(far.prompt.token_ids) + 3 == len(near[0].prompt.token_ids) + parts.max_response
    (good,) = check_sampler(config, parts, [*near, far])
    assert good.level == "pass"

    def forgets(scores: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*scores[:2], scores[2] - 1.0]

    own = {"teacher": own_logprobs(parts.teacher_scorer.lm.model, [*near, far], 1.0, 21)}  # type: ignore[attr-defined]
    paths = [ScoringPath("teacher (server)", "teacher", Remote(parts, change)) for change in (forgets, lambda scores: scores)]
    assert [finding.level for finding in check_echo(paths, own, [*near, far])] == ["fail", "pass"]


def test_an_engine_that_reports_other_logprobs_is_refused(parts: Parts, tmp_path: Path) -> None:
    """As one does that reports them at temperature 1 while it draws at another."""
    config = make_config({**save_pair(tmp_path), "threads": torch.get_num_threads()})
    rollouts = known_rollouts(config, parts, 1)
    (good,) = check_sampler(config, parts, rollouts)
    assert good.level == "pass"
    parts.student_scorer.lm.temperature = 0.7
    try:
        (bad,) = check_sampler(config, parts, rollouts)
    finally:
        parts.student_scorer.lm.temperature = 1.0
    assert bad.level == "fail"
    assert "at another temperature" in bad.text()
