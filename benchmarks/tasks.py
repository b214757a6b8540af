"""Score a source model and packed checkpoints of it on a multiple-choice task, offline. Writes `results/tasks-*.json`.

    pip install "lm-eval[hf]"
    w4a4 quantize smollm2-135m -o ./smollm2-w4a4
    git clone https://github.com/alexwarstadt/blimp
    python benchmarks/tasks.py smollm2-135m ./smollm2-w4a4 --blimp blimp/data -o tasks.json

lm-eval's own harness does the scoring, on its transformers models: the source's float weights, and each checkpoint
through `w4a4.serve.integrations.transformers`. The task is BLiMP (Warstadt et al., TACL 2020, CC BY 4.0) as lm-eval
defines it, on the first 15 minimal pairs of each of its 67 paradigms: two sentences of which one is grammatical. A
model is right where that one is more probable. Records that the file has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accuracy import git_commit
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from w4a4.calibrate.source import Source, open_source
from w4a4.export.checkpoint import open_checkpoint
from w4a4.kernels.layout import ActMode
from w4a4.serve.integrations.transformers import configure

PARADIGMS, PAIRS = 67, 15  # files of BLiMP, and lines taken of each
PATHS: tuple[tuple[ActMode, int], ...] = (("a16", 16), ("a8", 4), ("map", 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--blimp", type=Path, required=True, help="the folder `data` of a clone of BLiMP")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="pairs, for a quick look")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--commit", default="", help="of this repository, where git is not at hand")
    arguments = parser.parse_args()
    source = open_source(arguments.model)
    tokenizer = source.tokenizer()
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as pairs:
        pairs.writelines(first_pairs(arguments.blimp))
        pairs.flush()
        score(arguments, source, _Scores(arguments, tokenizer, task(pairs.name)))


def score(arguments: argparse.Namespace, source: Source, scores: _Scores) -> None:
    """Whatever is missing: the source, then each checkpoint with each of its activations and caches."""
    if scores.is_missing("source", "a16", 16):
        scores.add("source", "a16", 16, float_model(source))
    for folder in arguments.checkpoints:
        recipe = open_checkpoint(folder).quantization["recipe"]
        model = AutoModelForCausalLM.from_pretrained(folder)
        for act, kv in PATHS:
            if scores.is_missing(recipe, act, kv):
                configure(model, act, kv)
                scores.add(recipe, act, kv, model)


def first_pairs(folder: Path) -> list[str]:
    """The first lines of every paradigm's file. Raises ValueError where the folder holds other files than BLiMP's."""
    files = sorted(folder.glob("*.jsonl"))
    if len(files) != PARADIGMS:
        raise ValueError(f"{folder}: {len(files)} files *.jsonl, BLiMP has {PARADIGMS}")
    return [line for file in files for line in file.read_text().splitlines(keepends=True)[:PAIRS]]


def task(pairs: str) -> dict[str, Any]:
    """lm-eval's definition of BLiMP over a file of pairs."""
    return {
        "task": "blimp_sample",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": pairs}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_target": 0,
        "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def float_model(source: Source) -> torch.nn.Module:
    """The source's float32 weights in the transformers model of its configuration."""
    config = AutoConfig.for_model(**source.hf_config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: source.tensor(name) for name in source.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"the weights do not fit {type(model).__name__}: {missing[:3]}, {unexpected[:3]}")
    model.tie_weights()
    return model.eval()


class _Scores:
    def __init__(
        self, arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, blimp: dict[str, Any]
    ) -> None:
        self.arguments, self.tokenizer, self.blimp = arguments, tokenizer, blimp
        path: Path = arguments.output
        self.records: list[dict[str, Any]] = json.loads(path.read_text())["records"] if path.exists() else []

    def is_missing(self, recipe: str, act: str, kv: int) -> bool:
        mine = (self.arguments.model, recipe, act, kv)
        return mine not in {(r["model"], r["recipe"], r["act"], r["kv"]) for r in self.records}

    def add(self, recipe: str, act: str, kv: int, model: torch.nn.Module) -> None:
        harness_model = HFLM(pretrained=model, tokenizer=self.tokenizer, batch_size=self.arguments.batch)
        found = simple_evaluate(model=harness_model, tasks=[self.blimp], limit=self.arguments.limit, bootstrap_iters=0)
        result = found["results"]["blimp_sample"]
        examples = found["n-samples"]["blimp_sample"]["effective"]
        share = result["acc,none"]
        self.records.append(
            {
                "model": self.arguments.model,
                "recipe": recipe,
                "act": act,
                "kv": kv,
                "task": "BLiMP",
                "metric": "acc",
                "value": share,
                "stderr": (share * (1 - share) / (examples - 1)) ** 0.5,
                "examples": examples,
                "harness": f"lm-eval {version('lm-eval')}",
                "commit": self.arguments.commit or git_commit(),
            }
        )
        self.arguments.output.write_text(json.dumps({"records": self.records}, indent=1) + "\n")
        print(recipe, act, f"kv{kv}", f"{share:.4f}", flush=True)


if __name__ == "__main__":
    main()
