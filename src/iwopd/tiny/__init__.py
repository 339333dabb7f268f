"""The embedded world: a task, a tokenizer and models trained from scratch in minutes, on a CPU and without a network.

world = open_world()                    # trains teacher and student the first time, then loads them from the cache
world.teacher, world.student            # folders for AutoModelForCausalLM.from_pretrained
world.prompts(64), world.eval_prompts(500)
"""

from iwopd.tiny.architecture import STUDENT_SIZES, ModelRecipe, ModelSize, Stage
from iwopd.tiny.pretrain import PretrainingListener
from iwopd.tiny.task import EXPLANATION, check
from iwopd.tiny.tokenizer import TOKENIZERS, build_tokenizer
from iwopd.tiny.world import (
    DEFAULT_WORLD,
    WORLDS,
    World,
    WorldRecipe,
    eval_prompts,
    max_response_tokens,
    open_world,
    planned_world,
    right_solution,
    world_recipe,
)

__all__ = [
    "DEFAULT_WORLD",
    "EXPLANATION",
    "STUDENT_SIZES",
    "TOKENIZERS",
    "WORLDS",
    "ModelRecipe",
    "ModelSize",
    "PretrainingListener",
    "Stage",
    "World",
    "WorldRecipe",
    "build_tokenizer",
    "check",
    "eval_prompts",
    "max_response_tokens",
    "open_world",
    "planned_world",
    "right_solution",
    "world_recipe",
]
