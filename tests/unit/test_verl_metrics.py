"""What a job of verl leaves behind, in a run directory like any other: steps, evaluations, checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from iwopd.cluster.verl import launch
from iwopd.cluster.verl.convert import adopt, check_ranks, newest, whole_checkpoints
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.evaluation import Validations, evaluated_tasks, judge, label
from iwopd.cluster.verl.job import VerlJob
from iwopd.cluster.verl.metrics import MetricsFile, step_stats
from iwopd.cluster.verl.stops import Received
from iwopd.cluster.verl.translate import places
from iwopd.config import Config, make_config
from iwopd.models import load_model
from iwopd.runs.directory import RunDirectory
from iwopd.runs.logs import RunError
from iwopd.tiny import build_tokenizer
from iwopd.train.checkpoint import CheckpointStore
from iwopd.train.run import run_training
from iwopd.train.state import TrainingStoppedError
from iwopd.train.tracking import Tracker
from models import save_pair

STEP: dict[str, Any] = {  # of a real job on CPU, most of verl's 130 numbers left out
    "actor/distillation/loss": 1.5847102403640747,
    "actor/grad_norm": 2.0956032276153564,
    "actor/entropy": 0.031107820570468903,
    "actor/distillation/pg_clipfrac": 0.25,
    "actor/distillation/pg_clipfrac_lower": 0.125,
    "rollout_corr/rollout_is_mean": 1.0,
    "rollout_corr/rollout_is_max": 1.000002145767212,
    "rollout_corr/rollout_is_min": 0.9999957084655762,
    "rollout_corr/rollout_is_ratio_fraction_high": 0.0,
    "response_length/mean": 64.0,
    "response_length/max": 64.0,
    "response_length/clip_ratio": 1.0,
    "iwopd/progress": 0.5,
    "iwopd/tokens": 512.0,
    "iwopd/kl/sampled": 1.2336122612289682,
    "iwopd/gap/abs_mean": 1.255641817169348,
    "iwopd/weights/mean": 1.160023962147534,
    "iwopd/weights/min": 1.0,
    "iwopd/weights/max": 1.5,
    **{f"iwopd/position/weights/{place}": 1.5 - place / 20 for place in range(10)},
    "timing_s/gen": 2.0,
    "timing_s/old_log_prob": 0.25,
    "timing_s/ref": 0.25,
    "timing_s/update_actor": 0.5,
    "timing_s/step": 4.0,
}


def _config(**more: Any) -> Config:
    return make_config({"models": {"world": "clean"}, "rollout": {"prompts_per_step": 8}, "steps": 4, **more})


def _line(step: int, **changes: Any) -> str:
    return json.dumps({"step": step, "data": {**STEP, **changes}}) + "\n"


def test_a_step_under_our_names(tmp_path: Path) -> None:
    config = _config()
    run = RunDirectory(tmp_path / "run")
    run.create(config, "data", engine="verl")
    tracker = Tracker(config, run)
    tracker.step(step_stats(config, 2, STEP))
    tracker.close()
    (record,) = run.read("metrics.jsonl")
    assert (record["step"], record["tokens"], record["rollouts"], record["skipped"]) == (2, 512, 8, False)
    assert (record["loss"], record["grad_norm"]) == (STEP["actor/distillation/loss"], STEP["actor/grad_norm"])
    assert (record["kl/sampled"], record["weights/max"]) == (STEP["iwopd/kl/sampled"], 1.5)
    assert record["position/weights"] == pytest.approx([1.5 - place / 20 for place in range(10)])
    assert record["correction/ratio_deviation"] == pytest.approx(4.2915e-6, rel=1e-3)
    assert (record["policy/clip_fraction"], record["policy/dual_clip_fraction"]) == (0.25, 0.125)
    assert (record["time/rollout"], record["time/old"], record["time/update"], record["time/other"]) == (2.0, 0.5, 0.5, 1.0)
    assert record["time/step"] == 4.0
    assert (record["tokens_written"], record["prompts"], record["rollout/stopped"]) == (512, 8, 0)
    assert record["throughput/tokens_per_second"] == 64 * 8 / 4
    assert "iwopd/progress" not in record
    assert not any(name.startswith("iwopd/") for name in record)


def test_cut_off_answers_are_counted_only_at_the_limit() -> None:
    """Verl compares with the longest answer of the batch; the world's limit is 80."""
    assert step_stats(_config(), 1, STEP).metrics["rollout/truncated"] == 0
    at_limit = {**STEP, "response_length/max": 80.0, "response_length/clip_ratio": 0.25}
    assert step_stats(_config(), 1, at_limit).metrics["rollout/truncated"] == 0.25


def test_answers_at_a_horizon_were_not_cut_off() -> None:
    fixed = _config(rollout={"prompts_per_step": 8, "horizon": {"type": "fixed", "tokens": 40}})
    at_limit = {**STEP, "response_length/max": 40.0, "response_length/clip_ratio": 0.5, "iwopd/tokens_written": 307.0}
    metrics = step_stats(fixed, 1, at_limit).metrics
    assert (metrics["rollout/truncated"], metrics["rollout/stopped"], metrics["tokens_written"]) == (0, 0.5, 307)
    growing = _config(rollout={"prompts_per_step": 8, "horizon": {"type": "growing", "from": 40}})
    assert step_stats(growing, 1, at_limit).metrics["rollout/stopped"] == 0.5
    assert step_stats(growing, 2, at_limit).metrics["rollout/stopped"] == 0  # its limit is beyond them
    last = {**at_limit, "response_length/max": 80.0}
    assert step_stats(growing, 4, last).metrics["rollout/truncated"] == 0.5


def test_an_update_that_verl_left_out() -> None:
    stats = step_stats(_config(), 1, {**STEP, "actor/grad_norm": None, "actor/distillation/loss": None})
    assert stats.skipped
    assert math.isnan(stats.loss)
    assert stats.metrics["update/skipped"] == 1


def test_numbers_that_the_plugin_should_have_made() -> None:
    without = {name: value for name, value in STEP.items() if name != "actor/distillation/loss"}
    with pytest.raises(VerlError, match=r"step 7 have no 'actor/distillation/loss': is the plugin loaded"):
        step_stats(_config(), 7, without)


def test_the_file_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert list(metrics.new()) == []  # not there yet
    path.write_text(json.dumps({"step": 0, "data": {"val-core/tiny/reward/mean@1": 0.0}}) + "\n" + _line(1) + _line(2)[:50])
    assert [step for step, _ in metrics.new()] == [1]
    with path.open("a") as file:
        file.write(_line(2)[50:] + _line(3))
    assert [step for step, _ in metrics.new()] == [2, 3]
    assert list(metrics.new()) == []


def test_answers_are_judged_by_our_checker(tmp_path: Path) -> None:
    config = _config(eval={"prompts": 3, "samples": 2})
    (task,) = evaluated_tasks(config, build_tokenizer())
    right = [f"\\boxed{{{prompt.answer}}}" for prompt in task.prompts]
    rows = [{"gts": label(task, prompt), "output": text} for prompt, text in zip(task.prompts, right, strict=True)]
    rows += [{"gts": label(task, prompt), "output": "no idea"} for prompt in task.prompts[:2]]
    rows += [{"gts": label(task, task.prompts[2]), "output": right[2]}]
    rows = [rows[place] for place in (3, 1, 5, 0, 4, 2)]  # verl sorts by its own ids
    (evaluation,) = judge([task], rows, step=2)
    assert evaluation.result.problem_ids == tuple(prompt.id for prompt in task.prompts)
    assert evaluation.result.scores.sum(-1).tolist() == [1, 1, 2]
    assert evaluation.result.step == 2

    answers = Validations([task], tmp_path)
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))  # still being written
    answers.look(2)
    assert [found.result.step for found in answers.finished(wait=True)] == [0]
    assert answers.missing() == [2]
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers.look(1)
    assert list(answers.finished(wait=True)) == []  # its step has not been reported yet
    answers.look(2)
    assert [found.result.step for found in answers.finished(wait=True)] == [2]
    answers.close()


def _saved(folder: Path, step: int, ranks: int = 2) -> Path:
    """The files of a checkpoint of verl's, without what is in them."""
    actor = folder / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    for rank in range(ranks):
        for kind in ("model", "optim", "extra_state"):
            (actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt").write_bytes(b"x")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    (actor.parent / "data.pt").write_bytes(b"x")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return actor.parent


def test_which_checkpoint_a_job_goes_on_from(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    _saved(tmp_path, 2)
    later = _saved(tmp_path, 4)
    assert newest(tmp_path) == (4, later)
    (later / "actor" / "optim_world_size_2_rank_1.pt").unlink()  # killed while saving
    assert newest(tmp_path) == (2, tmp_path / "global_step_2")
    note = tmp_path / "latest_checkpointed_iteration.txt"
    _saved(tmp_path, 6)
    note.write_text("4")  # not noted: data.pt may be half of it
    assert list(whole_checkpoints(tmp_path)) == [2]
    note.write_text("")  # the disk was full
    assert list(whole_checkpoints(tmp_path)) == [2, 6]
    check_ranks(tmp_path / "global_step_6", 2)
    with pytest.raises(VerlError, match="saved by 2 student GPUs, and now there are 3"):
        check_ranks(tmp_path / "global_step_6", 3)


def test_checkpoints_become_plain_folders(tmp_path: Path) -> None:
    config = make_config({**save_pair(tmp_path), "checkpoint": {"keep": 2}})
    run = RunDirectory(tmp_path / "run")
    run.create(config, "data", engine="verl")
    student = load_model(str(tmp_path / "student"))
    for step in (2, 4, 6):
        with torch.no_grad():
            student.lm_head.weight.add_(0.125)
        saved = _saved(tmp_path / "verl", step) / "actor" / "huggingface"
        student.save_pretrained(saved)
        wrong = {**json.loads((saved / "config.json").read_text()), "dtype": "bfloat16"}  # as verl writes it
        (saved / "config.json").write_text(json.dumps(wrong))
    assert adopt(config, run, tmp_path / "verl") == [4, 6]  # as many as are kept
    assert adopt(config, run, tmp_path / "verl") == []
    checkpoint = CheckpointStore(run.checkpoints).latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state["engine"]) == (6, "verl")
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.model_path)
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded.lm_head.weight, student.lm_head.weight)
    assert (checkpoint.model_path / "tokenizer.json").exists()
    assert "distilled" in (checkpoint.model_path / "README.md").read_text()
    assert load_file(saved / "model.safetensors").keys() == load_file(checkpoint.model_path / "model.safetensors").keys()
    (checkpoint.path / "model" / "config.json").write_text("{}")
    latest = CheckpointStore(run.checkpoints, notify=lambda _: None).latest()
    assert latest is not None
    assert latest.step == 4  # the damaged one is set aside, like any other


def test_the_local_engine_does_not_go_on_with_it(tmp_path: Path) -> None:
    config = make_config(save_pair(tmp_path))
    run = RunDirectory(tmp_path / "run")
    run.create(config, "data", engine="verl")
    assert run.engine == "verl"
    with pytest.raises(RunError, match="is trained by the verl engine: continue it with --engine verl --resume"):
        run_training(config, run.path, resume=True)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("noise\niwopd: verl 0.8 is installed\nmore noise\n", "verl 0.8 is installed"),
        (
            "Traceback\n(TaskRunner pid=1) ValueError: Total available GPUs 2\n\nSet this\n",
            "Total available GPUs 2",
        ),
        ("ray.exceptions.RayActorError: the actor died\nnoise\n", "RayActorError: the actor died"),
        (
            "x.ActorDiedError: it died.\n\tclass_name: StudentServer\n\tpid: 1\n\tname: server_0\nIt is dead.\n",
            "it died. (StudentServer server_0)",
        ),
        ("only\nnoise\n", "only\nnoise"),
    ],
)
def test_why_a_job_failed(tmp_path: Path, log: str, words: str) -> None:
    job = VerlJob(["-c", f"print({log!r}, end='')"], {}, tmp_path / "log.txt")
    job.process.wait()
    assert words in job.last_words()
    job.end()


JOB = """
import json, pathlib, sys, time
folder, step = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
(folder / "metrics-001.jsonl").write_text("".join(json.dumps({"step": n, "data": step}) + chr(10) for n in (1, 2)))
"""
"""Two steps of a job, as verl would log them."""


def _follow(tmp_path: Path, then: str, received: Received | None = None, **cluster: Any) -> tuple[int, VerlJob, RunDirectory]:
    config = _config(cluster=cluster, eval={"prompts": 0}, tracking={"console": "off"})
    run = RunDirectory(tmp_path / "run")
    run.create(config, "data", engine="verl")
    where = places(config, run.path)
    where.folder.mkdir()
    job = VerlJob(["-c", JOB + then, str(where.folder), json.dumps(STEP)], {}, where.folder / "log-001.txt")
    tracker = Tracker(config, run)
    try:
        return launch._follow(config, run, where, job, tracker, Validations([], tmp_path), received or Received(), 0), job, run
    finally:
        tracker.close()
        assert job.process.returncode is not None  # whatever happens, it has ended
        assert [record["step"] for record in run.read("metrics.jsonl")][:2] in ([1, 2], [])


def test_a_job_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError, match=r"(?s)ended after step 2: ValueError: no more.*start again") as caught:
        _follow(tmp_path, "raise ValueError('no more')")
    assert caught.value.exit_code == 1


def test_a_job_that_ends_early_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError, match="ended after step 2"):
        _follow(tmp_path, "")


def test_what_the_user_can_set_right_has_its_own_exit_code(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError, match="the plugin is not there") as caught:
        _follow(tmp_path, "print('iwopd: the plugin is not there'); sys.exit(2)")
    assert caught.value.exit_code == 2


def _without_progress(tmp_path: Path, then: str) -> None:
    """The job is given up after its two steps; for those a busy machine may need more patience."""
    for patience in (3.0, 30.0, 300.0):
        (folder := tmp_path / f"{patience:g}").mkdir()
        words = rf"no step was finished in {patience:g} s \(cluster.patience\) after step \d"
        with pytest.raises(TrainingStoppedError, match=words) as caught:
            _follow(folder, then, patience=patience)
        if "after step 2" in str(caught.value):
            return
    pytest.fail("the two steps were never seen")


def test_a_job_without_progress_is_ended(tmp_path: Path) -> None:
    ended_by_itself = tmp_path / "ended-by-itself"
    _without_progress(tmp_path, f"time.sleep(600); pathlib.Path({str(ended_by_itself)!r}).touch()")
    assert not ended_by_itself.exists()


def test_a_job_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iwopd.cluster.verl.job.GRACE", 0.5)
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    _without_progress(tmp_path, deaf)
