"""The embedded world: a task, a tokenizer and models trained from scratch in minutes, on a CPU and without a network.

world = open_world()                    # trains teacher and student the first time, then loads them from the cache
world.teacher, world.student            # folders for AutoModelForCausalLM.from_pretrained
world.prompts(64), world.eval_prompts(500)
"""

from iwopd.tiny.cache import cache_dir
from iwopd.tiny.models import STUDENT_SIZES, TEACHER_SIZES, ModelRecipe, ModelSize, Stage, new_model
from iwopd.tiny.pretrain import PretrainingListener, pretrain
from iwopd.tiny.task import check
from iwopd.tiny.tokenizer import build_tokenizer
from iwopd.tiny.world import (
    DEFAULT_WORLD,
    WORLDS,
    World,
    WorldRecipe,
    eval_prompts,
    max_response_tokens,
    open_world,
    planned_world,
    world_recipe,
)

__all__ = [
    "DEFAULT_WORLD",
    "STUDENT_SIZES",
    "TEACHER_SIZES",
    "WORLDS",
    "ModelRecipe",
    "ModelSize",
    "PretrainingListener",
    "Stage",
    "World",
    "WorldRecipe",
    "build_tokenizer",
    "cache_dir",
    "check",
    "eval_prompts",
    "max_response_tokens",
    "new_model",
    "open_world",
    "planned_world",
    "pretrain",
    "world_recipe",
]
