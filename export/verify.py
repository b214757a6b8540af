"""Everything that is wrong with a checkpoint on disk: hashes, names, dtypes, shapes and values of every tensor.

Where `open_checkpoint` stops at the first fault, this goes on and lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from w4a4.configs.architecture import ModelConfig
from w4a4.configs.errors import W4A4Error
from w4a4.configs.generation_config import FILE as GENERATION_CONFIG_FILE
from w4a4.configs.generation_config import read_generation_config
from w4a4.configs.safetensors_header import TensorEntry, read_header
from w4a4.configs.tokenizer_files import load_tokenizer
from w4a4.export.checkpoint import (
    MANIFEST_FILE,
    PackedCheckpoint,
    index_findings,
    model_config,
    read_config,
    read_index,
    shard_path,
    structure_findings,
)
from w4a4.export.finding import Finding
from w4a4.export.manifest import read_manifest, sha256_of
from w4a4.export.packed_linear import SUFFIXES, finite_findings
from w4a4.export.quantization_config import read_quantization_config

_SHARING_INPUT = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


def verify_checkpoint(path: Path, on_progress: Callable[[str], None] | None = None) -> list[Finding]:
    """Check the checkpoint folder `path`; an empty list means that nothing is wrong.

    Each step needs the one before: hashes always, then the index, the tokenizer's files and the headers, then names,
    dtypes and shapes, then values.

    Args:
        on_progress: called with the name of each file or linear before it is read.
    Raises:
        NotFoundError: no such folder.
        UnsupportedError: not ours, a newer major format, an unknown required feature or architecture: what follows
            could not be judged.
        CheckpointError: config.json itself is not readable or makes no sense.
    """
    report = on_progress or (lambda name: None)
    hf_config = read_config(path)
    quantization = read_quantization_config(hf_config)
    findings = _hash_findings(path, report)
    try:
        index = read_index(path)
    except W4A4Error as error:
        return [*findings, Finding("", "", "an index of safetensors files", error.message)]
    config = model_config(hf_config, index)
    findings += _text_findings(path, config, report)
    entries: dict[str, TensorEntry] = {}
    structure: list[Finding] = []
    for file in sorted(set(index.values())):
        try:
            header = read_header(shard_path(path, file))
        except W4A4Error as error:
            structure.append(Finding(file, "", "a readable safetensors file", error.message))
            continue
        structure += index_findings(index, file, header)
        entries.update(header)
    if not structure:  # else what cannot be seen would be called missing
        structure = list(structure_findings(config, quantization, entries, index))
    if structure:
        return findings + structure
    checkpoint = PackedCheckpoint(path, config, hf_config, quantization, entries, index)
    for prefix in checkpoint.linear_names:
        report(prefix)
        findings += checkpoint.linear_findings(prefix)
    findings += _shared_input_findings(checkpoint)
    for name in sorted(checkpoint.names()):
        if name.rpartition(".")[2] not in SUFFIXES:
            report(name)
            findings += finite_findings(name, checkpoint.stored(name), index[name])
    return findings


def _text_findings(path: Path, config: ModelConfig, report: Callable[[str], None]) -> list[Finding]:
    """What is wrong with the files that lie between text and tokens: those of the tokenizer, and where answers end."""
    report("tokenizer")
    findings = []
    readers: dict[str, Callable[[], object]] = {
        "tokenizer": lambda: load_tokenizer(path, config.vocab_size),
        GENERATION_CONFIG_FILE: lambda: read_generation_config(path),
    }
    for name, read in readers.items():
        try:
            read()
        except W4A4Error as error:
            findings.append(Finding(name, "", "what `generate` and `serve` can read", error.message))
    return findings


def _hash_findings(path: Path, report: Callable[[str], None]) -> list[Finding]:
    try:
        manifest = read_manifest(path)
    except W4A4Error as error:
        return [Finding(MANIFEST_FILE, "", "the size and hash of every file", error.message)]
    files: Mapping[str, dict[str, object]] = manifest["files"]
    findings = []
    present = {entry.name for entry in path.iterdir() if entry.name != MANIFEST_FILE}
    for name in sorted(present - set(files)):
        if name.startswith("."):  # a download leaves .cache and .gitattributes, which nothing reads
            continue
        findings.append(Finding(name, "", f"only files that {MANIFEST_FILE} names", "an extra file"))
    for name, expected in sorted(files.items()):
        if name not in present:
            findings.append(Finding(name, "", "the file", "a missing file"))
            continue
        try:
            file = shard_path(path, name)
        except W4A4Error as error:
            findings.append(Finding(name, "", "a regular file inside the folder", error.message))
            continue
        size = file.stat().st_size
        if size != expected["size"]:
            findings.append(Finding(name, "", f"{expected['size']} bytes", f"{size} bytes"))
            continue
        report(name)
        digest = sha256_of(file)
        if digest != expected["sha256"]:
            findings.append(Finding(name, "", f"sha256 {expected['sha256']}", digest))
    return findings


def _shared_input_findings(checkpoint: PackedCheckpoint) -> list[Finding]:
    """Linears that read one input must share its permutation, map and clip."""
    findings = []
    for layer in range(checkpoint.config.num_layers):
        for first, *others in _SHARING_INPUT:
            for suffix in ("input_perm", "block_precision", "act_clip"):
                for other in others:
                    ours, theirs = f"model.layers.{layer}.{other}.{suffix}", f"model.layers.{layer}.{first}.{suffix}"
                    present = [name in checkpoint.names() for name in (ours, theirs)]
                    if present == [False, False]:
                        continue
                    if not all(present) or not checkpoint.tensor(ours).equal(checkpoint.tensor(theirs)):
                        file = checkpoint.files.get(ours, "")
                        findings.append(Finding(file, ours, f"the same as {theirs}", "another value"))
    return findings
