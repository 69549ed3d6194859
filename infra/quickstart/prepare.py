"""Make the quickstart's policy, once: tokenizer, initialisation, warm start, a Hugging Face folder in a cache.

Invariant: a policy folder exists under its final name only when it is complete; its manifest, written last, holds the
digest of the recipe (parameters and the code that carries it out) and of every file. A folder whose manifest doesn't
agree is never used: it is made again. The same seed and recipe give the same policy on the same machine.

    python -m infra.quickstart.prepare --out DIR --seed 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from infra.chat.chatml import IM_END
from infra.chat.export import write_template
from infra.chat.qwen3 import Qwen3Renderer
from infra.files import write_whole
from infra.quickstart.recipe import PolicyRecipe

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"


def prepare_policy(
    cache_dir: Path,
    *,
    seed: int = 0,
    recipe: PolicyRecipe | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """The folder of the warm-started policy in ``cache_dir``: made in about a CPU-minute, or reused at once.

    It holds config.json, generation_config.json, model.safetensors (fp32), tokenizer.json, tokenizer_config.json,
    chat_template.jinja, gyre.json and manifest.json.
    """
    recipe = recipe or PolicyRecipe()
    digest = recipe.digest()
    final = cache_dir / f"policy-seed{seed}-{digest[:12]}"
    if is_complete(final, digest):
        progress(f"reusing {final}")
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".making-") as scratch:
        made = Path(scratch) / "policy"
        made.mkdir()
        _make(made, recipe, seed, progress)
        _write_manifest(made, recipe, digest, seed)
        try:
            made.rename(final)
        except OSError:  # something has that name: another process's policy, or what a crash left
            if not is_complete(final, digest):
                shutil.rmtree(final)
                made.rename(final)
    return final


def is_complete(folder: Path, digest: str) -> bool:
    """Whether ``folder`` holds a finished policy of the recipe with this digest, every file as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        return bool(files) and manifest["recipe_digest"] == digest and files == _digests(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(folder: Path, recipe: PolicyRecipe, seed: int, progress: Callable[[str], None]) -> None:
    import torch  # here, so that a cached policy is found without it

    from infra.quickstart.model import make_model
    from infra.quickstart.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, train_tokenizer
    from infra.quickstart.warm_start import warm_start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # reductions depend on the number of threads, and two make this model slower
    started = time.process_time()
    try:
        tokenizer = train_tokenizer()
        tokenizer.save(str(folder / TOKENIZER))
        renderer = Qwen3Renderer(folder / TOKENIZER, compact_tools=True)
        progress(f"tokenizer: {renderer.vocab_size} tokens")
        model = make_model(
            recipe.shape,
            vocabulary=renderer.vocab_size,
            end_of_turn=renderer.im_end,
            padding=SPECIAL_TOKENS.index(END_OF_TEXT),
            seed=seed,
        )
        progress(f"model: {sum(p.numel() for p in model.parameters()):,} parameters")

        def report(step: int, loss: float) -> None:
            cpu = time.process_time() - started
            progress(f"warm start: step {step}/{recipe.warm_start.steps} loss {loss:.3f} ({cpu:.0f} CPU-s)")

        warm_start(model, renderer, recipe.warm_start, seed=seed, progress=report)
        model.generation_config.do_sample = True
        model.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)
        _write_tokenizer_config(folder, recipe.shape.positions)
        write_template(folder, renderer)
        # how the policy was taught to read its tools: the proxy renders them in the same way
        (folder / "gyre.json").write_text('{"compact_tools": true}\n', encoding="utf-8")
    finally:
        torch.set_num_threads(threads)


def _write_tokenizer_config(folder: Path, positions: int) -> None:
    from infra.quickstart.tokenizer import END_OF_TEXT, SPECIAL_TOKENS

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "extra_special_tokens": [token for token in SPECIAL_TOKENS if token not in (IM_END, END_OF_TEXT)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_manifest(folder: Path, recipe: PolicyRecipe, digest: str, seed: int) -> None:
    manifest = {"recipe": asdict(recipe), "recipe_digest": digest, "seed": seed, "files": _digests(folder)}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's policy, or reuse it; prints its folder.")
    parser.add_argument("--out", type=Path, required=True, help="cache folder; the policy is a folder in it")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = prepare_policy(
        options.out, seed=options.seed, progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(folder)


if __name__ == "__main__":
    main()
