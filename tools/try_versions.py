"""Try the package with another Python, or with the oldest versions that it says it works with: `make try-versions`.

    wheel --pip, constraints--> an environment of its own --> the commands of a first day, in an empty folder

`--lowest` pins every dependency to the lower end of its range in pyproject.toml. What CONTRIBUTING.md says about versions was
tried with this.

Left out: extras, whose ranges are those of their packages, and the test suite, which has exact versions (constraints.txt).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SMALL = "--rollout.prompts_per_step 4 --data.train_size 16 --eval.prompts 8 --threads 1"
COMMANDS = (
    f"train tiny/iw-opd --steps 2 {SMALL}",
    f"train tiny/kl-gated --steps 2 {SMALL}",
    "eval --model runs/iw-opd-seed0 --tasks tiny --limit 16",
    "compare runs/iw-opd-seed0 runs/kl-gated-seed0",
    "report runs",
    "export runs/iw-opd-seed0 student",
    "runs",
    "doctor tiny/iw-opd",
)
SHOWN = ("torch", "transformers", "numpy", "pydantic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter to try (default: this one)")
    parser.add_argument("--lowest", action="store_true", help="the lower end of every range, not the newest versions")
    parser.add_argument("--environment", type=Path, help="take this environment, which has the package, instead of a new one")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "versions", help="default: build/versions")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = options.environment or install(options.python, out, options.lowest)
    python = environment.absolute() / "bin" / "python"
    folder = out / f"{environment.name}-runs"
    if folder.exists():
        sys.exit(f"try_versions: {folder} is there from an earlier try; remove it")
    folder.mkdir()
    print(versions(python), flush=True)
    for command in COMMANDS:
        run(python, command, folder)
    print(f"{len(COMMANDS)} commands work with {versions(python)}")


def install(python: str, out: Path, lowest: bool) -> Path:
    """A new environment with the wheel of this tree."""
    name = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True)
    if name.returncode:
        sys.exit(f"try_versions: {python} does not run: {name.stderr.strip()}")
    environment = out / f"{name.stdout.strip()}-{'lowest' if lowest else 'newest'}"
    if environment.exists():
        sys.exit(f"try_versions: {environment} is there from an earlier try; remove it, or use it with --environment")
    wheels, pins = out / f"{environment.name}-wheel", out / f"{environment.name}.txt"
    pins.write_text("".join(f"{pin}\n" for pin in lower_ends()) if lowest else "")
    _do([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", wheels, ROOT])
    _do([python, "-m", "venv", environment])
    pip: list[str | Path] = [environment / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
    _do([*pip, "--constraint", pins, *wheels.glob("*.whl")])
    return environment


def _do(words: list[str | Path]) -> None:
    if subprocess.run(words).returncode:
        sys.exit(f"try_versions: this failed: {' '.join(map(str, words))}")


def lower_ends() -> list[str]:
    """`name==version` of every dependency, at the lower end of its range."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = []
    for need in map(Requirement, wanted):
        (low,) = (one.version for one in need.specifier if one.operator == ">=")
        found.append(f"{need.name}=={low}")
    return found


def versions(python: Path) -> str:
    ask = "import platform, sys; from importlib.metadata import version as of; import iwopd\n"
    ask += "print('Python ' + platform.python_version(), *(f'{name} {of(name)}' for name in sys.argv[1:]), sep=', ')"
    done = subprocess.run([python, "-c", ask, *SHOWN], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"try_versions: {python} has no iwopd or not all it needs: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def run(python: Path, command: str, folder: Path) -> None:
    print(f"iwopd {command}", flush=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    words = [str(python), "-m", "iwopd", *command.split()]
    done = subprocess.run(words, cwd=folder, env={**clean, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}{done.stderr[-2000:]}\ntry_versions: iwopd {command} fails with {versions(python)}")


if __name__ == "__main__":
    main()
