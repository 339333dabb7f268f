"""The list of what we use of verl is complete, holds for the installed version, and shows what another version changes."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iwopd.cluster.verl import params, reaches
from iwopd.cluster.verl.compatibility import Source, differences, flat, installed
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.translate import places, translate
from iwopd.config import Config, make_config
from waiting import PATIENCE

SOURCE = Path(__file__).parents[2] / "src" / "iwopd"
BASE: dict[str, Any] = {
    "models": {"student": "org/student", "teacher": "org/teacher"},
    "data": {"prompts": "prompts.jsonl"},
    "rollout": {"max_tokens": 100, "prompts_per_step": 48},
    "cluster": {"gpus_per_node": 3, "teacher_gpus": 2},
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"models": {**BASE["models"], "attention": "sdpa"}},
    {"rollout": {**BASE["rollout"], "horizon": {"type": "fixed", "tokens": 10}}},
    {"method": {"objective": "divergence", "divergence": "forward-kl", "support": "top-k"}},
    {"method": {"advantage": "exopd"}},
    {"teacher": {"others": {"code": {"model": "org/code"}}}},
]
OPEN = ("data.apply_chat_template_kwargs.", "distillation.distillation_loss.iwopd.", "distillation.teacher_models.iwopd_")
"""Tables whose entries the recipe names."""


def imported() -> Iterator[str]:
    """What `src/` imports from verl, by its dotted name."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "verl":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def written() -> set[str]:
    """Settings that the launcher writes, with Hydra's `+`."""
    found = set()
    for variant in VARIANTS:
        config: Config = make_config(BASE | variant)
        for resume in (None, Path("checkpoints/global_step_3")):
            found |= {item.partition("=")[0] for item in translate(config, places(config, Path("run")), resume)}
    return found


def test_every_import_is_on_the_list() -> None:
    used = set(imported())
    assert len(used) > 15
    missing = sorted(used - reaches.NAMES.keys())
    assert not missing, f"add these to reaches.NAMES, with what they are for: {missing}"


def test_every_setting_is_on_the_list() -> None:
    missing = {name for name in written() if not name.startswith("+")} - set(reaches.SETTINGS)
    assert not missing, f"add these to reaches.SETTINGS: {sorted(missing)}"
    added = {name[1:] for name in written() if name.startswith("+")}
    missing = {name for name in added if not name.startswith(OPEN)} - set(reaches.ADDED)
    assert not missing, f"add these to reaches.ADDED: {sorted(missing)}"


def test_the_installed_version_is_as_the_list_says() -> None:
    source = installed()
    assert source.version == reaches.VERL
    assert differences(source) == []


def test_the_settings_that_are_read_are_those_that_verl_composes() -> None:
    """The check reads verl's generated file of settings; here verl's own composition has every one of ours as well."""
    from omegaconf import OmegaConf

    from verl_support import verl_config

    tree = OmegaConf.to_container(verl_config())
    assert isinstance(tree, dict)
    known = dict(flat(tree))
    assert [name for name in reaches.SETTINGS if name not in known] == []
    assert [name for name in reaches.ADDED if name in known] == []


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The installed verl's source, file by file by links, to be changed."""
    folder = tmp_path / "verl"
    shutil.copytree(installed().folder, folder, ignore=shutil.ignore_patterns("__pycache__"), copy_function=os.symlink)
    return folder


def edit(folder: Path, path: str, old: str, new: str) -> None:
    file = folder / path
    text = file.read_text()
    assert old in text
    file.unlink()  # the link, not verl's own file
    file.write_text(text.replace(old, new))


CHANGES = [
    ("trainer/main_ppo.py", "def run_ppo(", "def start_ppo(", r"verl\.trainer\.main_ppo\.run_ppo is gone"),
    (
        "trainer/ppo/v1/replay_buffer.py",
        "def sample(self, global_steps: int, partition_id: str, batch_size: int)",
        "def sample(self, global_steps: int, partition_id: str, batch_size: int, *, wait=True)",
        r"ReplayBuffer\.sample has other parameters.*wait=True\), was \(self, global_steps, partition_id, batch_size\)",
    ),
    (
        "trainer/distillation/losses.py",
        "advantages=-distillation_losses.detach()",
        "advantages=-2 * distillation_losses.detach()",
        r"losses\.distillation_loss computes something else",
    ),
    (
        "workers/config/distillation.py",
        "    use_chunked_topk: bool",
        "    chunked: bool",
        r"DistillationLossConfig has other parameters or fields",
    ),
    ("trainer/ppo/v1/__init__.py", ", register_trainer", "", r"verl\.trainer\.ppo\.v1\.register_trainer is gone"),
    (
        "trainer/config/_generated_ppo_trainer.yaml",
        "    loss_max_clamp:",
        "    loss_clamp:",
        r"the setting distillation\.distillation_loss\.loss_max_clamp is gone",
    ),
    (
        "trainer/config/_generated_ppo_trainer.yaml",
        "    loss_max_clamp:",
        "    clip_ratio_c: 3.0\n    loss_max_clamp:",
        r"distillation_loss\.clip_ratio_c exists now, default 3\.0.*Hydra",
    ),
    ("trainer/ppo/metric_utils.py", '"response_length/mean"', '"response/mean"', r"no longer has '\"response_length/mean\"'"),
    ("trainer/ppo/metric_utils.py", "", "", r"metric_utils\.py is gone"),
]


@pytest.mark.parametrize(("path", "old", "new", "expected"), CHANGES, ids=lambda value: str(value)[:40])
def test_a_change_is_named(other: Path, path: str, old: str, new: str, expected: str) -> None:
    if old:
        edit(other, path, old, new)
    else:
        (other / path).unlink()
    found = differences(Source(other))
    assert any(re.search(expected, line) for line in found), found
    assert len(found) < 12, found


def test_comments_and_blank_lines_are_no_change(other: Path) -> None:
    edit(other, "trainer/distillation/losses.py", "    # Called as logits processor\n", "\n    # another word\n\n")
    assert differences(Source(other)) == []


def test_the_refusal_says_what_differs(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(other, "trainer/main_ppo.py", "def run_ppo(", "def start_ppo(")
    monkeypatch.setattr(params, "version", lambda name: "0.10.0")
    monkeypatch.setattr(params, "installed", lambda: Source(other))
    with pytest.raises(VerlError, match=r"verl 0\.10\.0 is installed.*1 things? differ.*run_ppo is gone"):
        params.check_version()


def test_as_a_command(other: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "iwopd.cluster.verl.compatibility", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    done = run(str(other.parent))
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stdout + done.stderr
    edit(other, "trainer/main_ppo.py", "def run_ppo(", "def start_ppo(")
    done = run(str(other.parent))
    assert done.returncode == 1
    assert "run_ppo is gone (started by our main program)" in done.stdout
    wrong = run(str(other / "nothing"))
    assert wrong.returncode == 2
    assert "is no folder: name one that holds the package verl" in wrong.stderr
    assert "Traceback" not in wrong.stderr
