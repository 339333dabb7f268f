"""The same recipe on the local engine and on verl, from the same start: do the first steps agree within sampling noise?

    python bench/engines.py                          # a quarter of an hour on two cores, no GPU (verl's testing platform)
    python bench/engines.py --runs DIR               # keep the runs there; what is there already is not run again
    python bench/engines.py --figure docs/figures/engines.png

World `clean`, IW-OPD, 64 prompts a step. The local engine runs with several seeds: other prompts, other samples; their spread
is the noise. verl runs with some of these seeds: the same prompts as the local run of that seed, other samples. If both do the
same, a run of verl is one more draw from the local runs: at each step its deviation from their mean, in units of the spread
that a new draw has, is a t statistic. Printed: the curves, these deviations, and a paired comparison with the local run of the
same seed. Exit code 1 if the mean over the steps of a run of verl lies outside the 99.9 % interval of a new local run, in any
of the metrics, or if more single steps than 1 in 20 lie outside their 99 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "src" / "iwopd" / "recipes" / "tiny" / "iw-opd.toml"
METRICS = {"loss": "loss", "gap/abs_mean": "mean |gap|", "kl/sampled": "KL (sampled)", "grad_norm": "gradient norm"}
"""Names in metrics.jsonl and how the figure calls them."""
Curves = dict[int, dict[str, list[float]]]
"""By seed and metric: one number a step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=8, help="local runs")
    parser.add_argument("--verl-seeds", type=int, default=2, help="runs on verl, with the first of these seeds")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: a temporary one)")
    parser.add_argument("--figure", type=Path, help="draw the curves into this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.runs or Path(temporary)
        local = {seed: run("local", seed, options.steps, folder) for seed in range(options.seeds)}
        verl = {seed: run("verl", seed, options.steps, folder) for seed in range(options.verl_seeds)}
    agree = compare(local, verl)
    if options.figure:
        draw(local, verl, options.figure)
    return 0 if agree else 1


def run(engine: str, seed: int, steps: int, folder: Path) -> dict[str, list[float]]:
    """One run of the recipe; its curves."""
    target = (folder / f"{engine}-{seed}").absolute()
    metrics = target / "metrics.jsonl"
    if not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        command = [sys.executable, "-m", "iwopd", "train", str(RECIPE), "--out", str(target), "--steps", str(steps)]
        command += ["--seed", str(seed), "--threads", "1", "--eval.every", "1000", "--eval.prompts", "0"]
        command += ["--tracking.console", "off", "--checkpoint.every", str(steps)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        if engine == "verl":
            sys.path.append(str(ROOT / "tests"))
            import verl_testing

            variables |= verl_testing.environment()
            command += ["--engine", "verl", "--cluster.gpus_per_node", "3", "--cluster.teacher_gpus", "1"]
            command += ["--engine.vllm.tensor_parallel", "2"]
        print(f"running {target.name}", flush=True)
        subprocess.run(command, env=variables, check=True)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {name: [float(line[name]) for line in lines] for name in METRICS}


def compare(local: Curves, verl: Curves) -> bool:
    """Print curves and deviations; whether they agree."""
    from scipy import stats

    count = len(local)
    new_draw = (1 + 1 / count) ** 0.5  # a new run deviates from the mean of n by its own noise and the mean's
    critical, single = (float(stats.t.ppf(1 - share / 2, count - 1)) for share in (0.001, 0.01))
    agree, outside, looked_at = True, 0, 0
    for name in METRICS:
        print(f"\n{name} by step (local: mean ± standard deviation of {count} runs; verl: value, deviation)")
        columns = list(zip(*(curves[name] for curves in local.values()), strict=True))
        deviations: Mapping[int, list[float]] = {seed: [] for seed in verl}
        for step, values in enumerate(columns, start=1):
            mean, spread = statistics.mean(values), statistics.stdev(values)
            line = f"  {step:3d}  {mean:8.4f} ± {spread:.4f}"
            for seed, curves in verl.items():
                value = curves[name][step - 1]
                deviations[seed].append((value - mean) / (spread * new_draw))
                line += f"   {value:8.4f} {deviations[seed][-1]:+5.2f}"
            print(line)
        means = [statistics.mean(curves[name]) for curves in local.values()]
        for seed, curves in verl.items():
            mean = statistics.mean(curves[name])
            whole = (mean - statistics.mean(means)) / (statistics.stdev(means) * new_draw)
            pairs = [ours - theirs for ours, theirs in zip(curves[name], local[seed][name], strict=True)]
            inside = abs(whole) <= critical
            agree &= inside
            outside += sum(abs(deviation) > single for deviation in deviations[seed])
            looked_at += len(deviations[seed])
            print(
                f"  seed {seed}: mean over the steps {mean:.4f} against {statistics.mean(means):.4f}, deviation {whole:+.2f} "
                f"({'inside' if inside else 'OUTSIDE'} ±{critical:.2f}); minus the local run of the seed: "
                f"{statistics.mean(pairs):+.4f} ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.4f}"
            )
    print(f"\n{outside} of {looked_at} single steps lie outside their 99 % interval (±{single:.2f})")
    agree &= outside <= looked_at / 20
    print("the engines agree within sampling noise" if agree else "the engines DISAGREE")
    return agree


def draw(local: Curves, verl: Curves, path: Path) -> None:
    """Local runs as a band of mean and two standard deviations, verl's as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown: Sequence[str] = ("loss", "gap/abs_mean", "grad_norm")
    figure, axes = plt.subplots(1, len(shown), figsize=(10, 3), constrained_layout=True)
    for axis, name in zip(axes, shown, strict=True):
        columns = list(zip(*(curves[name] for curves in local.values()), strict=True))
        steps = range(1, len(columns) + 1)
        mean = [statistics.mean(values) for values in columns]
        spread = [2 * statistics.stdev(values) for values in columns]
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, low, high, color="#c9d6e8", label=f"local, {len(local)} seeds: mean ± 2 sd")
        axis.plot(steps, mean, color="#34568b", linewidth=1)
        for seed, curves in verl.items():
            axis.plot(
                steps,
                curves[name],
                "o-",
                markersize=3,
                linewidth=1,
                color=("#d1495b", "#edae49")[seed % 2],
                label=f"verl, seed {seed}",
            )
        axis.set_title(METRICS[name], fontsize=10)
        axis.set_xlabel("step")
    axes[0].legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
