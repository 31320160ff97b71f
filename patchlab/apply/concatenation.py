"""`concatenate_by_config`: tensors fused into one, and split again by sizes from the config.

transformers' own `Concatenate` (`core_model_loading.py`, 5.24.0) reverses to `Chunk`, which splits
into equal parts. Under grouped-query attention query, key and value are not equal: such a model
loads right and then saves a corrupt checkpoint (32, 16 and 16 rows come back as 22, 22 and 20).
`Split` knows unequal sizes, but takes them from the parameters of the targets, which do not exist
in a model that keeps them fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Concatenate, ConversionOps

from patchlab.errors import CheckpointError

Sizes = Callable[[Any], Sequence[int]]


def query_key_value_sizes(config: Any) -> tuple[int, int, int]:
    """Return the rows of query, key and value in an attention layer, from its text config.

    Reads `num_attention_heads`, `num_key_value_heads` (as many, if there is none) and `head_dim`
    (`hidden_size` by the heads, if there is none).
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    return heads * head_dim, groups * head_dim, groups * head_dim


def concatenate_by_config(sizes: Sizes = query_key_value_sizes, *, dim: int = 0) -> ConversionOps:
    """Return an operation that fuses tensors, and whose reverse splits them by the config.

    For the operations of a `WeightConverter`. Loads as transformers' `Concatenate` does, and saves
    what was loaded, with any number of key and value heads.

    Args:
        sizes: Config → the size of each part along `dim`, in the order of the converter's source
            patterns. By default those of query, key and value. A function of a Python module, not a
            lambda, if the model is to be pickled.
        dim: The dimension along which the tensors are fused.

    Returns:
        The operation.

    Example:
        >>> import transformers, patchlab
        >>> fuse = transformers.WeightConverter(
        ...     source_patterns=["q_proj", "k_proj", "v_proj"],
        ...     target_patterns=["qkv_proj"],
        ...     operations=[patchlab.concatenate_by_config()],
        ... )
        >>> fuse.reverse_transform().operations
        [SplitByConfig(dim=0)]
    """
    return ConcatenateByConfig(sizes, dim)


class ConcatenateByConfig(Concatenate):
    """Fuses tensors in the order of the source patterns."""

    def __init__(self, sizes: Sizes = query_key_value_sizes, dim: int = 0) -> None:
        super().__init__(dim)
        self.sizes = sizes

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that splits what this one has fused."""
        return SplitByConfig(self.sizes, self.dim)


class SplitByConfig(ConversionOps):
    """Splits a tensor into parts whose sizes are computed from the config."""

    def __init__(self, sizes: Sizes = query_key_value_sizes, dim: int = 0) -> None:
        self.sizes, self.dim = sizes, dim

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return a tensor for each target pattern.

        Raises:
            CheckpointError: The sizes do not fit the tensor or the targets.
        """
        (found,) = input_dict.values()
        tensor: torch.Tensor = found[0] if isinstance(found, list) else found
        sizes = list(self.sizes(kwargs["config"]))
        if len(sizes) != len(target_patterns) or sum(sizes) != tensor.shape[self.dim]:
            raise CheckpointError(
                f"{source_patterns[0]!r} has {tensor.shape[self.dim]} rows along dimension "
                f"{self.dim}, and the config says {sizes} for {', '.join(target_patterns)}. Give "
                f"concatenate_by_config a function that returns the sizes of the parts."
            )
        parts = torch.split(tensor, sizes, dim=self.dim)
        named = zip(target_patterns, parts, strict=True)
        return {name: part.contiguous() for name, part in named}

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that fuses what this one has split."""
        return ConcatenateByConfig(self.sizes, self.dim)
