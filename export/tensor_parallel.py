"""Into how many ranks with scales of their own a checkpoint can be cut (`tp_max`), decided before anything is rounded.

What is cut then is the input of o_proj and down_proj (where ranks share a token's scales these are cut by rows, which
nothing hinders); all else is cut by rows, heads and vocabulary, which costs nothing. A rank takes the stored columns
that read its slice of the input, so an order of whole heads, or none, can always be cut. An order by magnitude over the
whole input would fall unevenly on the ranks: it has to be made inside slices, which changes what is quantised and is
done only where it is asked for.
"""

from __future__ import annotations

from w4a4.configs.architecture import CHANNEL_MULTIPLE, ModelConfig
from w4a4.configs.errors import UsageError
from w4a4.configs.recipe import Recipe

CHOICES = (8, 4, 2, 1)
CUT_BY_INPUT = ("self_attn.o_proj", "mlp.down_proj")
_ORDERED_BY_MAGNITUDE = ("outlier_columns", "magnitude_blocks")


def num_slices(name: str, recipe: Recipe) -> int:
    """Slices inside which the inputs of the linear `name` ("mlp.down_proj") are ordered."""
    return max(1, recipe.tp_max) if name in CUT_BY_INPUT else 1


def tp_limits(config: ModelConfig, recipe: Recipe, num_ranks: int) -> list[str]:
    """What keeps the model from being cut into `num_ranks`, in words; empty: nothing does."""
    limits = []
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % num_ranks:
        limits.append(f"{heads} heads do not divide by {num_ranks}")
    if kv_heads % num_ranks and num_ranks % kv_heads:  # fewer kv-heads than ranks: each stands on several
        limits.append(f"{kv_heads} kv-heads do not divide by {num_ranks}, nor it by them")
    for name, width in (("o_proj", config.q_size), ("down_proj", config.intermediate_size)):
        block = max(CHANNEL_MULTIPLE, recipe.group_size, recipe.down_hadamard if name == "down_proj" else 1)
        if width % (block * num_ranks):
            limits.append(f"a slice of {name}'s {width} channels is no multiple of {block}")
    if recipe.method == "balanced_blocks" and not recipe.value_hadamard and num_ranks > 1:
        limits.append("o_proj's channels stand where magnitude over the whole input puts them, not by heads")
    return limits


def choose_tp_max(config: ModelConfig, recipe: Recipe) -> int:
    """`recipe.tp_max` if it says, else the largest of 8, 4, 2, 1 that costs no accuracy.

    Raises:
        UsageError: more ranks than the model allows.
    """
    possible = [choice for choice in CHOICES if choice == 1 or not tp_limits(config, recipe, choice)]
    if recipe.tp_max:
        if recipe.tp_max not in possible:
            limits = "; ".join(tp_limits(config, recipe, recipe.tp_max))
            raise UsageError(f"tp_max {recipe.tp_max}: {limits}", f"--tp-max {possible[0]}")
        return recipe.tp_max
    return 1 if recipe.method in _ORDERED_BY_MAGNITUDE else possible[0]


def explain_tp_max(config: ModelConfig, asked: Recipe, fitted: Recipe) -> str:
    """One line for people: how many ranks, and what limits them. `fitted` is `asked` with everything chosen."""
    count = fitted.tp_max
    line = f"tensor parallelism with scales per rank: up to {count} rank{'s' if count > 1 else ''}"
    if asked.tp_max or count == CHOICES[0]:
        return line
    if fitted.method in _ORDERED_BY_MAGNITUDE:
        return f"{line}; --tp-max allows more by ordering channels inside slices, which changes the result"
    return f"{line}; {2 * count} is too many: {'; '.join(tp_limits(config, fitted, 2 * count))}"
