"""A rollout engine: it writes through the local sampler, and counts what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from iwopd.rollout.engine import Engine, Student
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.section import Place, Section


class ParrotSettings(Section):
    diary: Place[str] = Field("parrot.txt", description="file that gets a line for every call")


class ParrotEngine(Engine):
    settings_type = ParrotSettings
    exact = False  # so that training corrects its rollouts and logs how far its log-probs are from the trainer's
    restricts = True

    def __init__(self, student: Student, settings: ParrotSettings) -> None:
        super().__init__(student, settings)
        self.diary = Path(settings.diary)

    def sampler(self, settings: SamplingSettings) -> Sampler:
        return Parrot(self, settings)

    def note(self, word: str) -> None:
        with self.diary.open("a", encoding="utf-8") as file:
            file.write(f"{word}\n")

    def close(self) -> None:
        self.note("closed")


class Parrot(LocalSampler):
    def __init__(self, engine: ParrotEngine, settings: SamplingSettings) -> None:
        super().__init__(engine.student.model, settings, pad_id=engine.student.pad_id, vocab_size=engine.student.vocab_size)
        self.engine = engine

    def sample(self, prompts: Any, **options: Any) -> Any:
        self.engine.note(f"wrote {len(prompts)}")
        return super().sample(prompts, **options)
