"""
HellaSwag (Zellers et al., 2019): which of four endings continues a text? Used by the training
scripts, and alone:

    python hellaswag.py --checkpoint log/01_opt_single_gpu/DATE-TIME/step_019073.pt
    torchrun --nproc_per_node=8 hellaswag.py --model gpt2 --json scores.json

Completion style, as in Karpathy's build-nanogpt: the loss of each ending given the text. acc takes
the ending with the smallest sum over its tokens, acc_norm that with the smallest mean. GPT-2 124M
has acc 0.2859, acc_norm 0.2955. A context is read once for its four endings where the model allows.
"""

import contextlib
import importlib
import itertools
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
from torch.overrides import TorchFunctionMode
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


# ---- Scoring. A row is (context, endings) in token ids: an example with its context read once for
# all four endings, or one of its endings where the context cannot be shared


def make_rows(examples, block_size, share=True):
    """(rows, how many examples were cut). Without share, four rows for each example.

    A context and an ending longer than block_size + 1 tokens (the last is no input) lose the
    context's first ones, and share nothing; an ending that alone is longer loses its own.
    """
    encode, rows, cut = get_tokenizer().encode_ordinary, [], 0
    for example in examples:
        context = encode(example["ctx"])
        endings = [encode(" " + ending) for ending in example["endings"]]
        fits = len(context) + max(map(len, endings)) <= block_size + 1
        cut += not fits
        if share and fits:
            rows.append((context, endings))
            continue
        for ending in endings:
            n, ids = min(len(ending), block_size), (context + ending)[-block_size - 1 :]
            rows.append((ids[:-n], [ids[-n:]]))
    return rows, cut


def collate(rows):
    """(idx, positions, branches, places, targets): what to read and what to predict.

    The first three are (B, T), padded on the right. A row is its context (branch 0), then its
    endings side by side (branches 1, 2 ...) without their last tokens; the positions of each go on
    from the context's. places (N,) in the flattened (B * T,) are where targets (N,) are predicted.
    """
    columns, places, targets = ([], [], []), [], []
    for context, endings in rows:
        c, row = len(context), [(id, i, 0) for i, id in enumerate(context)]
        for branch, ending in enumerate(endings, 1):
            places.append([c - 1, *range(len(row), len(row) + len(ending) - 1)])
            targets += ending
            row += [(id, i, branch) for i, id in enumerate(ending[:-1], c)]
        for column, values in zip(columns, zip(*row)):
            column.append(torch.tensor(values))
    idx, positions, branches = (pad_sequence(column, batch_first=True) for column in columns)
    starts = [i * idx.size(1) for i, (_, endings) in enumerate(rows) for _ in endings]
    places = [start + place for start, group in zip(starts, places) for place in group]
    return idx, positions, branches, torch.tensor(places), torch.tensor(targets)


class AttentionMask(TorchFunctionMode):
    """Within it, scaled_dot_product_attention takes mask (B, 1, T, T), not the causal one."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.calls = mask, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.calls += 1
            kwargs = kwargs | {"attn_mask": self.mask, "is_causal": False}
        return function(*args, **kwargs)


def can_share(model, device):
    """Whether positions and attention can be set from here; 00 writes attention by hand."""
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    with torch.no_grad(), AttentionMask(None) as attention:
        model(one)
    return attention.calls > 0 and hasattr(model, "wpe")


@contextlib.contextmanager
def shared_context(model, positions, branches):
    """Within it, tokens have these positions, and see the context and their own ending alone."""
    T = branches.size(1)
    causal = torch.ones(T, T, dtype=torch.bool, device=branches.device).tril()
    keys, queries = branches[:, None, :], branches[:, :, None]
    mask = causal & ((keys == 0) | (keys == queries))
    hook = model.wpe.register_forward_pre_hook(lambda *_: positions)
    try:
        with AttentionMask(mask[:, None]):
            yield
    finally:
        hook.remove()


def logits_at(model, idx, places):
    """Logits (N, vocab_size) of idx (B, T) at places (N,) of its flattened form.

    The head is given these places alone: 50257 logits at each of the others would take much time
    and most of the memory.
    """
    if not hasattr(model, "lm_head"):
        return model(idx).flatten(0, 1)[places]
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: args[0].flatten(0, 1)[places])
    try:
        return model(idx)
    finally:
        hook.remove()


def token_losses(model, device, rows):
    """Loss (nats, float32) of each token of each row's endings, in order: (N,)."""
    idx, positions, branches, places, targets = (t.to(device) for t in collate(rows))
    shared = any(len(endings) > 1 for _, endings in rows)
    with shared_context(model, positions, branches) if shared else contextlib.nullcontext():
        logits = logits_at(model, idx, places)
    return F.cross_entropy(logits.float(), targets, reduction="none")


@torch.no_grad()
def score(model, device, rows, batch_size):
    """Summed loss (nats, float64) of every ending of every row, the same on all ranks.

    Rows of similar length share a batch, the longest first, so that memory peaks at once. Batches
    do not depend on the number of ranks, each is one rank's, and adding the others' zeros is exact:
    the result is that of any world size.
    """
    distributed = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    lengths = [len(context) + sum(map(len, endings)) for context, endings in rows]
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    batches = [order[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    mine = batches[rank::world_size]
    bar = tqdm(mine, desc="HellaSwag", leave=False, disable=True if rank else None)
    outputs = [token_losses(model, device, [rows[i] for i in batch]) for batch in bar]  # no wait
    first = list(itertools.accumulate((len(endings) for _, endings in rows), initial=0))
    losses = torch.zeros(first[-1], dtype=torch.float64)
    if mine:
        numbered = [(first[i] + k, len(e)) for i in sum(mine, []) for k, e in enumerate(rows[i][1])]
        numbers, sizes = zip(*numbered)
        tokens = torch.cat(outputs).cpu().double().split(sizes)
        losses[list(numbers)] = torch.stack([part.sum() for part in tokens])
    if distributed:
        dist.all_reduce(losses)
    return losses


def evaluate(model, device, examples=None, batch_size=None):
    """Metrics of model(idx) -> logits (B, T, 50257) on examples (default: load_examples()).

    batch_size counts rows. With torch.distributed each rank does a part and all return the same.
    Draws no random number.
    """
    examples = examples or load_examples()
    was_training, batch_size = model.training, batch_size or (8 if device.type == "cpu" else 16)
    model.eval()
    try:
        rows, cut = make_rows(examples, model.config.block_size, can_share(model, device))
        if cut:
            print0(f"note: {cut} of {len(examples)} HellaSwag examples were cut to fit "
                   f"{model.config.block_size} tokens")
        losses = score(model, device, rows, batch_size).view(-1, 4)
    finally:
        model.train(was_training)
    if not losses.isfinite().all():
        raise UserError("HellaSwag: a loss is not finite: a weight is not, or float16 overflows "
                        "(try --dtype float32)")
    means = losses / torch.tensor([len(e) for _, endings in rows for e in endings]).view(-1, 4)
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
    add("--batch-size", type=int, metavar="N", help="contexts with their endings per forward pass")
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
