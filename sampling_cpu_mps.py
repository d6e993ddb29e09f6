"""
Sample texts, then answer: same seed, other device, why is the text different?
Layer by layer, each compared with float32 on the CPU: weights and input -> logits -> probabilities
-> sampler -> texts; then two faults that devices have had: drawing ids of probability 0, and
attention that sees the future. Uses what there is of CPU, CUDA and MPS; on a CPU alone other number
formats, threads, batches and places in the random stream stand in for devices.
Run: python sampling_cpu_mps.py results.json --checkpoint log/SCRIPT/RUN/step_000100.pt --prompt Hi
"""

import importlib
import itertools
import math
from collections import Counter

import torch
import torch.nn as nn

from common import (EOT, VOCAB_SIZE, ArgumentParser, GPTConfig, UserError, check_writable, decode,
                    draw, environment, generate, get_device, get_tokenizer, init_weights,
                    load_canonical, load_weights, run_cli, to_canonical, write_json)

# Largest relative difference of logits that is rounding; of probabilities, PROBABILITY times that
TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
PROBABILITY = 10
# A faulty MPS drew 1 of 11 million ids of probability 0; these are 41 million
ZERO_DRAWS, ZERO_IDS = 20000, 4096
LENGTHS = (1, 4, 5, 63, 64, 257)  # around the tile sizes of attention kernels


def row(variant, difference, tolerance=0.0, **measured):
    """One comparison: "identical" at 0, "close" up to tolerance, else, also at nan, "differs"."""
    verdict = "identical" if difference == 0 else "close" if difference <= tolerance else "differs"
    return {"variant": variant, **measured, "difference": difference, "tolerance": tolerance,
            "verdict": verdict}


def relative(x, reference):
    """Largest difference over the largest value of reference; 0 of nothing, nan of any nan."""
    if reference.numel() == 0:
        return 0.0
    return ((x - reference).abs().max() / reference.abs().max()).item()


# -----------------------------------------------------------------------------
# Variants: one model, computed in several ways


class Variant(nn.Module):
    """A model and how it is computed: autocast dtype, CPU threads, in a batch of copies."""

    def __init__(self, model, dtype="float32", threads=None, copies=1):
        super().__init__()
        self.model, self.config = model, model.config
        self.dtype, self.threads, self.copies = dtype, threads, copies
        self.device = next(model.parameters()).device
        how = f", threads {threads}" if threads else f", batch {copies}" if copies > 1 else ""
        self.name = f"{self.device.type} {dtype}{how}"
        self.eval()

    def forward(self, idx):
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads or threads)
        mixed = self.dtype in ("float16", "bfloat16")
        with torch.autocast(self.device.type, getattr(torch, self.dtype), enabled=mixed):
            logits = self.model(idx.repeat(self.copies, 1))[: len(idx)]
        torch.set_num_threads(threads)
        return logits

    @torch.no_grad()
    def logits(self, idx):
        """Logits (B, T, vocab_size) of idx (B, T) cropped to the block size, on the CPU."""
        return self(idx[:, -self.config.block_size :].to(self.device)).cpu()

    def write(self, idx, generator, args):
        """Ids (num_samples, T + max_new_tokens) on the CPU: the prompt idx (1, T) continued."""
        start = idx.repeat(args.num_samples, 1).to(self.device)
        ids = generate(self, start, args.max_new_tokens, generator, args.temperature, args.top_k)
        return ids.cpu()


def make_variants(weights, model_config):
    """(variants, what is not available); the first, float32 on the CPU, is the reference."""
    GPT = importlib.import_module("01_opt_single_gpu").GPT
    present = [name for name in ("cpu", "cuda", "mps") if getattr(torch, name).is_available()]
    variants, missing = [], [name for name in ("cuda", "mps") if name not in present]
    for device in map(get_device, present):
        model = GPT(model_config)
        load_canonical(model, weights)
        dtypes = [dtype for dtype in ("bfloat16", "float16") if has_autocast(device, dtype)]
        variants += [Variant(model.to(device), dtype) for dtype in ["float32"] + dtypes]
        missing += [f"{device.type} {d}" for d in ("bfloat16", "float16") if d not in dtypes]
    double = GPT(model_config).double()
    load_canonical(double, weights)
    model, threads = variants[0].model, 1 if torch.get_num_threads() > 1 else 2
    variants += [Variant(double, "float64"), Variant(model, threads=threads)]
    return variants + [Variant(model, copies=8)], missing


def has_autocast(device, dtype):
    """Whether a matmul under autocast comes out in dtype: else it raises, or stays in float32."""
    ones, dtype = torch.ones(8, 8, device=device), getattr(torch, dtype)
    try:
        with torch.autocast(device.type, dtype):
            return (ones @ ones).dtype == dtype
    except (RuntimeError, TypeError):
        return False


def make_generator(device, seed, ahead=0):
    """A generator on device; with ahead numbers drawn first, at another place in its stream."""
    generator = torch.Generator(device).manual_seed(seed)
    if ahead:
        torch.rand(ahead, generator=generator, device=device)
    return generator


# -----------------------------------------------------------------------------
# Layers: each returns rows


def weights_rows(variants, idx, weights):
    """What of weights and input is not the same when it is read back from each device."""
    rows, sent = [], weights | {"input": idx}
    for model, device in {v.model: v.device for v in variants}.items():
        back = to_canonical(dict(model.named_parameters())) | {"input": idx.to(device).cpu()}
        changed = sum(not torch.equal(back[name].to(t.dtype), t) for name, t in sent.items())
        dtype = str(model.wte.weight.dtype).removeprefix("torch.")
        rows.append(row(f"{device.type} {dtype}", changed, tensors=len(back)))
    return rows


def sampler_rows(devices, p, seed, on_device, n=64):
    """n draws from p (V,), made once on the CPU: on each device, or back from there on the CPU."""
    def draws(p, device, ahead=0):
        p = p.to(device) if on_device else p.to(device).cpu().float()
        ids = torch.multinomial(p.repeat(n, 1), 1, generator=make_generator(p.device, seed, ahead))
        return ids.to(device).cpu()

    drawn = {device.type: draws(p, device) for device in devices}
    drawn["cpu float64"] = draws(p.double(), "cpu")
    if on_device:
        drawn["cpu, a draw ahead"] = draws(p, "cpu", ahead=1)
    return [row(name, (ids != drawn["cpu"]).sum().item(), draws=n) for name, ids in drawn.items()]


def impossible_rows(devices, seed):
    """Draws where every other id has probability 0: how many of those, or of no id, come out."""
    rows = []
    for device in devices:
        generator, logits = make_generator(device, seed), torch.zeros(500, ZERO_IDS, device=device)
        logits[:, 1::2] = -math.inf
        ids = torch.cat([draw(logits, generator).cpu() for _ in range(ZERO_DRAWS // 500)])
        impossible = (ids < 0) | (ids >= ZERO_IDS) | (ids % 2 == 1)
        rows.append(row(device.type, impossible.sum().item(), draws=len(ids)))
    return rows


def first_divergence(a, b):
    """How many ids two sequences share before they part; None where they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def text_rows(variants, idx, args):
    """Texts of each variant, drawn on the CPU and on its own device: where they part, and why."""
    cpu = variants[0]
    runs = [(v, cpu.device, 0) for v in variants[1:]] + [(cpu, cpu.device, 1)]
    runs += [(v, v.device, 0) for v in variants if v.device != cpu.device]
    reference = cpu.write(idx, make_generator("cpu", args.seed), args)
    rows = []
    for v, device, ahead in runs:
        ids = v.write(idx, make_generator(device, args.seed, ahead), args)
        sampler = device.type + ", a draw ahead" * ahead
        rows.append(compare_texts(cpu, v, reference, ids, idx.size(1), sampler))
    return rows


def compare_texts(cpu, variant, reference, ids, prompt_tokens, sampler):
    """A row for ids (B, T) of variant, reference (B, T) of cpu: difference is the tokens after they
    part."""
    shared = [first_divergence(a, b) for a, b in zip(reference.tolist(), ids.tolist())]
    n, sample = min(((n, i) for i, n in enumerate(shared, 1) if n is not None),
                    default=(ids.size(1), None))
    difference = cause = None
    if sample is not None:  # up to n all samples are equal, so their logits can be compared
        x, y = (v.logits(reference[:, :n])[sample - 1, -1] for v in (cpu, variant))
        difference = relative(y, x)
        rounding = "rounding" if sampler == "cpu" else "sampler"
        cause = rounding if difference <= TOLERANCE[variant.dtype] else "logits"
    return row(variant.name, ids.size(1) - n, sampler=sampler, shared=n - prompt_tokens,
               sample=sample, logit_difference=difference, cause=cause)


def causality_rows(variants, seed):
    """Change the last of T tokens: earlier logits may change by twice what the same input run again
    changes them."""
    plain = [v for v in variants if v.threads is None and v.copies == 1]
    lengths = [T for T in LENGTHS if T <= variants[0].config.block_size]
    rows = []
    for v, T in itertools.product(plain, lengths):
        idx = torch.randint(VOCAB_SIZE, (1, T), generator=make_generator("cpu", seed))
        other = torch.cat([idx[:, :-1], (idx[:, -1:] + 1) % VOCAB_SIZE], dim=1)
        first, again, changed = (v.logits(i)[0] for i in (idx, idx, other))
        change, noise = relative(changed[:-1], first[:-1]), relative(again, first)
        off = relative(first, variants[0].logits(idx)[0])
        rows.append(row(v.name, change, 2 * noise, T=T, off_reference=off))
        if not off <= TOLERANCE[v.dtype]:
            rows[-1]["verdict"] = "differs"
    return rows


def make_layers(variants, idx, weights, args):
    """Run and print the layers one by one: [{"name", "question", "verdict", "rows"}]."""
    cpu, others, seed = variants[0], variants[1:], args.seed
    devices = list(dict.fromkeys(v.device for v in variants))
    logits = {v: v.logits(idx)[0, -1].double() / (args.temperature or 1) for v in variants}  # (V,)
    p = {v: x.softmax(-1) for v, x in logits.items()}
    x = logits[cpu].float()
    softmax = {d: relative(x.to(d).softmax(-1).cpu(), x.double().softmax(-1)) for d in devices}
    return [
        layer("weights", "do weights and input arrive unchanged?",
              weights_rows(variants, idx, weights)),
        layer("logits", "same weights and input: are the logits the same?",
              [row(v.name, relative(logits[v], logits[cpu]), TOLERANCE[v.dtype]) for v in others]),
        layer("softmax", "same logits: are the probabilities those of float64?",
              [row(d.type, off, TOLERANCE["float32"]) for d, off in softmax.items()]),
        layer("probabilities", "own logits: are the probabilities the same?",
              [row(v.name, relative(p[v], p[cpu]), PROBABILITY * TOLERANCE[v.dtype])
               for v in others]),
        layer("sampler_on_device", "same probabilities and seed: how many draws differ there?",
              sampler_rows(devices, p[cpu].float(), seed, on_device=True)),
        layer("sampler_on_cpu", "the same moved to the CPU and drawn here: how many draws differ?",
              sampler_rows(devices, p[cpu].float(), seed, on_device=False)),
        layer("impossible_draws", "how many ids of probability 0 are drawn?",
              impossible_rows(devices, seed)),
        layer("texts", "whole texts: where do they part, and why?", text_rows(variants, idx, args)),
        layer("causality", "does a token change the logits before it?",
              causality_rows(variants, seed))]


def layer(name, question, rows):
    """Print a layer; its verdict is the worst of its rows."""
    verdict = max((r["verdict"] for r in rows), key=("identical", "close", "differs").index)
    print(f"\n{name}: {question} -> {verdict}")
    text = lambda x: f"{x:.1e}" if isinstance(x, float) else str(x)
    table = [list(rows[0])] + [[text(x) for x in r.values()] for r in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  " + "  ".join(map(str.ljust, line, widths)).rstrip(), flush=True)
    return {"name": name, "question": question, "verdict": verdict, "rows": rows}


# -----------------------------------------------------------------------------
# Command


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("results", nargs="?", help="JSON file to write")
    add("--checkpoint", help="of a training script, a Hugging Face folder, or gpt2, gpt2-medium "
                             "... (hub); default: a tiny model, random from the seed")
    add("--prompt", default="", help="text to continue; <|endoftext|> separates documents, an "
                                     "empty one starts a document; of a long one the end is seen")
    add("--device", default="auto", choices=("auto", "cuda", "mps", "cpu"),
        help="where the shown texts are computed (%(default)s)")
    add("--seed", type=int, default=1337, help="of the draws (%(default)s)")
    add("--num-samples", "--num_samples", type=int, default=2, help="texts (%(default)s)")
    add("--max-new-tokens", "--max_new_tokens", type=int, default=32,
        help="tokens of a text (%(default)s)")
    add("--temperature", type=float, default=1.0,
        help="0: always the most probable token (%(default)s)")
    add("--top-k", "--top_k", type=int, default=50,
        help="most probable tokens to draw from (%(default)s)")
    return parser.parse_args()


def check(args):
    """Raise UserError for a value that cannot be used."""
    for flag in ("num_samples", "max_new_tokens", "top_k"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: give 1 or more")
    if args.temperature != 0 and not 1e-30 <= args.temperature <= 1e30:  # float32's limits
        raise UserError(f"--temperature {args.temperature}: give 0 for the most probable token, or "
                        "1e-30 to 1e30")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed}: give a number from 0 to {2**63 - 1}")
    if args.results:
        check_writable(args.results)


def load(args):
    """(canonical weights, GPTConfig, what they are)."""
    if args.checkpoint is None:
        model_config = GPTConfig(n_layer=4, n_head=4, n_embd=64, block_size=512)  # all LENGTHS fit
        weights = init_weights(model_config, args.seed)
        return weights, model_config, f"random tiny weights from seed {args.seed}"
    weights, model_config = load_weights(args.checkpoint)
    if model_config.vocab_size != VOCAB_SIZE:
        raise UserError(f"--checkpoint {args.checkpoint}: the model has {model_config.vocab_size} "
                        f"ids, GPT-2's tokenizer {VOCAB_SIZE}: give a model trained with it")
    return weights, model_config, args.checkpoint


def encode_prompt(prompt):
    """Ids (1, T) of a prompt, <|endoftext|> being the separator; an empty one is that alone."""
    ids = get_tokenizer().encode(prompt, allowed_special={"<|endoftext|>"})
    return torch.tensor([ids or [EOT]])


def print_texts(variant, idx, args, source):
    """Write, show and return the texts without the prompt."""
    T, block_size = idx.size(1), variant.config.block_size
    cropped = f", the model sees the last {block_size}" if T > block_size else ""
    print(f"{source}; {variant.name}, drawn on the CPU, seed {args.seed}; "
          f"prompt: {T} tokens{cropped}")
    ids = variant.write(idx, make_generator("cpu", args.seed), args)
    texts = [decode(row) for row in ids[:, T:]]
    for i, text in enumerate(texts, 1):
        print(f"\nsample {i}: {args.prompt}{text}", flush=True)
    return texts


def answer(layers):
    """How many runs wrote the reference's text, and what parted the others."""
    rows = next(layer["rows"] for layer in layers if layer["name"] == "texts")
    causes = Counter(r["cause"] or "same text" for r in rows)
    counts = ", ".join(f"{n} {cause}" for cause, n in causes.most_common())
    return f"of {len(rows)} other runs: {counts}"


def main():
    args = parse_args()
    check(args)
    device = get_device(args.device)
    weights, model_config, source = load(args)
    idx = encode_prompt(args.prompt)
    variants, missing = make_variants(weights, model_config)
    shown = next(v for v in variants if v.device == device)  # the first of a device is float32
    texts = print_texts(shown, idx, args, source)
    layers = make_layers(variants, idx, weights, args)
    print(f"\n{answer(layers)}\nnot available: {', '.join(missing) or 'nothing'}")
    if args.results:
        write_json(args.results, {
            "answer": answer(layers), "texts": texts, "settings": vars(args), "weights": source,
            "prompt_tokens": idx.size(1), "environment": environment(device),
            "variants": [v.name for v in variants], "not_available": missing,
            "tolerances": TOLERANCE, "layers": layers})


if __name__ == "__main__":
    run_cli(main)
