"""Tokens per CPU second of the local sampler and of transformers' `generate`: same process, same model, same lengths. float32.

    python bench/rollout.py                 # the table of docs/performance.md, about a minute on one core
    python bench/rollout.py --rows 64       # a larger batch

A random Qwen3 model answers prompts of 16 to 64 tokens; the answers are between a quarter of `--tokens` and all of it (4:1,
evenly spread, in shuffled order). The lengths are forced, so that all methods write the same number of tokens: there is no
end-of-sequence token, and each row ends at a length given in advance. `generate` gets it as a stopping criterion that is true
for rows that have reached theirs, which is how it treats rows that ended by themselves: they stay in the batch, and it returns
when all are done. The sampler gets it as `max_tokens`. Only tokens inside these lengths count.

All sample at temperature 1 from the whole vocabulary in one batch with a cache. `generate` returns ids alone; the sampler
returns log-probs as well. Methods take turns for `--repeats` rounds, and the fastest round of each counts. Seconds are CPU time
of the process, which on one thread is the time it takes on an idle machine: on a shared one, wall time measures the neighbours.

  generate      model.generate with its default (dynamic) cache
  model         LocalSampler through the model's own forward
  lean          LocalSampler on the lean path

Exit code 1 if a bar is missed: model at least 1.5x and lean at least 2.5x the tokens per second of generate. Before the clock
starts, the three must write the same answers greedily.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.types import Prompt

BARS = {"model": 1.5, "lean": 2.5}


def build_model(vocab: int, hidden: int, layers: int, positions: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def build_work(rows: int, vocab: int, tokens: int) -> tuple[list[Prompt], list[int]]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.linspace(16, 64, rows).long()[torch.randperm(rows, generator=generator)].tolist()
    lengths: list[int] = torch.linspace(tokens / 4, tokens, rows).long()[torch.randperm(rows, generator=generator)].tolist()
    prompts = [
        Prompt(f"prompt-{i}", tuple(torch.randint(1, vocab, (size,), generator=generator).tolist()))
        for i, size in enumerate(sizes)
    ]
    return prompts, lengths


def run_generate(model: Any, prompts: list[Prompt], lengths: list[int], *, sample: bool) -> list[list[int]]:
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.tensor([(0,) * (longest - len(prompt.token_ids)) + prompt.token_ids for prompt in prompts])
    sizes = torch.tensor([len(prompt.token_ids) for prompt in prompts])
    limits = torch.tensor(lengths)

    class OwnLength(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            return limits <= input_ids.shape[1] - longest

    options: dict[str, Any] = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=max(lengths), pad_token_id=0, use_cache=True, **options)  # type: ignore[no-untyped-call]
    output = model.generate(
        input_ids=ids,
        attention_mask=(torch.arange(longest) >= longest - sizes[:, None]).long(),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([OwnLength()]),
    )
    return [row[longest : longest + length].tolist() for row, length in zip(output, lengths, strict=True)]


def run_sampler(model: Any, prompts: list[Prompt], lengths: list[int], path: Any, *, sample: bool) -> list[list[int]]:
    settings = SamplingSettings(max_tokens=max(lengths), temperature=1.0 if sample else 0.0)
    rollouts = LocalSampler(model, settings, path=path).sample(prompts, seed=0, step=0, max_tokens=lengths)
    return [rollout.response_ids.tolist() for rollout in rollouts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build_model(args.vocab, args.hidden, args.layers, 64 + args.tokens)
    prompts, lengths = build_work(args.rows, args.vocab, args.tokens)
    methods: dict[str, Callable[[bool], list[list[int]]]] = {
        "generate": lambda sample: run_generate(model, prompts, lengths, sample=sample),
        "model": lambda sample: run_sampler(model, prompts, lengths, "model", sample=sample),
        "lean": lambda sample: run_sampler(model, prompts, lengths, "lean", sample=sample),
    }
    greedy = {name: run(False) for name, run in methods.items()}
    for name, answers in greedy.items():
        if answers != greedy["generate"]:
            print(f"greedy answers of {name} differ from generate's", file=sys.stderr)
            return 1
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(args.repeats):
        for name, run in methods.items():
            start = time.process_time()
            answers = run(True)
            seconds[name].append(time.process_time() - start)
            assert [len(answer) for answer in answers] == lengths
    total = sum(lengths)
    speed = {name: total / min(values) for name, values in seconds.items()}
    print(
        f"{args.rows} rows, answers of {min(lengths)} to {max(lengths)} tokens, vocabulary {args.vocab}, "
        f"hidden size {args.hidden}, {args.layers} layers, {args.threads} thread(s), torch {torch.__version__}\n"
    )
    print("| method | CPU seconds | tokens per CPU second | to generate | bar |")
    print("| --- | --- | --- | --- | --- |")
    missed = []
    for name in methods:
        ratio, bar = speed[name] / speed["generate"], BARS.get(name)
        print(f"| {name} | {min(seconds[name]):.2f} | {speed[name]:.0f} | {ratio:.2f}x | {f'{bar}x' if bar else ''} |")
        if bar is not None and ratio < bar:
            missed.append(f"{name} reached {ratio:.2f}x of generate, the bar is {bar}x")
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
