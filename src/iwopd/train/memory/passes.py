"""What a model takes of memory while it reads tokens, in bytes for each of them.

The coefficients are those of Qwen3's layers as transformers runs them: `tests/unit/test_memory_passes.py` counts what autograd
saves (equal to the formula) and what torch's allocator hands out (at most the formula). Attention is taken to be a kernel
that never writes out a [T, T] matrix.

Letters: H hidden size, Q and K widths of all query and all key heads, I inner size of the feed-forward part; w bytes of a
number in the weights and in what the layers add up, c of one in a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

from iwopd.train.memory.shapes import ModelShape

LOSS_BYTES = 24
"""Of H: the last norm, its output, the rows that predict answers, and the gradients of these."""


@dataclass(frozen=True)
class Pass:
    """How a model computes."""

    shape: ModelShape
    weight_bytes: int
    """w."""
    autocast: bool = False
    """Matrix products in bfloat16, whatever the weights are."""
    adapter_rank: int = 0
    """Only an adapter of this rank is trained, whose own matrices are float32; 0: all weights are."""

    @property
    def adapter(self) -> bool:
        return self.adapter_rank > 0

    @property
    def compute_bytes(self) -> int:
        """C."""
        return 2 if self.autocast else self.weight_bytes

    @property
    def copies(self) -> float:
        """Bytes of the layers' matrices in autocast's precision: it keeps those of trained weights for the whole pass."""
        return self.compute_bytes * self.shape.count.layers if self.compute_bytes < self.weight_bytes else 0.0

    @property
    def copies_of_one_layer(self) -> float:
        return self.compute_bytes * self.shape.count.largest_layer if self.copies else 0.0

    # --- without gradients ------------------------------------------------------------------------------------------------

    @property
    def reading(self) -> int:
        """At the worst place of a layer: in the feed-forward part, in attention, or around the norms."""
        shape, w = self.shape, self.weight_bytes
        attention = (2 + 2 * w) * shape.hidden + (5 + 3 * w) * shape.attention_width + 3 * w * shape.key_width
        worst = max((4 + 5 * w) * shape.hidden, (2 + 4 * w) * shape.hidden + self._inner_reading, attention)
        return worst + 2 * w * shape.head_width + 32 + self._routing  # angles, ids and positions

    @property
    def states(self) -> int:
        """What is left of the layers when the head begins: the last states, and the rows of them that predict answers."""
        return 2 * self.weight_bytes * self.shape.hidden

    @property
    def _inner_reading(self) -> int:
        shape = self.shape
        if not shape.experts_per_token:
            return 3 * self.compute_bytes * shape.inner
        # Experts compute in the weights' precision, on a copy of the token for each of them.
        return self.weight_bytes * shape.experts_per_token * max(4 * shape.hidden, shape.hidden + 4 * shape.inner)

    # --- with gradients ---------------------------------------------------------------------------------------------------

    @property
    def saved_by_layer(self) -> int:
        """What autograd keeps of one layer until its backward pass."""
        return self._saved_by_attention + self._saved_by_feed_forward + 7 * self._input_bytes * self.adapter_rank

    @property
    def _saved_by_attention(self) -> int:
        shape, c = self.shape, self.compute_bytes
        inputs = (3 if self._own_inputs else 1) * self._input_bytes * shape.hidden
        norms = 0 if self.adapter else c  # the outputs of the norms of queries and keys
        output = self._input_bytes if self.adapter and self._own_inputs else 0
        packed = c  # the outputs of several sequences are put together
        heads = (4 + 2 * c + norms + output + packed) * shape.attention_width + (4 + 2 * c + norms) * shape.key_width
        return self._saved_by_norm + inputs + heads + 4 * (1 + 2 * shape.heads + shape.key_heads)

    @property
    def _saved_by_feed_forward(self) -> int:
        shape, w = self.shape, self.weight_bytes
        each = self._input_bytes * shape.hidden
        if not shape.experts_per_token:
            inner = (3 * self.compute_bytes + self._input_bytes) * shape.inner
            return self._saved_by_norm + (2 if self._own_inputs else 1) * each + inner + 4
        chosen = shape.experts_per_token * w * (2 * shape.hidden + 4 * shape.inner)
        return self._saved_by_norm + each + chosen + self._routing + 4

    @property
    def _routing(self) -> int:
        """Shares of the experts, and numbers of the chosen ones."""
        return 4 * self.shape.experts + (33 + self.compute_bytes) * self.shape.experts_per_token

    @property
    def _saved_by_norm(self) -> int:
        """Its input in float32, and for its own gradient the output."""
        return (4 + (0 if self.adapter else self.weight_bytes)) * self.shape.hidden

    @property
    def _own_inputs(self) -> bool:
        """Whether every matrix keeps its own copy of its input: where autocast or an adapter brings it to another precision."""
        return self.compute_bytes < self.weight_bytes or (self.adapter and (self.autocast or self.weight_bytes < 4))

    @property
    def _input_bytes(self) -> int:
        return 4 if self.adapter and not self.autocast else self.compute_bytes

    def kept(self, gradient_checkpointing: bool) -> int:
        """After the forward pass; with checkpointing only the input of every layer."""
        each = self.weight_bytes * self.shape.hidden if gradient_checkpointing else self.saved_by_layer
        return self.shape.layers * each

    def backward(self, gradient_checkpointing: bool) -> int:
        """At the worst place of the backward pass through a layer; with checkpointing it has just been computed again."""
        shape, c = self.shape, self.compute_bytes
        layer = self.kept(gradient_checkpointing) + (self.saved_by_layer if gradient_checkpointing else 0)
        layer += (29 - 5 * self.weight_bytes + (6 if self.adapter else 0)) * shape.hidden
        attention = (20 - 3 * c) * shape.attention_width + (4 * self.weight_bytes - 8) * shape.key_width
        attention -= self._saved_by_feed_forward  # which is free again by then
        return layer + max(self._inner_backward, attention)

    @property
    def _inner_backward(self) -> int:
        shape = self.shape
        if not shape.experts_per_token:
            rounded = 4 if self.adapter and self._own_inputs else 0  # an adapter reads its input in float32
            return (2 * self.compute_bytes + rounded) * shape.inner
        return self.weight_bytes * shape.experts_per_token * max(2 * shape.hidden, shape.hidden + 2 * shape.inner)
