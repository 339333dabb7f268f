"""Models and tokenizers by local folder, hub id or GGUF file. No pickled weights; repository code runs only if allowed."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from iwopd import hub
from iwopd.devices import check_device
from iwopd.errors import UserError
from iwopd.gguf_files import open_gguf, parsed_once

_UNREADABLE = (
    OSError, ValueError, SafetensorError, ImportError, LookupError, AttributeError, TypeError, RecursionError, OverflowError
)  # fmt: skip
"""What transformers raises for files that are not there, or not what they should be."""


class ModelError(UserError, ValueError):
    """A model or tokenizer that cannot be loaded or does not fit, with the reason."""


@dataclass(frozen=True)
class ModelSource:
    """A folder or hub id, a GGUF file in it, and the revision of the hub's repository."""

    path: str
    gguf_file: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, source: str | Path | ModelSource, *, revision: str | None = None) -> ModelSource:
        """`folder/model.gguf` (or `owner/name/model.gguf` on the hub) names a GGUF file; anything else a folder or hub id."""
        if isinstance(source, ModelSource):
            return source
        if str(source).endswith(".gguf"):
            return cls(str(Path(source).parent), Path(source).name, revision)
        return cls(str(source), None, revision)

    def __str__(self) -> str:
        name = self.path if self.gguf_file is None else f"{self.path}/{self.gguf_file}"
        return name if self.revision is None else f"{name}@{self.revision}"

    @property
    def is_local(self) -> bool:
        return Path(self.path).is_dir()

    @property
    def is_hub_id(self) -> bool:
        """Whether the hub is asked for it: it is nothing here, and written as a name, or as an owner and a name."""
        path, parts = self.path, self.path.count("/") + 1
        is_name = parts == 2 or (parts == 1 and bool(path) and self.gguf_file is None)
        return is_name and not path.startswith(("/", ".", "~")) and not Path(path).exists()

    @property
    def options(self) -> dict[str, str]:
        """Arguments for every `from_pretrained`."""
        given = {"gguf_file": self.gguf_file, "revision": None if self.is_local else self.revision}
        return {name: value for name, value in given.items() if value is not None}


def load_model(
    source: str | Path | ModelSource,
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    attention: str | None = None,
    quantization: Any = None,
) -> Any:
    """A causal LM on its device, in eval mode.

    device: `auto` spreads it over all accelerators. attention: a name that transformers knows (sdpa,
    flash_attention_2, ...). quantization: a quantisation config of transformers; such a model is not moved after loading.
    """
    source = ModelSource.of(source)
    if str(device) != "auto":
        check_device(str(device), "the device")
    _look(source, "cannot load a model from")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, **source.options}
    if source.gguf_file is None:
        options["use_safetensors"] = True
    if attention is not None:
        options["attn_implementation"] = attention
    if quantization is not None:
        options |= {"quantization_config": quantization, "device_map": {"": device}}
    elif str(device) == "auto":
        options["device_map"] = "auto"
    try:
        with _reading(source):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.path, dtype=getattr(torch, dtype), output_loading_info=True, **options
            )
    except _UNREADABLE as error:
        raise ModelError(f"cannot load a model from {source}: {_why(source, error)}") from None
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(
            f"{source} lacks {len(missing)} weights of a {type(model).__name__}, the first is {missing[0]}: they would be "
            "random. The download is incomplete, or its config.json belongs to another model"
        )
    return model if "device_map" in options else model.to(device)


def load_tokenizer(source: str | Path | ModelSource, *, trust_remote_code: bool = False) -> Any:
    source = ModelSource.of(source)
    _look(source, "cannot load a tokenizer from", _TOKENIZER)
    try:
        with _reading(source):
            tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code, **source.options)
            if source.gguf_file is not None:
                _special_tokens_of_gguf(tokenizer, source)
    except _UNREADABLE as error:
        raise ModelError(f"cannot load a tokenizer from {source}: {_why(source, error)}") from None
    return tokenizer


def load_configs(source: str | Path | ModelSource, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Config and generation config of a model, without its weights."""
    source = ModelSource.of(source)
    _look(source, "cannot read the config of")
    try:
        with _reading(source):
            config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, **source.options)
    except _UNREADABLE as error:
        raise ModelError(f"cannot read the config of {source}: {_why(source, error)}") from None
    try:
        generation: Any = GenerationConfig.from_pretrained(source.path, revision=source.options.get("revision", "main"))
    except _UNREADABLE:
        if source.gguf_file is None and (damaged := _damaged(Path(source.path))) is not None:
            raise ModelError(f"cannot read the generation config of {source}: {damaged}") from None
        generation = GenerationConfig.from_model_config(config)
    return config, generation


def brings_tokenizer(source: str | Path | ModelSource) -> bool:
    """Whether there is a tokenizer to load; without one, transformers would make one up from the architecture."""
    source = ModelSource.of(source)
    folder = Path(source.path)
    if source.gguf_file is not None or not folder.is_dir():
        return True
    return any(map(any, map(folder.glob, _TOKENIZER)))


def stop_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """End-of-sequence ids of the tokenizer and of the model's generation config."""
    return end_ids(tokenizer, model.generation_config)


def end_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """As `stop_ids`, from a generation config without a model."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = [i for i in (configured if isinstance(configured, (list, tuple)) else [configured]) if i is not None]
    if strange := [i for i in ids if type(i) is not int]:
        raise ModelError(f"eos_token_id in generation_config.json has {strange[0]!r}: it must be a token id, or a list of them")
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def weights_fingerprint(source: str | Path) -> str:
    """Changes when a local folder's weights change (names, sizes and times of its files); a hub id is returned as it is."""
    folder = Path(source)
    if folder.suffix == ".gguf" and folder.is_file():
        files = [folder]
    elif folder.is_dir():
        files = sorted(folder.glob("*.safetensors"))
    else:
        return str(source)
    about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _special_tokens_of_gguf(tokenizer: Any, source: ModelSource) -> None:
    """Set the special tokens named in the file: transformers 5.10 uses the bos token of a Llama-like file as its eos."""
    from transformers.utils.hub import cached_file

    path = cached_file(source.path, str(source.gguf_file), revision=source.options.get("revision"))
    fields = open_gguf(str(path)).fields
    for name, key in (("eos_token", "eos"), ("bos_token", "bos"), ("pad_token", "padding")):
        if (field := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(field.contents())))


@contextmanager
def _reading(source: ModelSource) -> Iterator[None]:
    """While transformers reads: in silence, and of a GGUF file the header once."""
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        if source.gguf_file is not None:
            stack.enter_context(parsed_once())
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and messages for every file."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


_CONFIG = ("config.json", "adapter_config.json")
_TOKENIZER = ("*token*", "vocab*", "*.model")


def _look(source: ModelSource, doing: str, needed: tuple[str, ...] = _CONFIG) -> None:
    """Say at once that there is no such folder, or none of the `needed` files in it; ask the hub whether it answers, which its
    client would find out many times.
    """
    if not source.path:
        raise ModelError(f"{doing} '': no model is named; give a folder, a hub id or a GGUF file")
    if source.is_hub_id:
        hub.silence()
    elif not Path(source.path).exists():
        raise ModelError(f"{doing} {source}: there is no such folder{_nearby(Path(source.path))}; correct the path")
    elif source.gguf_file is None and source.is_local and not any(map(any, map(Path(source.path).glob, needed))):
        what = "is a run directory: `iwopd export` makes a model of it" if _is_run(source) else "is not the folder of a model"
        raise ModelError(f"{doing} {source}: it {what} (no file {' or '.join(needed)} in it)")
    elif source.gguf_file is None and not source.is_local:
        raise ModelError(f"{doing} {source}: it is a file, not a folder with a config.json (a GGUF file ends in .gguf)")


def _is_run(source: ModelSource) -> bool:
    return (Path(source.path) / "run.json").exists()


def _nearby(path: Path) -> str:
    """The folder beside it with the most similar name."""
    parent = path.parent
    try:
        names = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent != Path() else []
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {parent / near[0]}?)" if near else ""


def _why(source: ModelSource, error: Exception) -> str:
    """A better reason: transformers complains about the form of a hub id, or in a paragraph."""
    path, file = source.path, source.gguf_file
    if source.is_hub_id:
        return _why_not_from_the_hub(source, error)
    if file is not None and source.is_local and not (Path(path) / file).is_file():
        return "there is no such GGUF file"
    if file is not None and isinstance(error, ImportError):
        return "GGUF files need the package gguf: pip install 'iwopd[gguf]'"
    if file is None and (damaged := _damaged(Path(path))) is not None:
        return damaged
    if isinstance(error, SafetensorError) or (file is not None and source.is_local):
        return f"{file or 'one of its .safetensors files'} is damaged or incomplete ({error}); download it again"
    if isinstance(error, (OSError, ValueError, ImportError)) and str(error):
        return str(error).strip().splitlines()[0]
    return f"{file or 'one of its files'} is damaged or incomplete ({type(error).__name__}: {error}); download it again"


def _why_not_from_the_hub(source: ModelSource, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    nothing = f"{source.path} is not a folder here{_nearby(Path(source.path))}"
    if why := hub.silence():
        return f"{nothing}, and the hub cannot be asked: {why}. Correct the path, or fetch the model where the hub answers"
    causes = (error, error.__cause__, error.__context__)
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return "its owner lets nobody have it who has not asked: ask on its page, then `hf auth login`"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return f"{nothing}, and the hub shows you no model of that name. Correct it; a private one needs `hf auth login`"
    return f"{nothing}, and the hub's client says: {(str(error) or type(error).__name__).strip().splitlines()[0]}"


def _damaged(folder: Path) -> str | None:
    """Which of a local folder's JSON files is not what it should be."""
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror})"
        except (ValueError, RecursionError) as error:
            return f"{path.name} is not JSON ({error}); download it again"
        if not isinstance(content, dict) and not path.name.startswith(("vocab", "merges")):
            return f"{path.name} is not a JSON object but {type(content).__name__}; download it again"
        if path.name.endswith(".index.json") and (problem := _index_problem(content)) is not None:
            return f"{path.name} {problem}; download it again"
    return None


def _index_problem(content: dict[str, Any]) -> str | None:
    """What is wrong with the list of a model's weights and the files that hold them."""
    where = content.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        return "has no weight_map from names of weights to files"
    return None if isinstance(content.get("metadata", {}), dict) else "has metadata that are not an object"
