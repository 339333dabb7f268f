"""`teacher.cache`: which teacher the kept scores belong to, and what a step's metrics say of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from iwopd.config import Config, TeacherSource
from iwopd.models import ModelSource, weights_fingerprint
from iwopd.teacher.cached import CachedScorer, ScoreStore
from iwopd.teacher.foreign import ForeignScorer
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.teacher.server import ServerScorer
from iwopd.train.loading import planned_world, source_of
from iwopd.train.ranks import Ranks


def cached(config: Config, scorer: Scorer, source: TeacherSource, model: str | None, vocab_size: int) -> CachedScorer:
    """A teacher whose scores are kept. `model`: that of one of several local teachers; None: the first."""
    store = ScoreStore(Path(str(config.teacher.cache)).expanduser(), int(config.teacher.cache_gb * 1e9))

    def identity() -> list[str]:
        if isinstance(scorer, ServerScorer):
            return ["server", source.dialect, str(scorer.model), str(vocab_size)]
        return _local_identity(config, scorer, model, vocab_size)

    return CachedScorer(scorer, store, identity, temperature=config.rollout.temperature)


def _local_identity(config: Config, scorer: Scorer, model: str | None, vocab_size: int) -> list[str]:
    """Where the weights came from, what their files are, and the settings that change numbers."""
    models = config.models
    source = source_of(config, "teacher", planned_world(config)) if model is None else ModelSource.of(model)
    commits = [str(getattr(one.lm.model.config, "_commit_hash", None)) for one in scorer.local("teacher").values()]
    read = [models.teacher_dtype or models.dtype, models.teacher_quantize, str(models.attention), config.head_products]
    where = "" if source is None else str(source)
    files = "" if source is None else weights_fingerprint(Path(source.path, source.gguf_file or ""))
    return ["local", where, files, *commits, *read, str(vocab_size)]


def caches_of(scorer: Scorer) -> list[CachedScorer]:
    """Those inside a teacher, however it is put together."""
    if isinstance(scorer, RoutedScorer):
        return [one for inner in scorer.teachers.values() for one in caches_of(inner)]
    if isinstance(scorer, CachedScorer):
        return [scorer]
    return caches_of(scorer.scorer) if isinstance(scorer, PromptedScorer | ForeignScorer) else []


def cache_metrics(caches: Sequence[CachedScorer], ranks: Ranks) -> dict[str, float]:
    """Of the step that ends, over all processes; nothing without a cache."""
    if not caches:
        return {}
    counts = [sum(part) for part in zip(*(one.take_counts() for one in caches), strict=True)]
    hits, misses = (sum(part) for part in zip(*ranks.gather(counts), strict=True))
    return {"teacher/cache_hits": float(hits), "teacher/cache_misses": float(misses)}
