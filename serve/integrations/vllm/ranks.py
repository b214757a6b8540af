"""Whether a checkpoint can be cut into a number of ranks, told from its headers and permutations; knows no vLLM."""

from __future__ import annotations

from w4a4.configs.errors import UnsupportedError
from w4a4.export.checkpoint import PackedCheckpoint
from w4a4.serve.integrations.input_slice import cut_problem


def refuse_uncuttable(checkpoint: PackedCheckpoint, num_ranks: int, per_rank_scales: bool = False) -> None:
    """Raise UnsupportedError, naming every linear that cannot be cut into `num_ranks` and why, unless all can.

    Rows and heads can be cut wherever the number divides them; with `per_rank_scales` o_proj and down_proj are cut
    along their input, which their order of channels and their Hadamard have to allow.
    """
    config = checkpoint.config
    problems: dict[str, list[str]] = {}
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % num_ranks:
        problems[f"{heads} heads do not divide by {num_ranks}"] = ["every q_proj and o_proj"]
    if kv_heads % num_ranks and num_ranks % kv_heads:  # fewer kv-heads than ranks: each stands on several
        problems[f"{kv_heads} kv-heads do not divide by {num_ranks}, nor it by them"] = ["every k_proj and v_proj"]
    if config.intermediate_size % num_ranks:
        problems[f"{config.intermediate_size} rows do not divide by {num_ranks}"] = ["every gate_proj and up_proj"]
    if not per_rank_scales and config.hidden_size % num_ranks:
        problems[f"{config.hidden_size} rows do not divide by {num_ranks}"] = ["every o_proj and down_proj"]
    for prefix in checkpoint.linear_names if per_rank_scales else ():
        if prefix.endswith(("o_proj", "down_proj")):
            name = f"{prefix}.input_perm"
            perm = checkpoint.tensor(name) if name in checkpoint.names() else None
            problem = cut_problem(checkpoint.layout(prefix), perm, num_ranks)
            if problem:
                problems.setdefault(problem, []).append(prefix)
    if problems:
        lines = "; ".join(f"{', '.join(names)}: {problem}" for problem, names in problems.items())
        raise UnsupportedError(
            f"{checkpoint.path} cannot be cut into {num_ranks} ranks: {lines}",
            "another number of ranks" + (", or leave per_rank_scales out" if per_rank_scales else ""),
        )
