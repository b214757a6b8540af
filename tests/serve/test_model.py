"""The packed model against the same mathematics written once more, in float and without any of its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from w4a4.configs.architecture import ModelConfig
from w4a4.export.checkpoint import PackedCheckpoint, PackedLinear, open_checkpoint
from w4a4.kernels.layout import ActMode, Segment
from w4a4.serve.model import CausalLM

PackedFolder = Callable[..., Path]

RECIPES = ("dual", "rtn", "quik", "fmpq", "fmpq-int8", "w4a16", "w8a8")
KINDS = ("llama", "llama-biased", "mistral", "qwen2", "qwen2-sliding", "qwen3")


def hadamard_blocks(x: Tensor, block: int) -> Tensor:
    """Times Sylvester's matrix, H[i, j] = (-1) ** (ones that i and j share in binary)."""
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]).to(x)
    matrix /= block**0.5
    return (x.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


def rounded_activation(x: Tensor, segment: Segment, clip: tuple[float, float], is_symmetric: bool) -> Tensor:
    """x [T, width] as its integers stand for it. Codes are chosen in float32: ties between two of them do occur."""
    if segment.act_bits == 16:
        return x
    x = x.float()
    absmax = x.abs().amax(1, keepdim=True)
    if segment.act_bits == 8:
        scale = absmax / 127
        return (x * (1 / scale)).round().clamp(-127, 127).double() * scale
    if not is_symmetric:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        scale = (high - low) / 15
        return ((x - low) * (1 / scale)).round().clamp(0, 15).double() * scale + low
    scale = torch.minimum(clip[0] * absmax, clip[1] * x.square().mean(1, keepdim=True).sqrt()) / 7
    return (x * (1 / scale)).round().clamp(-8, 7).double() * scale


def float_weight(linear: PackedLinear) -> Tensor:
    """[N, K] in stored order."""
    parts, column, index = [], 0, 0
    group = linear.layout.group_size
    for segment, codes in zip(linear.layout.segments, linear.weights, strict=True):
        scales: Tensor | float = 1.0
        if segment.weight_bits < 16 and group:
            scales = linear.weight_scales[:, torch.arange(column, column + segment.width) // group]
        elif segment.weight_bits < 16:
            scales = linear.weight_scales[:, index : index + 1]
            index += 1
        parts.append(codes.double() * scales)
        column += segment.width
    return torch.cat(parts, 1)


def apply_linear(linear: PackedLinear, x: Tensor, act: ActMode) -> Tensor:
    layout = linear.layout
    stored = x if linear.perm is None else x[:, linear.perm.long()]
    stored = hadamard_blocks(stored, layout.hadamard)
    least = {"map": 4, "a8": 8, "a16": 16}[act]
    parts = []
    for segment, part in zip(layout.segments, stored.split([s.width for s in layout.segments], 1), strict=True):
        segment = replace(segment, act_bits=max(segment.act_bits, least))
        parts.append(rounded_activation(part, segment, layout.clip, layout.symmetric))
    y = torch.cat(parts, 1) @ float_weight(linear).T
    return y if linear.bias is None else y + linear.bias


def rounded_cache(x: Tensor, bits: int, num_sinks: int) -> Tensor:
    """Keys or values [T, heads, D] as the cache gives them back."""
    if bits == 16:
        return x.bfloat16().double()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale, zero = ((high - low) / 15).half().double(), low.half().double()
    kept = ((x - zero) / scale).round().clamp(0, 15) * scale + zero
    kept[:num_sinks] = x[:num_sinks].bfloat16().double()
    return kept


def rotate(config: ModelConfig, x: Tensor) -> Tensor:
    """RoPE of x [T, heads, D] by complex multiplication, frequencies as in the Llama 3 paper's scaling."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half).double() / half)
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        assert scaling["rope_type"] == "llama3"
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
    angles = torch.outer(torch.arange(x.shape[0]).double(), frequencies)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gain.double()


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Heads [T, heads, D] -> [T, heads * D], query by query."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for position, query in enumerate(q):
        first = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head, vector in enumerate(query):
            keys, values = (x[first : position + 1, head // group] for x in (k, v))
            weights = torch.softmax(keys @ vector / q.shape[2] ** 0.5, 0)
            heads.append(weights @ values)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def emulate(checkpoint: PackedCheckpoint, tokens: Tensor, act: ActMode = "map", kv_bits: int | None = None) -> Tensor:
    """float64 logits [T, V] of one sequence."""
    config, kv = checkpoint.config, checkpoint.quantization["kv_cache"]
    bits = kv["bits"] if kv_bits is None else kv_bits
    embedding = checkpoint.tensor("model.embed_tokens.weight").double()
    x = embedding[tokens]
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."

        def linear(name: str, inputs: Tensor, prefix: str = prefix) -> Tensor:
            return apply_linear(checkpoint.linear(prefix + name), inputs, act)

        def gain(name: str, prefix: str = prefix) -> Tensor:
            return checkpoint.tensor(f"{prefix}{name}.weight")

        inputs = norm(x, gain("input_layernorm"), config.rms_norm_eps)
        q, k, v = (linear(f"self_attn.{n}_proj", inputs).unflatten(1, (-1, config.head_dim)) for n in "qkv")
        if config.qk_norm:
            q = norm(q, gain("self_attn.q_norm"), config.rms_norm_eps)
            k = norm(k, gain("self_attn.k_norm"), config.rms_norm_eps)
        q, k = rotate(config, q), rotate(config, k)
        if kv["k_mean"]:
            k = k - checkpoint.tensor(f"{prefix}self_attn.k_mean")
        if kv["qk_hadamard"]:
            q, k = hadamard_blocks(q, config.head_dim), hadamard_blocks(k, config.head_dim)
        k, v = (rounded_cache(part, bits, kv["sink_tokens"]) for part in (k, v))
        x = x + linear("self_attn.o_proj", attend(q, k, v, config.sliding_windows[index]))
        inputs = norm(x, gain("post_attention_layernorm"), config.rms_norm_eps)
        gate = linear("mlp.gate_proj", inputs)
        x = x + linear("mlp.down_proj", gate * torch.sigmoid(gate) * linear("mlp.up_proj", inputs))
    x = norm(x, checkpoint.tensor("model.norm.weight"), config.rms_norm_eps)
    tied = config.tie_word_embeddings
    return x @ (embedding if tied else checkpoint.tensor("lm_head.weight").double()).T


def random_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, 300, (rows, length), generator=torch.Generator().manual_seed(5))


def check(checkpoint: PackedCheckpoint, act: ActMode = "map", kv_bits: int | None = None) -> None:
    """Logits are equal to float32 tolerance until, in a sequence, a value lies on the border between two codes.

    Such a one goes to one side in float32 and to the other in float64, which moves the rest of its sequence by about a
    code. So a quarter of the tokens must be equal, late ones (past the sinks and the windows) among them; a transform
    that is left out, or put in the wrong place, leaves none.
    """
    tokens = random_tokens(4, 18)
    logits = CausalLM(checkpoint, act=act, kv_bits=kv_bits).score(tokens)
    expected = torch.stack([emulate(checkpoint, sequence, act, kv_bits) for sequence in tokens])
    difference = (logits - expected).abs().amax(-1) / expected.std()
    is_equal = (difference < 1e-3).float()
    assert float(is_equal.mean()) > 0.25
    assert float(is_equal[:, 8:].mean()) > 0.1
    assert float(difference.max()) < 1.5


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_equal_a_float_emulation_for_every_recipe(recipe: str, packed_folder: PackedFolder) -> None:
    check(open_checkpoint(packed_folder("llama", recipe)))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_logits_equal_a_float_emulation_for_every_architecture(kind: str, packed_folder: PackedFolder) -> None:
    check(open_checkpoint(packed_folder(kind)))


@pytest.mark.parametrize("act", ["map", "a8", "a16"])
@pytest.mark.parametrize("kv_bits", [4, 16])
@pytest.mark.parametrize("recipe", ["dual", "quik"])
def test_logits_equal_a_float_emulation_in_every_mode(
    recipe: str, act: ActMode, kv_bits: int, packed_folder: PackedFolder
) -> None:
    check(open_checkpoint(packed_folder("llama", recipe)), act, kv_bits)


@pytest.mark.parametrize(
    "overrides", [{"sink_tokens": 0}, {"kv_hadamard": False}, {"kv_mean": False}, {"down_hadamard": 1}, {"kv_bits": 16}]
)
def test_logits_equal_a_float_emulation_without_each_transform(
    overrides: dict[str, object], packed_folder: PackedFolder
) -> None:
    check(open_checkpoint(packed_folder("llama", "dual", **overrides)))


def test_modes_differ(packed_folder: PackedFolder) -> None:
    """The comparisons above would notice a mode that is not obeyed."""
    checkpoint = open_checkpoint(packed_folder("llama"))
    tokens = random_tokens(1, 24)
    modes: list[tuple[ActMode, int]] = [("map", 4), ("map", 16), ("a8", 4), ("a8", 16), ("a16", 4), ("a16", 16)]
    logits = [CausalLM(checkpoint, act=act, kv_bits=bits).score(tokens) for act, bits in modes]
    for index, one in enumerate(logits):
        for other in logits[:index]:
            assert float((one - other).abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("kv_bits", [4, 16])
def test_scores_do_not_depend_on_chunks(kind: str, kv_bits: int, packed_folder: PackedFolder) -> None:
    model = CausalLM(open_checkpoint(packed_folder(kind)), kv_bits=kv_bits)
    tokens = random_tokens(1, 37)
    whole = model.score(tokens)
    for chunk in (1, 17, 36):
        assert torch.equal(model.score(tokens, chunk), whole), chunk


@pytest.mark.parametrize("recipe", ["quik", "w4a16"])
def test_scores_do_not_depend_on_chunks_with_float_segments(recipe: str, packed_folder: PackedFolder) -> None:
    model = CausalLM(open_checkpoint(packed_folder("llama", recipe)))
    tokens = random_tokens(1, 37)
    whole = model.score(tokens)
    for chunk in (1, 20):
        assert torch.equal(model.score(tokens, chunk), whole), chunk


def test_scores_do_not_depend_on_threads_or_later_tokens(packed_folder: PackedFolder) -> None:
    model = CausalLM(open_checkpoint(packed_folder("llama")))
    tokens = random_tokens(1, 128)
    before = torch.get_num_threads()
    try:
        scores = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            scores.append(model.score(tokens))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(model.score(tokens[:, :50]), scores[0][:, :50])


def test_sequences_of_a_batch_do_not_see_each_other(packed_folder: PackedFolder) -> None:
    """One step of three sequences, a prefill, a continued one and a decode, gives what each gives alone."""
    model = CausalLM(open_checkpoint(packed_folder("llama")))
    texts = random_tokens(3, 40)
    alone = model.score(texts)
    cache = model.allocate_cache(12, 3)
    tables = torch.tensor([[11, 3, 7], [0, 5, 2], [4, 10, 6]], dtype=torch.int32)
    slots = torch.tensor([2, 0, 1], dtype=torch.int32)
    computed = [0, 0, 0]
    results: list[list[Tensor]] = [[], [], []]
    for counts in ([20, 7, 39], [20, 33, 1]):
        ids = torch.cat([texts[b, computed[b] : computed[b] + count] for b, count in enumerate(counts)])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        computed = [done + count for done, count in zip(computed, counts, strict=True)]
        batch = cache.batch(tables, starts, torch.tensor(computed, dtype=torch.int32), slots)
        logits = model.logits(model.forward(ids, batch, cache))
        for result, part in zip(results, logits.split(counts), strict=True):
            result.append(part)
    assert torch.equal(torch.stack([torch.cat(parts) for parts in results]), alone)


def test_windows_hide_what_has_passed(packed_folder: PackedFolder) -> None:
    """Two layers with a window of 6 reach 10 tokens back: nothing before that matters, everything after does."""
    model = CausalLM(open_checkpoint(packed_folder("mistral")))
    tokens = random_tokens(1, 60)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 300
    difference = (model.score(tokens) - model.score(changed)).abs().amax(-1)[0]
    assert torch.equal(difference[:10], torch.zeros(10)) and torch.equal(difference[21:], torch.zeros(39))
    assert bool((difference[10:16] > 0).all())


def test_paths_name_every_launch(packed_folder: PackedFolder) -> None:
    model = CausalLM(open_checkpoint(packed_folder("llama")))
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert model.paths() == {f"model.layers.{i}.{name}": "reference-cpu" for i in (0, 1) for name in names}
