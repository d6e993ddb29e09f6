"""
HellaSwag (Zellers et al., 2019): which of four endings continues a text? Used by the training
scripts, and alone:

    python hellaswag.py --checkpoint log/01_opt_single_gpu/DATE-TIME/step_019073.pt
    torchrun --nproc_per_node=8 hellaswag.py --model gpt2 --json scores.json

Completion style, as in Karpathy's build-nanogpt: the loss of each ending given the text. acc takes
the ending with the smallest sum over its tokens, acc_norm that with the smallest mean. GPT-2 124M
has acc 0.2859, acc_norm 0.2955.
"""

import contextlib
import importlib
import json
import os
import time
from pathlib import Path

import requests
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from common import (ArgumentParser, UserError, check_writable, choose_dtype, environment,
                    get_device, get_tokenizer, keep_freed_memory, load_canonical, load_weights,
                    print0, rendezvous, replacing, run_cli, write_json)

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{}.jsonl"

# ---- Examples: dicts with ctx, endings (4 texts) and label (0 to 3)


def load_examples(file=None, split="val"):
    """All examples of a JSON Lines file (default: hellaswag/hellaswag_<split>.jsonl, downloaded).

    Call it before a long run to know that the data are there. UserError where they are not, or a
    line is malformed.
    """
    path = Path(file or f"hellaswag/hellaswag_{split}.jsonl")
    try:
        if not file:
            download(URL.format(split), path)
        return parse_examples(path.read_bytes(), path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def download(url, path):
    """Make path hold all of url, every line valid; of several processes one downloads."""
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        with lock:
            if not path.is_file():
                fetch(url, path)
    finally:
        if not path.is_file():  # nothing stays of a failure
            with contextlib.suppress(OSError):
                os.unlink(lock.lock_file)
                path.parent.rmdir()


def fetch(url, path):
    try:
        response = requests.get(url, timeout=30)
        response.raise_for_status()
    except requests.RequestException as error:
        raise UserError(f"download of {url} failed ({type(error).__name__}): fetch it elsewhere "
                        f"and save it as {path}, or give hellaswag.py --file FILE") from error
    parse_examples(response.content, url)
    with replacing(path) as file:
        file.write(response.content)


def parse_examples(content, source):
    """Examples in the bytes of a JSON Lines file; UserError names source, line and field."""
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{source}, line {line}: not UTF-8: convert it, for example with "
                        "iconv -f LATIN1 -t UTF-8") from error
    examples = [parse_example(line, f"{source}, line {n}")
                for n, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise UserError(f"{source} holds no examples: each is a line of JSON with the fields ctx, "
                        "endings and label")
    return examples


def parse_example(line, where):
    try:
        example = dict(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object ({error}): correct or delete it") from error
    ctx, endings, label = map(example.get, ("ctx", "endings", "label"))
    four_texts = isinstance(endings, list) and len(endings) == 4 and all(map(is_text, endings))
    rules = {"ctx": (is_text(ctx), "a text that is not empty"),
             "endings": (four_texts, "4 texts, none empty"),
             "label": (str(label) in ("0", "1", "2", "3"), "0, 1, 2 or 3")}
    for field, (valid, wanted) in rules.items():
        if not valid:
            found = json.dumps(example[field])[:60] if field in example else "missing"
            raise UserError(f"{where}: field {field!r} must be {wanted}; it is {found}: correct or "
                            "delete the line")
    return example | {"label": int(label)}


def is_text(value):
    return isinstance(value, str) and value.strip() != ""


# ---- Scoring. A row is (ids of context and ending, how many are the ending's); an example has four


def make_rows(examples, block_size):
    """(rows, how many examples were cut): a row keeps its last block_size + 1 tokens.

    (The last is no input.) An ending loses tokens only where it alone is longer than block_size.
    """
    encode = get_tokenizer().encode_ordinary
    contexts = [encode(example["ctx"]) for example in examples]
    endings = [[encode(" " + ending) for ending in example["endings"]] for example in examples]
    rows = [((ctx + ending)[-block_size - 1 :], min(len(ending), block_size))
            for ctx, four in zip(contexts, endings) for ending in four]
    lengths = [len(ctx) + max(map(len, four)) for ctx, four in zip(contexts, endings)]
    return rows, sum(length > block_size + 1 for length in lengths)


def collate(rows):
    """idx, targets and mask, each (B, T), padded on the right; mask is true on endings' tokens."""
    tokens = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)  # (B, T + 1)
    masks = [torch.arange(len(ids)) >= len(ids) - n for ids, n in rows]
    mask = pad_sequence(masks, batch_first=True)
    return tokens[:, :-1], tokens[:, 1:], mask[:, 1:]


def row_losses(model, device, rows):
    """Summed loss (nats, float32) of each row's ending: (B,). The tokens cannot see the padding."""
    idx, targets, mask = collate(rows)
    positions = mask.flatten().nonzero().squeeze(1).to(device)  # (N,)
    logits = logits_at(model, idx.to(device), positions)
    losses = torch.zeros(mask.numel(), device=device)
    targets = targets[mask].to(device)
    losses[positions] = F.cross_entropy(logits.float(), targets, reduction="none")
    return losses.view(mask.shape).sum(dim=1)


def logits_at(model, idx, positions):
    """Logits (N, vocab_size) of idx (B, T) at positions (N,) of its flattened form.

    The head is given these positions alone: 50257 logits at each of the others would take much time
    and most of the memory.
    """
    if not hasattr(model, "lm_head"):
        return model(idx).flatten(0, 1)[positions]
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: args[0].flatten(0, 1)[positions])
    try:
        return model(idx)
    finally:
        hook.remove()


@torch.no_grad()
def score(model, device, rows, batch_size):
    """Summed loss (nats, float64) of every row's ending: (len(rows),), the same on all ranks.

    Rows of similar length share a batch, the longest first, so that memory peaks at once. Batches
    do not depend on the number of ranks, each is one rank's, and adding the others' zeros is exact:
    the result is that of any world size.
    """
    distributed = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    batches = [order[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    mine = batches[rank::world_size]
    bar = tqdm(mine, desc="HellaSwag", leave=False, disable=True if rank else None)
    outputs = [row_losses(model, device, [rows[i] for i in batch]) for batch in bar]  # no wait here
    losses = torch.zeros(len(rows), dtype=torch.float64)
    if mine:
        losses[sum(mine, [])] = torch.cat(outputs).cpu().double()
    if distributed:
        dist.all_reduce(losses)
    return losses


def evaluate(model, device, examples=None, batch_size=None):
    """Metrics of model(idx) -> logits (B, T, 50257) on examples (default: load_examples()).

    batch_size counts rows. With torch.distributed each rank does a part and all return the same.
    Draws no random number.
    """
    examples = examples or load_examples()
    rows, cut = make_rows(examples, model.config.block_size)
    if cut:
        print0(f"note: {cut} of {len(examples)} HellaSwag examples were cut to fit "
               f"{model.config.block_size} tokens")
    was_training, batch_size = model.training, batch_size or (8 if device.type == "cpu" else 64)
    model.eval()
    try:
        losses = score(model, device, rows, batch_size).view(-1, 4)
    finally:
        model.train(was_training)
    if not losses.isfinite().all():
        raise UserError("HellaSwag: a loss is not finite: a weight is not, or float16 overflows "
                        "(try --dtype float32)")
    means = losses / torch.tensor([n for _, n in rows]).view(-1, 4)
    labels = torch.tensor([example["label"] for example in examples])
    acc_norm, acc = ((values.argmin(dim=1) == labels).double().mean().item()
                     for values in (means, losses))
    return {"hellaswag_acc_norm": acc_norm, "hellaswag_acc": acc,
            "hellaswag_examples": len(examples)}


# ---- Command


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    source, data = (parser.add_mutually_exclusive_group() for _ in range(2))
    source.add_argument("--checkpoint", metavar="C", help="checkpoint of a training script")
    source.add_argument("--model", default="gpt2", metavar="M",
                        help="Hugging Face folder, or gpt2, gpt2-medium ... (%(default)s)")
    data.add_argument("--file", metavar="F", help="JSON Lines with ctx, endings and label")
    data.add_argument("--split", choices=("val", "train"), default="val",
                      help="of HellaSwag, downloaded to hellaswag/ (%(default)s)")
    add("--max-examples", type=int, metavar="N", help="only the first N")
    add("--batch-size", type=int, metavar="N", help="endings per forward pass")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--json", metavar="OUT", help="write the result there")
    args = parser.parse_args()
    for flag, value in (("--max-examples", args.max_examples), ("--batch-size", args.batch_size)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: at least 1 is needed")
    if args.json:
        check_writable(args.json)
    return args


def load_model(source, device, dtype):
    """01's model with the weights of source; its matmuls compute in dtype (name)."""
    weights, model_config = load_weights(source)
    model = importlib.import_module("01_opt_single_gpu").GPT(model_config).to(device)
    load_canonical(model, weights)
    mixed = torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")
    model.forward = mixed(model.forward)
    return model


def main():
    args = parse_args()
    device = get_device(args.device)
    plain = (args.dtype, device.type) == ("auto", "cpu")
    dtype = "float32" if plain else choose_dtype(args.dtype, device)[0]
    keep_freed_memory()
    if "RANK" in os.environ:
        dist.init_process_group("gloo", **rendezvous())
    examples = load_examples(args.file, args.split)[: args.max_examples]
    source = args.checkpoint or args.model
    model = load_model(source, device, dtype)
    start = time.perf_counter()
    result = evaluate(model, device, examples, args.batch_size)
    speed = len(examples) / (time.perf_counter() - start)
    print0(f"acc_norm {result['hellaswag_acc_norm']:.4f} | acc {result['hellaswag_acc']:.4f} | "
           f"{len(examples):,} examples | {dtype} on {device} | {speed:.1f} examples/s")
    if args.json and int(os.environ.get("RANK", 0)) == 0:
        write_json(args.json, result | {
            "model": source, "data": args.file or args.split, "dtype": dtype,
            "examples_per_sec": speed, "environment": environment(device)})


if __name__ == "__main__":
    run_cli(main)
