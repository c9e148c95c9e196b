"""Layouts of a packed batch's sequences for a transformers model, and the way back of their hidden states.

Causal models compute the same for a sequence alone and at the start of a padded row. Whether they do so for sequences
end to end in one row, or in a tree with shared prefixes, depends on the model: layout_check.py measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.mesh import current_mesh
from rlhf_core.models.flex_attention import IMPLEMENTATION as FLEX
from rlhf_core.models.sequence_parallel import CutTree, gathered
from rlhf_core.models.token_tree import TokenTree
from rlhf_core.models.tree_attention import ARGUMENT as TREE_ARGUMENT
from rlhf_core.models.tree_blocks import TreeBlocks
from rlhf_core.models.vision import layers_of, position_ids, runs_encoder_always, with_features
from rlhf_core.packing import select_sequences
from rlhf_core.types import PackedBatch

# A group of rows is padded to at most this many times its tokens, unless it is small.
_MOST_PADDING = 1.15
_SMALL = 1024  # tokens with padding
_FORWARD = 256  # tokens whose matrix products take as long as what every forward costs beside its own


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts in which a model computes the same for each sequence as for that sequence alone."""

    # In one row: as a tree, or end to end, where the model gets positions, or boundaries too.
    packed: Literal["tree", "positions", "indices"] | None
    rows: bool  # one right-padded row a sequence, where that costs less
    cut: bool = False  # each rank of a replica has a part of the tree's tokens

    def __str__(self) -> str:
        return {None: "rows", "tree": "tree", "positions": "packed", "indices": "packed with sequence indices"}[
            self.packed
        ] + (f" over {current_mesh().sequence} ranks" if self.cut else "")


ROWS = Layouts(packed=None, rows=True)
TREE = Layouts(packed="tree", rows=False)
CUT_TREE = replace(TREE, cut=True)
PACKED = Layouts(packed="positions", rows=False)
INDEXED = Layouts(packed="indices", rows=False)


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """The tokens of a batch as the arguments of a model, and the place of each in its output."""

    arguments: dict[str, Any]
    places: Tensor | None  # (N,) int64; None: all in order
    part: CutTree | None = None  # this rank's, where the ranks have a part of the output each

    def tokens(self, values: Tensor) -> OfTokens:
        """Return the values of the batch's tokens. values: (rows, columns, d) of the model's output, or the same
        flattened.
        """
        return OfTokens(values.flatten(0, -2), self.places, self.part)

    @property
    def losses(self) -> int:
        """The number of ranks that share the tokens, and have each a loss of all of them."""
        return 1 if self.part is None else self.part.ranks


@dataclass(frozen=True, slots=True)
class OfTokens:
    """A model's values for the tokens of a batch, once for shared prefixes.

    There can be many times as many tokens as values, so that only the needed ones are gathered.
    """

    values: Tensor  # (n, d); (n / P, d) if each of P ranks has a part
    places: Tensor | None  # (N,) int64: where among the n values that of each token is; None: all in order
    part: CutTree | None = None  # this rank's part of the values; None: all of them

    def all(self) -> Tensor:
        """Return the values (N, d) of all tokens, on every rank."""
        return self.of_each(lambda values: values)

    def of_each(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return (N, ...): `function`, which maps (n, d) to (n, ...), of each token's value, on every rank."""
        results = function(self.values)
        results = results if self.part is None else gathered(results)
        return results if self.places is None else results.index_select(0, self.places)

    def dealt(self, tokens: Tensor) -> Tensor:
        """Return the values of `tokens`, indices (M,) int64 in the batch: all (M, d), or if the ranks have parts, of
        this rank's `share` of these tokens.
        """
        places = tokens if self.places is None else self.places[tokens]
        # The backward pass of index_select takes less than that of [...].
        return self.values.index_select(0, places) if self.part is None else self.part.dealt(self.values, places)


def run_backbone(
    model: Any, batch: PackedBatch, layouts: Layouts, *, routers: bool = False, limit: int | None = None
) -> tuple[OfTokens, list[Tensor]]:
    """Return the last hidden states of the tokens of `batch`, and, with `routers`, each router's logits (N, E).

    model: a PreTrainedModel. limit: sequences longer than this, in tokens, never share a forward with others.
    Under ZeRO-3 every rank makes the same number of forwards.
    """
    groups = _groups(model, batch, layouts, limit)
    if len(groups) == 1:
        return _run(model, batch, layouts, routers=routers)
    parts = [_run(model, select_sequences(batch, group), layouts, routers=routers) for group in groups]
    order = _order(batch, groups)
    hidden = _joined([part for part, _ in parts], order)
    return hidden, [torch.cat(logits)[order] for logits in zip(*(logits for _, logits in parts), strict=True)]


def _run(model: Any, batch: PackedBatch, layouts: Layouts, *, routers: bool) -> tuple[OfTokens, list[Tensor]]:
    arrangement = arranged(model, batch, layouts)
    arguments = arrangement.arguments
    if batch.image_parts is not None or runs_encoder_always(model):
        arguments |= with_features(model, arguments.pop("input_ids"), batch, arrangement.places)
    options = {"output_router_logits": True} if routers else {}
    output = layers_of(model)(**arguments, use_cache=False, **options)
    logits = [arrangement.tokens(logits).all() for logits in output.router_logits] if routers else []
    return arrangement.tokens(output.last_hidden_state), logits


def _joined(parts: Sequence[OfTokens], order: Tensor) -> OfTokens:
    """Concatenate parts. order: the place of each token of the batch in the concatenated parts."""
    places, start = [], 0
    for part in parts:
        indices = torch.arange(len(part.values), device=order.device) if part.places is None else part.places
        places.append(start + indices)
        start += len(part.values)
    return OfTokens(torch.cat([part.values for part in parts]), torch.cat(places)[order])


def arranged(model: Any, batch: PackedBatch, layouts: Layouts) -> _Arrangement:
    """Arrange in rows if they are the only correct layout, or cost less than the attention between packed sequences."""
    if layouts.packed is not None and model.config._attn_implementation == FLEX:
        return _in_blocks(TokenTree.of(batch) if layouts.packed == "tree" else TokenTree.apart(batch), batch)
    if layouts.packed == "tree":
        return _in_a_cut_tree(batch) if layouts.cut else _in_a_tree(batch)
    positions = position_ids(model, batch)
    if layouts.packed is None or (layouts.rows and rows_are_cheaper(model, batch)):
        return _in_rows(batch, positions)
    indices = batch.position_ids.unsqueeze(0)
    arguments: dict[str, Any] = {
        "input_ids": batch.input_ids.unsqueeze(0),
        # Along several axes the index goes before them: it tells the model where sequences begin.
        "position_ids": indices if positions is None else torch.cat([indices, positions]).unsqueeze(1),
    }
    if layouts.packed == "indices":
        arguments |= _boundaries(batch)
    return _Arrangement(arguments, None)


def _in_a_tree(batch: PackedBatch) -> _Arrangement:
    tree = TokenTree.of(batch)
    return _Arrangement({**_tokens_at(tree.kept, batch), TREE_ARGUMENT: tree}, tree.places)


def _in_blocks(tree: TokenTree, batch: PackedBatch) -> _Arrangement:
    blocks = TreeBlocks(tree.segments, tree.kept.device)
    return _Arrangement({**_tokens_at(tree.kept, batch), TREE_ARGUMENT: blocks}, tree.places)


def _in_a_cut_tree(batch: PackedBatch) -> _Arrangement:
    tree, ranks = TokenTree.of(batch), current_mesh().sequence
    tree = tree.padded(math.ceil(len(tree.kept) / ranks) * ranks)
    part = CutTree(tree)
    return _Arrangement({**_tokens_at(part.kept, batch), TREE_ARGUMENT: part}, tree.places, part)


def _tokens_at(places: Tensor, batch: PackedBatch) -> dict[str, Any]:
    return {name: getattr(batch, name)[places].unsqueeze(0) for name in ("input_ids", "position_ids")}


def _in_rows(batch: PackedBatch, positions: Tensor | None) -> _Arrangement:
    """Arrange in rows without a mask: causal layers never see the padding after a sequence. positions: (axes, N) int64;
    None: the index in the sequence, as models count by themselves.
    """
    lengths = batch.on_host.sequence_lengths
    real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    places = real.flatten().nonzero().squeeze(1).to(batch.input_ids.device)
    ids = batch.input_ids.new_zeros(real.numel()).index_copy(0, places, batch.input_ids)
    arguments = {"input_ids": ids.view(real.shape)}
    if positions is not None:
        laid_out = positions.new_zeros(len(positions), real.numel()).index_copy(1, places, positions)
        arguments["position_ids"] = laid_out.view(-1, *real.shape)
    return _Arrangement(arguments, places)


def _boundaries(batch: PackedBatch) -> dict[str, Any]:
    """Return the boundaries of sequences, under the names in layers of transformers: seq_idx for convolutions and
    state-space layers, cu_seq_lens for attention and linear attention.
    """
    ends = batch.sequence_lengths.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends]).int()
    longest = int(batch.on_host.sequence_lengths.max())
    return {
        "seq_idx": batch.sequence_ids.int().unsqueeze(0),
        "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def rows_are_cheaper(model: Any, batch: PackedBatch) -> bool:
    """Return whether padding costs less than the attention between sequences, which a mask would only discard."""
    packed, rows = _costs(model, batch.on_host.sequence_lengths.tolist())
    return rows < packed


def _costs(model: Any, lengths: Sequence[int]) -> tuple[float, float]:
    """Return the costs of one forward of sequences of these lengths, packed and in rows; infinite for invalid
    layouts.
    """
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return 0.0, math.inf  # flash and flex attention skip tokens between sequences
    longest, tokens = max(lengths), sum(lengths)
    padded = len(lengths) * longest
    # A token costs about 24 d^2 multiply-adds a layer in matrix products and 4 d per token it attends to.
    products = 6 * model.config.get_text_config().hidden_size
    rows = padded * (products + longest) if padded <= 4 * tokens else math.inf
    return _FORWARD * products + tokens * (products + tokens), _FORWARD * products + rows


def _groups(model: Any, batch: PackedBatch, layouts: Layouts, limit: int | None) -> list[list[int]]:
    """Return the sequences of each forward: all in one, unless that would mostly compute padding, or attention between
    sequences, or unless long sequences would change the computation of short ones (longrope).
    """
    lengths = batch.on_host.sequence_lengths.tolist()
    whole = [list(range(len(lengths)))]
    one_forward = layouts.packed is not None and limit is None  # is right
    # Where weights are sharded every forward gathers them again.
    if one_forward and (not layouts.rows or _is_sharded(model)):
        return whole
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = layouts.packed is None or one_forward
        if not groups or not _fits(groups[-1], index, lengths, limit, padded=padded):
            groups.append([])
        groups[-1].append(index)
    if one_forward:
        costs = [min(_costs(model, [lengths[i] for i in group])) for group in groups]
        groups = groups if sum(costs) < min(_costs(model, lengths)) else whole
    # A forward that is only there for the collective calls of other ranks; nobody reads its output.
    return groups + [[groups[-1][-1]]] * (_most_on_a_rank(len(groups), model, batch) - len(groups))


def _fits(group: list[int], index: int, lengths: list[int], limit: int | None, *, padded: bool) -> bool:
    """Return whether a sequence may join a group of longer ones."""
    longest = lengths[group[0]]
    if limit is not None and (longest > limit) != (lengths[index] > limit):
        return False
    area = longest * (len(group) + 1)
    return not padded or area <= max(_SMALL, _MOST_PADDING * (sum(lengths[i] for i in group) + lengths[index]))


def _order(batch: PackedBatch, groups: list[list[int]]) -> Tensor:
    """Return the place of each token of `batch` in the concatenated outputs of its groups, (N,)."""
    host = batch.on_host
    order = torch.empty_like(host.input_ids)
    starts = (host.sequence_lengths.cumsum(0) - host.sequence_lengths).tolist()
    lengths = host.sequence_lengths.tolist()
    place, done = 0, set[int]()
    for index in (index for group in groups for index in group):
        if index not in done:
            part = torch.arange(place, place + lengths[index])
            order[starts[index] : starts[index] + lengths[index]] = part
        done.add(index)
        place += lengths[index]
    return order.to(batch.input_ids.device)


def _is_sharded(model: nn.Module) -> bool:
    """Return whether ZeRO-3 gathers the weights for each forward."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _most_on_a_rank(count: int, model: nn.Module, batch: PackedBatch) -> int:
    """Return the maximum of `count` over ranks if weights are sharded, so that every forward is a collective call."""
    if not _is_sharded(model):
        return count
    counts = torch.tensor(count, device=batch.input_ids.device)
    return int(current_mesh().reduce(counts, dist.ReduceOp.MAX, over="all"))


def depends_on_place(config: Any) -> str | None:
    """Return the reason why a token's place in its row counts, and not only its position in its sequence; None if it
    does not.

    Covers only effects at distances beyond those of the check's few tokens.
    """
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None) and "chunked_attention" in (
        getattr(text, "layer_types", None) or ()
    ):
        return f"its attention is cut into chunks of {text.attention_chunk_size} places of a row"
    return None
