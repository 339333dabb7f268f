"""One training run as a curve of accuracy over seconds of training: ours, or TRL's IWOPDTrainer. time_to_accuracy.py starts it.

    python bench/accuracy_curve.py SPEC.json      # one thread; the run ends with curve.json in the spec's folder

`who` of the spec: `ours` trains and evaluates; `trl` trains in TRL's environment, without this package, saves weights and waits
while `evaluate`, in ours, gives them to our evaluation. Seconds are those of training steps alone: not of loading, evaluating,
saving or waiting.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any


class Stopwatch:
    """CPU and wall seconds, summed over the stretches between `go` and `stop`."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self.go()

    def go(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def stop(self) -> None:
        self.cpu += time.process_time() - self._began[0]
        self.wall += time.perf_counter() - self._began[1]

    def point(self, step: int, tokens: int) -> dict[str, float]:
        return {"step": step, "cpu": self.cpu, "wall": self.wall, "tokens": tokens}


def write(path: Path, content: Any) -> None:
    """Replace a file as a whole: what is there is complete."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content))
    draft.replace(path)


def accuracy(parts: Any) -> float:
    """Of the student as it is now, on the world's evaluation problems: the same prompts and noise for every run."""
    from iwopd.eval.runner import evaluate

    (task,) = parts.tasks
    sampler = parts.eval_samplers[task.name]
    return evaluate(task, lambda prompts: sampler.sample(prompts, seed=0, step=0), parts.tokenizer).result.mean


def run_ours(spec: dict[str, Any]) -> None:
    """Train with the trainer's own step; stop early after an evaluation that reaches `enough`."""
    from iwopd.config import make_config
    from iwopd.runs.directory import RunDirectory
    from iwopd.train.assembly import assemble
    from iwopd.train.loop import take_step
    from iwopd.train.state import TrainingState

    folder, steps, every = Path(spec["folder"]), spec["settings"]["steps"], spec["settings"]["eval"]["every"]
    config = make_config(spec["settings"])
    budget = config.rollout.horizon.made.tokens_per_step
    watch, state = Stopwatch(), TrainingState()
    with assemble(config, print) as parts:
        points = [watch.point(0, 0) | {"accuracy": accuracy(parts)}]
        for step in range(1, steps + 1):
            watch.go()
            state.finished(take_step(config, parts, RunDirectory(folder), step, state.prompts(budget)))
            watch.stop()
            if step % every == 0:
                points.append(watch.point(step, state.tokens_written) | {"accuracy": accuracy(parts)})
                print(json.dumps(points[-1]), flush=True)
                if points[-1]["accuracy"] >= spec["enough"]:
                    break
    write(folder / "curve.json", points)


def run_evaluate(spec: dict[str, Any]) -> None:
    """Accuracy of the weights that TRL saves, in the same student with the same sampler as in `run_ours`.

    TRL's process waits meanwhile; it is told to go on, or to stop after an evaluation that reaches `enough`.
    """
    from transformers import AutoModelForCausalLM

    from iwopd.config import make_config
    from iwopd.train.assembly import assemble

    folder, steps, every = Path(spec["folder"]), spec["settings"]["steps"], spec["settings"]["eval"]["every"]
    points = []
    with assemble(make_config(spec["settings"]), print) as parts:
        for step in range(0, steps + 1, every):
            point = json.loads(wait_for(folder / f"trained-{step}.json"))
            if step:
                trained = AutoModelForCausalLM.from_pretrained(folder / f"weights-{step}")
                parts.student.load_state_dict(trained.state_dict())
                shutil.rmtree(folder / f"weights-{step}")
            points.append(point | {"accuracy": accuracy(parts)})
            print(json.dumps(points[-1]), flush=True)
            enough = step == steps or points[-1]["accuracy"] >= spec["enough"]
            write(folder / f"verdict-{step}.json", {"stop": enough})
            if enough:
                break
    write(folder / "curve.json", points)


def wait_for(path: Path) -> str:
    """A file's text, once it is there. Sleeping takes no CPU time."""
    while not path.exists():
        time.sleep(0.1)
    return path.read_text()


def run_trl(spec: dict[str, Any]) -> None:
    """Train with TRL on the spec's rows, in their order, one micro-batch a step; wait for every evaluation."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    torch.set_num_threads(1)
    folder, every = Path(spec["folder"]), spec["settings"]["eval"]["every"]
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(spec[name], dtype=torch.float32) for name in ("student", "teacher")
    )
    tokenizer = AutoTokenizer.from_pretrained(spec["student"])
    watch, tokens = Stopwatch(), [0]

    def evaluated(step: int) -> bool:
        """Have the weights evaluated; whether it is enough."""
        if step:
            student.save_pretrained(folder / f"weights-{step}")
        write(folder / f"trained-{step}.json", watch.point(step, tokens[0]))
        stop: bool = json.loads(wait_for(folder / f"verdict-{step}.json"))["stop"]
        return stop

    class Watch(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            evaluated(0)
            watch.go()

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            watch.stop()
            if state.global_step % every == 0 and evaluated(state.global_step):
                control.should_training_stop = True
            watch.go()

    trainer = IWOPDTrainer(
        model=student,
        teacher_model=teacher,
        args=IWOPDConfig(output_dir=str(folder / "trl"), **spec["trl"]),
        train_dataset=Dataset.from_list(spec["rows"]),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer._get_train_sampler = lambda dataset=None: SequentialSampler(trainer.train_dataset)
    build = trainer._build_sequence_batch

    def counted(*arguments: Any) -> Any:
        mask, labels = build(*arguments)
        tokens[0] += int((labels != -100).sum())
        return mask, labels

    trainer._build_sequence_batch = counted
    trainer.train()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    {"ours": run_ours, "evaluate": run_evaluate, "trl": run_trl}[given["who"]](given)
