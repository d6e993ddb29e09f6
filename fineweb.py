"""
FineWeb-Edu, or your own text, as token shards for the training scripts.

    python fineweb.py                # 10 billion tokens: 30 GB to download, 20 GB of shards
    python fineweb.py --streaming --max-tokens 1_000_000_000  # stores nothing but the shards
    python fineweb.py --files a.jsonl b.parquet c.txt --out my_shards
    python fineweb.py --out my_shards --verify                # reads every byte again

Files are JSON Lines (.jsonl, .json), Parquet, or plain text (.txt, one document each); all but
Parquet may be compressed (.gz, .zst). A document becomes <|endoftext|> and then its ordinary GPT-2
encoding; the shards hold these tokens in order, the first one for validation. They are uint16 .npy
files named like build-nanogpt's, with a manifest.json. After an interruption the same command
continues after the last whole shard.

Threads encode: tiktoken releases Python's lock, so they use all cores, and nothing is pickled or
spawned.
"""

import collections
import contextlib
import copy
import hashlib
import io
import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from common import (EOT, VOCAB_SIZE, ArgumentParser, UserError, encode_document, get_tokenizer,
                    print0, replacing, run_cli)

SEPARATOR = "<|endoftext|>"
CHUNK = 1 << 20  # characters of documents that one task encodes, and bytes of JSON read at once
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}

# -----------------------------------------------------------------------------
# Documents. Readers yield (list of documents, part of the source read so far: 0 to 1, or None)


def read_files(files, column):
    sizes = [os.path.getsize(file) for file in files]
    for i, file in enumerate(files):
        try:
            for texts, part in find_reader(file)(file, column):
                yield texts, (sum(sizes[:i]) + part * sizes[i]) / max(sum(sizes), 1)
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 (byte {error.start}): convert it, for example "
                            "with iconv -f LATIN1 -t UTF-8") from error
        except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
            raise UserError(f"{file} cannot be read ({error}): is it whole, and what its name "
                            "says?") from error


def find_reader(file):
    path = Path(file)
    readers = {".jsonl": read_jsonl, ".json": read_jsonl, ".txt": read_txt}
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSION else path.suffix
    reader = read_parquet if path.suffix == ".parquet" else readers.get(suffix)
    if reader is None:
        raise UserError(f"{file}: unknown suffix; known are .parquet, and .jsonl, .json, .txt, "
                        "also with .gz or .zst")
    return reader


def decompress(raw):
    """Binary stream of what raw holds. (The package zstandard takes a cut file for a whole one.)"""
    import pyarrow as pa

    compression = COMPRESSION.get(Path(raw.name).suffix)
    return io.BufferedReader(pa.CompressedInputStream(raw, compression)) if compression else raw


def read_txt(file, column):
    with open(file, "rb") as raw:
        yield [decompress(raw).read().decode("utf-8-sig")], 1


def read_jsonl(file, column):
    size, line = os.path.getsize(file), 1
    with open(file, "rb") as raw:
        stream = decompress(raw)
        while block := stream.read(CHUNK) + stream.readline():
            if line == 1 and block.lstrip().startswith(b"["):  # an array instead of lines
                rows = json.loads(block + stream.read())
                block = "\n".join(map(json.dumps, rows)).encode()
            yield parse_jsonl(block, column, file, line), raw.tell() / size
            line += block.count(b"\n")


def parse_jsonl(block, column, file, line):
    """Documents in whole lines of JSON, the first of them line number `line` of file.

    pyarrow parses nothing but the one column, as text (datasets makes dates of texts that look like
    dates). What it refuses Python parses again, which knows lone surrogates and an error's line.
    """
    import pyarrow as pa
    import pyarrow.json as pj

    options = pj.ParseOptions(explicit_schema=pa.schema([(column, pa.string())]),
                              unexpected_field_behavior="ignore")
    one_block = pj.ReadOptions(block_size=len(block) + 1)
    try:
        texts = pj.read_json(io.BytesIO(block), one_block, options)[column]
        if texts.null_count == 0:
            return texts.to_pylist()
    except ValueError:
        pass
    rows = enumerate(block.split(b"\n"), line)
    return [parse_row(row, column, f"{file}, line {n}") for n, row in rows if row.strip()]


def parse_row(row, column, where):
    try:
        row = json.loads(row)
    except ValueError as error:  # as is UnicodeDecodeError
        raise UserError(f"{where}: not JSON in UTF-8 ({error}): correct or delete it") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: {json.dumps(row)[:40]} is not an object with a column "
                        f"{column!r}: correct or delete it")
    check_columns(row, column, where)
    return check_text(row[column], column, where)


def read_parquet(file, column):
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        check_columns(parquet.schema_arrow.names, column, file)
        batches = parquet.iter_batches(256, columns=[column])
        yield from read_batches(batches, column, file, parquet.metadata.num_rows)


def read_hub(dataset, name, split, streaming, column):
    """Documents of a dataset of the Hugging Face hub, or of a folder that load_dataset reads."""
    source = f"dataset {dataset} ({name}, {split})"
    try:
        from datasets import load_dataset

        rows = load_dataset(dataset, name, split=split, streaming=streaming)
        check_columns(rows.column_names or [column], column, source)
        info = (rows.info.splits or {}).get(split)
        batches = rows.select_columns([column]).with_format("arrow").iter(256)
        yield from read_batches(batches, column, source, info and info.num_examples)
    except UserError:
        raise
    except Exception as error:  # datasets, huggingface_hub, httpx and fsspec have their own
        url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise UserError(f"{source} could not be read from {url} ({type(error).__name__}: {error}): "
                        "check the names and the network, or get its files by other means and give "
                        "them with --files") from error


def read_batches(batches, column, source, num_rows):
    done = 0
    for batch in batches:
        texts = batch[column].to_pylist()
        for n, text in enumerate(texts, done):
            check_text(text, column, source, n)
        done += len(texts)
        yield texts, done / num_rows if num_rows else None


def check_columns(names, column, where):
    if column not in names:
        raise UserError(f"{where}: no column {column!r}, but {', '.join(names) or 'none at all'}: "
                        "give --text-column")


def check_text(text, column, where, row=None):
    if not isinstance(text, str):
        where = where if row is None else f"{where}, row {row}"
        raise UserError(f"{where}: column {column!r} holds {str(text)[:40]}, not text: remove the "
                        "row, or give --text-column")
    return text


def select(batches, skip, max_docs):
    """Documents number skip to max_docs (None: all), in lists of about CHUNK characters."""
    done = 0
    for texts, part in batches:
        wanted = texts[max(skip - done, 0) : None if max_docs is None else max_docs - done]
        done += len(texts)
        part = max(part or 0, done / max_docs) if max_docs else part
        chunk_of = np.cumsum([len(text) for text in wanted]) // CHUNK
        for _, chunk in itertools.groupby(zip(chunk_of, wanted), key=lambda pair: pair[0]):
            yield [text for _, text in chunk], part
        if max_docs is not None and done >= max_docs:
            return


# -----------------------------------------------------------------------------
# Tokens

thread = threading.local()


def encode(batches, workers):
    """(uint16 tokens, part) of each list of documents, in order; holds at most 4 lists a worker."""
    get_tokenizer()  # once, before the threads ask for it
    pool, tasks = ThreadPoolExecutor(workers), collections.deque()
    try:
        for texts, part in batches:
            tasks.append((pool.submit(encode_documents, texts), part))
            if len(tasks) == 4 * workers:
                task, part = tasks.popleft()
                yield task.result(), part
        for task, part in tasks:
            yield task.result(), part
    finally:
        pool.shutdown(cancel_futures=True)


def encode_documents(texts):
    """One uint16 array: each text's tokens behind <|endoftext|>.

    One call of tiktoken for all, so that threads seldom wait for Python's lock, and a tokenizer for
    each thread: those that share a regular expression slow each other down.
    """
    if not hasattr(thread, "tokenizer"):
        thread.tokenizer = copy.deepcopy(get_tokenizer())
    joined = SEPARATOR + SEPARATOR.join(texts)
    if joined.count(SEPARATOR) == len(texts):
        try:
            ids = thread.tokenizer.encode_to_numpy(joined, allowed_special={SEPARATOR})
            return to_uint16(ids)
        except ValueError:  # lone surrogates, or very much white space
            pass
    return to_uint16([id for text in texts for id in encode_document(text, thread.tokenizer)])


def to_uint16(ids):
    ids = np.asarray(ids)
    if len(ids) and not 0 <= ids.min() <= ids.max() < VOCAB_SIZE:
        bad = ids[(ids < 0) | (ids >= VOCAB_SIZE)][0]
        raise UserError(f"token id {bad} is not GPT-2's (0 to {VOCAB_SIZE - 1}): shards are for "
                        "its tokenizer only")
    return ids.astype("<u2", copy=False)


def trim(stream, skip, limit):
    """Leave out the first skip tokens; end after the document that reaches limit tokens, those
    included (None: never).

    Each array of the stream holds whole documents; skip reaches into the first document at most.
    """
    for tokens, part in stream:
        if limit is not None and len(tokens) >= limit:
            ends = np.append(np.flatnonzero(tokens == EOT)[1:], len(tokens))
            yield tokens[skip : ends[np.searchsorted(ends, limit)]], 1
            return
        yield tokens[skip:], part
        skip, limit = 0, limit and limit - len(tokens)


def show_progress(stream, done, max_tokens):
    """Arrays of stream, with a bar on a terminal; done: tokens of an earlier run."""
    with tqdm(desc="tokens", initial=done, unit="tok", unit_scale=True, disable=None) as bar:
        for tokens, part in stream:
            yield tokens
            bar.update(len(tokens))
            ends = part and round(bar.n / part), max_tokens
            bar.total = min(filter(None, ends), default=None)


# -----------------------------------------------------------------------------
# Shards


def write_shards(arrays, folder, manifest):
    """Write token arrays as shards after those that manifest lists, and complete it.

    What fits in one shard altogether is split after the last document that ends within the first
    tenth. Holds two shards in memory: one is saved by a thread while the next one fills.
    """
    size = manifest["shard_size"]
    buffer, used = np.empty(size, "<u2"), 0
    with ThreadPoolExecutor(1) as saver:
        saved = saver.submit(int)  # nothing yet
        for tokens in map(to_uint16, arrays):
            while len(tokens):
                if used == size:
                    saved.result()
                    saved = saver.submit(save_shard, buffer, folder, manifest)
                    buffer, used = np.empty(size, "<u2"), 0
                n = min(size - used, len(tokens))
                buffer[used : used + n] = tokens[:n]
                tokens, used = tokens[n:], used + n
        saved.result()
    rest = buffer[:used]
    for shard in [rest] if manifest["shards"] else np.split(rest, [first_tenth(rest)]):
        if len(shard):
            save_shard(shard, folder, manifest)
    manifest["complete"] = True
    save_manifest(folder, manifest)


def first_tenth(tokens):
    """Length of the documents that end within the first tenth of tokens, at least one."""
    starts = np.flatnonzero(tokens == EOT)
    if len(starts) < 2:
        raise UserError(f"{len(starts)} documents with {len(tokens)} tokens are too little for a "
                        "validation and a training shard: give two documents or more, or a "
                        "--shard-size below the number of tokens")
    return starts[max(np.searchsorted(starts, len(tokens) / 10, side="right") - 1, 1)]


def save_shard(tokens, folder, manifest):
    """Save tokens as the next shard, and the manifest with it.

    "documents" are those begun in it, "tail" the length so far of the last one begun.
    """
    shards = manifest["shards"]
    name = f"edufineweb_{'train' if shards else 'val'}_{len(shards):06d}.npy"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
    content = [header.getvalue(), memoryview(tokens).cast("B")]
    write_file(folder / name, content)
    starts = np.flatnonzero(tokens == EOT)
    tail = len(tokens) - int(starts[-1]) if len(starts) else shards[-1]["tail"] + len(tokens)
    shards.append({"name": name, "tokens": len(tokens), "documents": len(starts), "tail": tail,
                   "sha256": sha256(content)})
    save_manifest(folder, manifest)
    print0(f"{folder / name}: {len(tokens):,} tokens")


def sha256(content):
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return digest.hexdigest()


def write_file(path, content):
    try:
        with replacing(path) as file:
            file.writelines(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): make room, and the same "
                        "command continues, or choose another --out") from error


# -----------------------------------------------------------------------------
# The folder and its manifest


def save_manifest(folder, manifest):
    for key in ("documents", "tokens"):
        manifest[key] = sum(shard[key] for shard in manifest["shards"])
    write_file(folder / "manifest.json", [json.dumps(manifest, indent=1).encode()])


def open_folder(folder, settings):
    """The manifest with which a run starts or continues; settings: all that changes the shards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made ({error.strerror}): choose "
                        "another") from error
    manifest = load_manifest(folder)
    if manifest is None:
        if any(folder.glob("*.npy")):
            raise UserError(f"--out {folder} holds .npy files but no manifest.json: choose "
                            "another, or delete it")
        return settings | {"complete": False, "documents": 0, "tokens": 0, "shards": []}
    for key, value in settings.items():
        if manifest.get(key) != value:
            raise UserError(f"--out {folder} was made with {key} = {manifest.get(key)}, not "
                            f"{value}: choose another, or delete it")
    if not manifest["complete"]:
        whole = lambda shard: find_fault(folder, shard) is None
        manifest["shards"] = list(itertools.takewhile(whole, manifest["shards"]))
    return manifest


@contextlib.contextmanager
def lock(folder):
    """Keep a second run out of folder; remove it in the end if there is nothing in it."""
    file_lock = FileLock(folder / ".lock", timeout=0)
    try:
        file_lock.acquire()
    except Timeout as error:
        raise UserError(f"--out {folder}: another fineweb.py is writing there") from error
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written ({error.strerror}): choose "
                        "another") from error
    try:
        yield
    finally:
        file_lock.release()
        (folder / ".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def load_manifest(folder):
    try:
        return json.loads((folder / "manifest.json").read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/manifest.json cannot be read ({error}): delete the folder, "
                        "write it again") from error


def find_fault(folder, shard):
    """What is wrong with a shard that the manifest lists, at a glance; None if nothing."""
    try:
        # np.load would also take zip files
        tokens = np.lib.format.open_memmap(folder / shard["name"], mode="r")
    except (OSError, ValueError, EOFError) as error:
        return f"cannot be read ({error})"
    if tokens.shape != (shard["tokens"],) or tokens.dtype != np.uint16:
        return (f"holds {tokens.dtype} of shape {tokens.shape}, but manifest.json says "
                f"{shard['tokens']} uint16 tokens")
    return None


def check_manifest(folder):
    """The manifest of a finished folder (None if it has none), compared with names and lengths."""
    folder = Path(folder)
    manifest = load_manifest(folder)
    if manifest is None:
        return None
    if not manifest["complete"]:
        raise UserError(f"{folder} is not finished: the same fineweb.py command continues")
    for shard in manifest["shards"]:
        if fault := find_fault(folder, shard):
            raise UserError(f"{folder / shard['name']} {fault}: delete the folder, write it again")
    listed = {shard["name"] for shard in manifest["shards"]}
    if extra := {path.name for path in folder.glob("*.npy")} - listed:
        raise UserError(f"{folder / min(extra)} is not in manifest.json: move it away")
    return manifest


def verify(folder):
    """check_manifest and, for every byte, the sha256 of each shard."""
    manifest = check_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder}: no manifest.json to verify against; fineweb.py writes one")
    for shard in tqdm(manifest["shards"], desc="verify", disable=None):
        with open(Path(folder) / shard["name"], "rb") as file:
            if sha256(iter(lambda: file.read(CHUNK), b"")) != shard["sha256"]:
                raise UserError(f"{file.name} has changed since it was written (sha256): write the "
                                "folder again")
    return manifest


def summary(folder, manifest):
    shards, size, tokens = manifest["shards"], manifest["shard_size"], manifest["tokens"]
    val, last = shards[0]["tokens"], shards[-1]["tokens"]
    text = (f"{folder}: {manifest['documents']:,} documents, {tokens:,} tokens: {val:,} for "
            f"validation, {tokens - val:,} for training in {len(shards) - 1} shards")
    if val > tokens / 2:
        text += ("\nnote: most of it is for validation, which takes a whole shard: delete the "
                 f"folder and choose a --shard-size below {size:,} to train on more")
    if last < size:
        text += (f"\nthe last shard is short on purpose ({last:,} of {size:,} tokens): the "
                 "documents end there")
    return text


# -----------------------------------------------------------------------------
# Command


def parse_args(argv):
    parser = ArgumentParser(__doc__)
    add, source = parser.add_argument, parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", default="HuggingFaceFW/fineweb-edu",
                        help="on the Hugging Face hub (%(default)s)")
    source.add_argument("--files", nargs="+", metavar="F", help="your own files instead")
    add("--name", default="sample-10BT", help="configuration of the dataset (%(default)s)")
    add("--split", default="train", help="of the dataset (%(default)s)")
    add("--streaming", action="store_true", help="read while it downloads, keep no copy")
    add("--text-column", default="text", help="column or JSON field with the text (%(default)s)")
    add("--out", type=Path, default=Path("edu_fineweb10B"), help="folder to write (%(default)s)")
    add("--shard-size", type=int, default=100_000_000, help="in tokens (%(default)s)")
    add("--max-docs", type=int, metavar="N", help="stop after N documents")
    add("--max-tokens", type=int, metavar="N", help="stop after the document that reaches N tokens")
    add("--workers", type=int, default=os.cpu_count() or 1, help="threads (%(default)s)")
    add("--verify", action="store_true", help="only compare the shards in --out with their sha256")
    args = parser.parse_args(argv)
    for flag in ("shard_size", "max_docs", "max_tokens", "workers"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} {value}: at least 1 is needed")
    return args


def describe(args):
    """All that the shards depend on, for the manifest."""
    if args.files is None:
        source = {"dataset": args.dataset, "name": args.name, "split": args.split}
    else:
        source = []
        for file in map(Path, args.files):
            find_reader(file)
            if not file.is_file():
                raise UserError(f"--files {file}: no such file")
            stat = file.stat()
            source.append({"file": file.name, "bytes": stat.st_size, "modified": stat.st_mtime_ns})
    return {"source": source, "text_column": args.text_column, "tokenizer": "gpt2",
            "shard_size": args.shard_size, "max_docs": args.max_docs,
            "max_tokens": args.max_tokens}


def tokenize(args, manifest):
    """Write the shards that manifest lacks."""
    save_manifest(args.out, manifest)  # counts, and finds out whether the folder can be written
    done, shards = manifest["tokens"], manifest["shards"]
    tail = shards[-1]["tail"] if done else 0  # there of the last document, which may go on
    if done:
        print0(f"{args.out}: continuing after {len(shards)} shards, {done:,} tokens")
    batches = (read_files(args.files, args.text_column) if args.files else
               read_hub(args.dataset, args.name, args.split, args.streaming, args.text_column))
    batches = select(batches, max(manifest["documents"] - 1, 0), args.max_docs)
    stream = encode(batches, args.workers)
    stream = trim(stream, tail, args.max_tokens and args.max_tokens - (done - tail))
    try:
        write_shards(show_progress(stream, done, args.max_tokens), args.out, manifest)
    finally:
        if not shards:
            (args.out / "manifest.json").unlink(missing_ok=True)


def main(argv=None):
    args = parse_args(argv)
    if args.verify:
        return print0(f"{summary(args.out, verify(args.out))}\nall sha256 are as in manifest.json")
    manifest = open_folder(args.out, describe(args))
    if manifest["complete"]:
        check_manifest(args.out)
        return print0(f"{args.out} is there already, nothing to do\n{summary(args.out, manifest)}")
    try:
        with lock(args.out):
            tokenize(args, manifest)
    except MemoryError as error:
        raise UserError(f"out of memory: lower --shard-size {args.shard_size}, two shards are held "
                        "at once") from error
    except KeyboardInterrupt:
        print0(f"interrupted after {len(manifest['shards'])} shards: the same command continues")
        raise
    print0(summary(args.out, manifest))


if __name__ == "__main__":
    run_cli(main)
