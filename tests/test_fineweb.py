"""fineweb.py: documents in, token shards out; nothing lost, added, reordered or half-written."""

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
import fineweb  # noqa: E402
from common import EOT, UserError, encode_document, get_tokenizer  # noqa: E402

DOCUMENTS = ["Hello, world.", "", "a <|endoftext|> b", "two\r\nlines\n", "😀 emoji 👩‍👩‍👧",
             "2020-01-01", "nul \0, \x1c, \x85 and \u3000", "long " * 500, "<|endoftext|>",
             "  indented\n\n\n   text  ", "žluťoučký kůň", "last"]
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and limits")


def write_jsonl(path, texts, **more):
    rows = [{"id": i, "text": text, **more} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def corpus(path, n=4000):
    """About 4 kB a document, all different."""
    words = (ROOT / "fineweb.py").read_text().split()
    texts = [" ".join(words[i % 97 :: 1 + i % 3])[:4000] + f" {i}" for i in range(n)]
    return write_jsonl(path, texts)


def command(*args):
    return [sys.executable, str(ROOT / "fineweb.py"), *map(str, args)]


def cli(*args, **kwargs):
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=120, **kwargs)


@pytest.fixture
def run(capsys):
    """The command in this process; returns what it printed."""
    def main(*args):
        fineweb.main([str(arg) for arg in args])
        return capsys.readouterr().out
    return main


def shards(folder):
    """Name -> tokens, in the order of the stream."""
    paths = sorted(folder.glob("*.npy"), key=lambda path: path.name[-10:])
    return {path.name: np.load(path) for path in paths}


def stream(folder):
    return np.concatenate(list(shards(folder).values()))


def decode(tokens):
    """Documents of a token stream."""
    assert tokens[0] == EOT
    parts = np.split(tokens, np.flatnonzero(tokens == EOT)[1:])
    return [get_tokenizer().decode_bytes(part[1:].tolist()).decode() for part in parts]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -----------------------------------------------------------------------------
# Documents and tokens


def write_format(path, texts):
    rows = [{"text": text, "id": i} for i, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.name.endswith(".parquet"):
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=5)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines[:500]) + gzip.compress(lines[500:]))  # two members
    elif path.name.endswith(".zst"):
        path.write_bytes(zstandard.compress(lines[:500]) + zstandard.compress(lines[500:]))
    elif path.suffix == ".json":
        path.write_bytes(json.dumps(rows).encode())
    else:
        path.write_bytes(lines)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_round_trip(tmp_path, run, name):
    write_format(tmp_path / name, DOCUMENTS)
    printed = run("--files", tmp_path / name, "--out", tmp_path / "out", "--shard-size", 100)
    tokens = stream(tmp_path / "out")
    assert decode(tokens) == DOCUMENTS
    assert np.count_nonzero(tokens == EOT) == len(DOCUMENTS)
    assert tokens.tolist() == [id for text in DOCUMENTS for id in encode_document(text)]
    assert f"{len(DOCUMENTS)} documents, {len(tokens):,} tokens" in printed
    assert "short on purpose" in printed.splitlines()[-1]


@pytest.mark.parametrize("shard_size, noted", [(1.25, True), (4, False)])
def test_a_validation_shard_with_most_of_the_tokens_is_noted(tmp_path, run, shard_size, noted):
    """It is the first shard whole, though there may be little more."""
    write_format(tmp_path / "a.jsonl", DOCUMENTS)
    total = sum(len(encode_document(text)) for text in DOCUMENTS)
    printed = run("--files", tmp_path / "a.jsonl", "--out", tmp_path / "out",
                  "--shard-size", int(total / shard_size))
    assert ("note: most of it is for validation" in printed) == noted


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst"])
def test_text_file_is_one_document_byte_for_byte(tmp_path, run, suffix):
    texts = ["one\r\ntwo\rthree\n\n", "<|endoftext|>\né"]
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(suffix).suffix, bytes)
    files = [tmp_path / f"{i}{suffix}" for i in range(2)]
    for file, text in zip(files, texts):
        file.write_bytes(compress(text.encode()))
    run("--files", *files, "--out", tmp_path / "out")
    assert decode(stream(tmp_path / "out")) == texts


def test_json_is_read_as_text_whatever_else_the_rows_hold(tmp_path, run):
    rows = [{"text": "2020-01-01T00:00:00"}, {"text": "12", "new": 1},
            {"text": "c", "new": {"x": ["y"]}, "id": "s"}]
    lines = [json.dumps(row) for row in rows] + ["", '{"text": "lone \\ud800 surrogate"}', "\r"]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    run("--files", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    texts = ["2020-01-01T00:00:00", "12", "c", "lone \ufffd surrogate"]
    assert decode(stream(tmp_path / "out")) == texts


@pytest.mark.parametrize("text", ["a" * 10**6, " " * 10**6, "!" * 10**6, "x" + " \n" * 10**6 + "y",
                                  "\ud800" + " " * 10**6 + "z"],
                         ids=["letters", "spaces", "marks", "spaces-inside", "surrogate"])
def test_extreme_documents(text):
    tokens = fineweb.encode_documents(["before", text, "after"])
    assert tokens.dtype == np.uint16
    assert decode(tokens) == ["before", text.replace("\ud800", "\ufffd"), "after"]


@given(st.text(alphabet="a'sé1. \n\t\r\x1c\x1f\x85\xa0\u180e\u2003\u3000\u200b", max_size=40))
@example("x" + " " * 9 + "\x1cy")
@settings(max_examples=300, deadline=None)
def test_cutting_at_white_space_changes_no_token(text):
    with pytest.MonkeyPatch.context() as patch:
        pattern = common.LONG_SPACE.pattern.replace("1000", "2")
        patch.setattr(common, "LONG_SPACE", re.compile(pattern))
        assert encode_document(text) == [EOT, *get_tokenizer().encode_ordinary(text)]


@given(st.lists(st.text(max_size=20) | st.just("<|endoftext|>"), min_size=1))
@settings(max_examples=100, deadline=None)
def test_together_and_alone_give_the_same_tokens(texts):
    alone = [id for text in texts for id in encode_document(text)]
    assert fineweb.encode_documents(texts).tolist() == alone


def test_encoding_reads_only_a_few_lists_ahead():
    taken = []
    lists = ((taken.append(i) or [str(i)], None) for i in range(100))
    for i, (tokens, _) in enumerate(fineweb.encode(lists, workers=2)):
        assert decode(tokens) == [str(i)]
        assert len(taken) <= i + 8


@given(st.lists(st.lists(st.text(max_size=9), max_size=5), max_size=5), st.integers(0, 12),
       st.none() | st.integers(1, 12))
def test_select(batches, skip, max_docs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fineweb, "CHUNK", 10)
        chosen = fineweb.select([(texts, None) for texts in batches], skip, max_docs)
        lists = [texts for texts, _ in chosen]
    assert sum(lists, []) == sum(batches, [])[skip:max_docs]
    assert all(texts and sum(map(len, texts)) < 20 for texts in lists)


@pytest.mark.parametrize("flag, n, documents", [
    ("--max-docs", 5, 5), ("--max-tokens", 1, 1), ("--max-tokens", 5, 1), ("--max-tokens", 6, 2),
    ("--max-tokens", 10**9, 12)])
def test_limits_stop_after_the_document_that_reaches_them(tmp_path, run, flag, n, documents):
    # with <|endoftext|> the first document has 5 tokens, the second 1
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    run("--files", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--shard-size", 4, flag, n)
    assert decode(stream(tmp_path / "out")) == DOCUMENTS[:documents]


def test_progress_tells_how_much_is_left(tmp_path, monkeypatch):
    files = [corpus(tmp_path / "a.jsonl", 600), write_jsonl(tmp_path / "b.jsonl", DOCUMENTS),
             tmp_path / "c.parquet"]
    write_format(files[2], DOCUMENTS)
    sizes = [file.stat().st_size for file in files]
    parts = [part for _, part in fineweb.read_files(files, "text")]
    assert parts == sorted(parts) and 0 < parts[0] < 0.8 and parts[-1] == 1
    assert parts[-3:-1] == pytest.approx([sum(sizes[:1]) / sum(sizes), sum(sizes[:2]) / sum(sizes)])
    assert [part for _, part in fineweb.select([(["a"], 0.1), (["b"], 0.2)], 0, 4)] == [0.25, 0.5]

    bars = []
    shown = {"disable": False, "file": io.StringIO()}
    make_bar = lambda **kwargs: bars.append(tqdm(**kwargs | shown)) or bars[0]
    monkeypatch.setattr(fineweb, "tqdm", make_bar)
    parts = [(np.zeros(50), 0.25), (np.zeros(50), None), (np.zeros(100), 0.9)]
    stream = fineweb.show_progress(parts, 0, None)
    assert [bars[0].total for _ in stream] == [None, 200, None] and bars[0].total == 222


# -----------------------------------------------------------------------------
# Shards

token_lists = st.lists(st.lists(st.integers(0, EOT - 1), max_size=12).map(lambda ids: [EOT, *ids]),
                       min_size=2, max_size=12)


def new_manifest(shard_size):
    return {"shard_size": shard_size, "complete": False, "shards": []}


def write(folder, documents, shard_size):
    folder.mkdir()
    manifest = new_manifest(shard_size)
    fineweb.write_shards([np.array(ids) for ids in documents], folder, manifest)
    return manifest


@given(token_lists, st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_shards_hold_the_stream(tmp_path_factory, documents, shard_size):
    folder = tmp_path_factory.mktemp("shards") / "out"
    manifest = write(folder, documents, shard_size)
    ids, parts = sum(documents, []), shards(folder)
    assert stream(folder).tolist() == ids
    names = [f"edufineweb_{'train' if i else 'val'}_{i:06d}.npy" for i in range(len(parts))]
    assert list(parts) == names and len(parts) >= 2
    lengths = [len(tokens) for tokens in parts.values()]
    if len(ids) > shard_size:
        assert set(lengths[:-1]) == {shard_size} and 0 < lengths[-1] <= shard_size
    else:
        ends = np.cumsum([len(document) for document in documents])
        assert lengths[0] == max([ends[0], *ends[ends <= len(ids) / 10]])
    assert manifest["complete"]
    assert (manifest["tokens"], manifest["documents"]) == (len(ids), len(documents))
    listed = [(shard["name"], shard["tokens"]) for shard in manifest["shards"]]
    assert listed == list(zip(names, lengths))
    assert fineweb.verify(folder) == manifest
    assert {path.name for path in folder.iterdir()} == {*names, "manifest.json"}


def test_files_are_those_of_numpy_save(tmp_path):
    write(tmp_path / "out", [[EOT, 1, 2], [EOT, 3]], 2)
    assert len(shards(tmp_path / "out")) == 3
    for name, tokens in shards(tmp_path / "out").items():
        assert tokens.dtype == np.uint16
        np.save(tmp_path / name, tokens)
        assert (tmp_path / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize("bad", [70000, 50257, -1])
def test_ids_never_wrap(tmp_path, bad):
    with pytest.raises(UserError, match=f"token id {bad} "):
        fineweb.write_shards([np.array([EOT, bad])], tmp_path, new_manifest(1))
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.text(max_size=30), min_size=3, max_size=12), st.integers(5, 40),
       st.integers(0, 12), st.none() | st.integers(1, 200))
@example(["one two three four five six seven"] * 8, 5, 3, 34)
@settings(max_examples=30, deadline=None)
def test_interrupted_anywhere_the_rest_is_the_same(tmp_path_factory, texts, shard_size, stop,
                                                   max_tokens):
    root = tmp_path_factory.mktemp("interrupted")
    file = write_jsonl(root / "a.jsonl", texts)

    def tokenize(out, stop=None):
        args = ["--files", file, "--out", out, "--shard-size", shard_size, "--workers", 1]
        args += ["--max-tokens", max_tokens] if max_tokens else []
        args = fineweb.parse_args([str(arg) for arg in args])
        manifest = fineweb.open_folder(args.out, fineweb.describe(args))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fineweb, "CHUNK", 30)
            patch.setattr(fineweb.copy, "deepcopy", lambda tokenizer: tokenizer)  # it is slow
            patch.setattr(fineweb, "print0", lambda text: None)
            if stop is not None:
                patch.setattr(fineweb, "trim", interrupt(fineweb.trim, stop))
            fineweb.tokenize(args, manifest)

    def interrupt(trim, stop):
        def interrupted(*args):
            for i, tokens in enumerate(trim(*args)):
                if i == stop:
                    raise KeyboardInterrupt
                yield tokens
        return interrupted

    try:
        tokenize(root / "whole")
    except UserError:
        return  # too little for two splits
    try:
        tokenize(root / "broken", stop)
    except KeyboardInterrupt:
        tokenize(root / "broken")
    assert contents(root / "broken") == contents(root / "whole")


# -----------------------------------------------------------------------------
# The command


def test_every_number_of_workers_gives_the_same_bytes(tmp_path, run):
    write_format(tmp_path / "b.parquet", DOCUMENTS)
    files = corpus(tmp_path / "a.jsonl", 1000), tmp_path / "b.parquet"
    args = ["--files", *files, "--shard-size", 100_000]
    for workers in (1, 5):
        run(*args, "--out", tmp_path / f"out{workers}", "--workers", workers)
    done = cli(*args, "--out", "out2", "--workers", 2, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out5")
    assert len(shards(tmp_path / "out1")) > 5
    total = len(stream(tmp_path / "out1"))
    line = done.stdout.splitlines()[-2]
    assert line.startswith(f"out2: 1,012 documents, {total:,} tokens")


@posix
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGINT"])
def test_killed_in_mid_run_it_continues(tmp_path, run, sign):
    args = ["--files", corpus(tmp_path / "a.jsonl", 12000), "--shard-size", 50_000, "--workers", 1]
    out = tmp_path / "out"
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen(command(*args, "--out", out), **quiet) as process:
        while not (out / "edufineweb_train_000002.npy").exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(getattr(signal, sign))
    assert process.returncode == {"SIGKILL": -9, "SIGINT": 130}[sign]
    assert not json.loads((out / "manifest.json").read_text())["complete"]
    if sign == "SIGINT":
        assert {path.suffix for path in out.iterdir()} == {".npy", ".json"}
    first = (out / "edufineweb_train_000001.npy").stat().st_mtime_ns
    with pytest.raises(UserError, match="not finished"):
        fineweb.check_manifest(out)
    assert "continuing after" in run(*args, "--out", out)
    run(*args, "--out", tmp_path / "whole")
    assert (out / "edufineweb_train_000001.npy").stat().st_mtime_ns == first
    assert contents(out) == contents(tmp_path / "whole")


def test_a_finished_folder_stays_as_it_is(tmp_path, run):
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    args = ["--files", file, "--out", tmp_path / "out"]
    run(*args)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert "there already" in run(*args, "--workers", 1)
    for more in (["--shard-size", 7], ["--max-docs", 7], ["--text-column", "id"]):
        key = more[0][2:].replace("-", "_")
        with pytest.raises(UserError, match=f"made with {key} = .*choose another"):
            run(*args, *more)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    write_jsonl(file, DOCUMENTS[1:])
    with pytest.raises(UserError, match="made with source"):
        run(*args)


def test_a_broken_shard_of_an_unfinished_run_is_written_again(tmp_path, run):
    args = ["--files", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--shard-size", 100]
    run(*args, "--out", tmp_path / "whole")
    run(*args, "--out", tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    os.truncate(tmp_path / "out/edufineweb_train_000002.npy", 150)
    assert "continuing after 2 shards" in run(*args, "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def damage_truncate(path):
    os.truncate(path, path.stat().st_size - 2)


def damage_shorten(path):
    np.save(path, np.load(path)[:-1])


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_type(path):
    np.save(path, np.load(path).astype(np.uint32))


@pytest.mark.parametrize("damage, at_a_glance", [
    (damage_truncate, True), (damage_shorten, True), (damage_type, True), (Path.unlink, True),
    (lambda path: path.write_bytes(b""), True), (damage_flip, False)])
def test_damage_is_found(tmp_path, run, damage, at_a_glance):
    out = tmp_path / "out"
    assert fineweb.check_manifest(tmp_path) is None
    run("--files", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", out)
    assert fineweb.check_manifest(out)["documents"] == len(DOCUMENTS)
    assert "all sha256" in run("--out", out, "--verify")
    damage(out / "edufineweb_train_000001.npy")
    with pytest.raises(UserError, match="edufineweb_train_000001.npy"):
        fineweb.check_manifest(out) if at_a_glance else run("--out", out, "--verify")


def test_a_shard_that_is_not_in_the_manifest_is_found(tmp_path, run):
    run("--files", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", tmp_path / "out")
    np.save(tmp_path / "out/old_train_000009.npy", np.zeros(3, np.uint16))
    with pytest.raises(UserError, match="old_train_000009.npy is not in manifest.json"):
        fineweb.check_manifest(tmp_path / "out")


def test_import_has_no_effect_and_any_start_method_works(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    script = ("import multiprocessing, os, sys; multiprocessing.set_start_method('spawn'); "
              "before = os.listdir(); import fineweb; assert os.listdir() == before; "
              "assert not {'datasets', 'pyarrow'} & set(sys.modules); "
              "fineweb.main(['--files', 'a.jsonl', '--out', 'out', '--workers', '2'])")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env=env, timeout=120)
    assert decode(stream(tmp_path / "out")) == DOCUMENTS


@pytest.mark.parametrize("flags", [[], ["--streaming"]])
def test_dataset_through_the_datasets_library(tmp_path, run, monkeypatch, flags):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write_format(tmp_path / "data/train.parquet", DOCUMENTS)
    args = ["--dataset", tmp_path / "data", "--name", "default", *flags]
    run(*args, "--out", tmp_path / "out", "--shard-size", 100)
    assert decode(stream(tmp_path / "out")) == DOCUMENTS
    with pytest.raises(UserError, match="no column 'body', but id, text"):
        run(*args, "--out", tmp_path / "b", "--text-column", "body")
    assert not (tmp_path / "b").exists()


# -----------------------------------------------------------------------------
# Errors


def test_no_network(tmp_path):
    env = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1",
                        "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = cli("--out", tmp_path / "out", env=env)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    line = done.stderr.splitlines()[-1]
    assert line.startswith("fineweb.py: error: ") and "HuggingFaceFW/fineweb-edu" in line
    assert "http://127.0.0.1:9" in line and "--files" in line


GOOD = b'{"text": "good", "id": 1}\n'
ERRORS = {
    "bad JSON": ("a.jsonl", GOOD * 3 + b'{"text": "bad"\n', [], r"a\.jsonl, line 4: not JSON"),
    "bad JSON far in": ("a.jsonl", GOOD * 90_000 + b"no\n", [], r"a\.jsonl, line 90001: not JSON"),
    "cut JSON": ("a.jsonl", GOOD + GOOD[:9], [], r"a\.jsonl, line 2: not JSON"),
    "not an object": ("a.jsonl", GOOD + b"3\n", [], r"a\.jsonl, line 2: 3 is not an object"),
    "no column": ("a.jsonl", GOOD * 2, ["--text-column", "body"],
                  "line 1: no column 'body', but text, id: give"),
    "no column later": ("a.jsonl", GOOD + b'{"id": 2}\n', [], r"line 2: no column 'text', but id"),
    "null": ("a.jsonl", GOOD + b'{"text": null}\n', [], r"line 2: column 'text' holds None"),
    "number": ("a.jsonl", GOOD + b'{"text": 17}\n', [], r"line 2: column 'text' holds 17"),
    "JSON not UTF-8": ("a.jsonl", GOOD + b'{"text": "\xe9"}\n', [],
                       r"a\.jsonl, line 2: not JSON in UTF-8"),
    "text not UTF-8": ("a.txt", b"caf\xe9 au lait", [], r"a\.txt is not UTF-8 \(byte 3\)"),
    "not gzip": ("a.jsonl.gz", GOOD, [], r"a\.jsonl\.gz cannot be read"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(os.urandom(999))[:-99], [],
                 r"a\.jsonl\.gz cannot be read"),
    "cut zstd": ("a.txt.zst", zstandard.compress(b"good " * 99)[:-4], [],
                 r"a\.txt\.zst cannot be read"),
    "not Parquet": ("a.parquet", GOOD, [], r"a\.parquet cannot be read"),
    "unknown suffix": ("a.csv", GOOD, [],
                       r"a\.csv: unknown suffix; known are \.parquet, and \.jsonl"),
    "compressed Parquet": ("a.parquet.gz", GOOD, [], r"a\.parquet\.gz: unknown suffix"),
    "no such file": ("a.jsonl", None, [], r"a\.jsonl: no such file"),
    "empty": ("a.jsonl", b"", [], "0 documents with 0 tokens"),
    "one document": ("a.jsonl", GOOD, [], "1 documents with 2 tokens are too little"),
    "limit of one": ("a.jsonl", GOOD * 9, ["--max-docs", "1"],
                     "1 documents with 2 tokens are too little"),
    "no workers": ("a.jsonl", GOOD * 2, ["--workers", "0"], "--workers 0: at least 1"),
    "no shard size": ("a.jsonl", GOOD * 2, ["--shard-size", "0"], "--shard-size 0: at least 1"),
    "no documents": ("a.jsonl", GOOD * 2, ["--max-docs", "-1"], "--max-docs -1: at least 1"),
    "huge shard": ("a.jsonl", GOOD * 2, ["--shard-size", str(10**15)],
                   "lower --shard-size 1000000000000000"),
}


@pytest.mark.parametrize("name, content, flags, message", ERRORS.values(), ids=ERRORS)
def test_errors_say_what_is_wrong_and_leave_nothing(tmp_path, run, name, content, flags, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        run("--files", tmp_path / name, "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_parquet_errors(tmp_path, run):
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), tmp_path / "a.parquet")
    for flags, message in ((["--text-column", "body"], "no column 'body', but text, n"),
                           ([], "row 1: column 'text' holds None"),
                           (["--text-column", "n"], "row 0: column 'n' holds 1, not text")):
        with pytest.raises(UserError, match=f"a.parquet.* {message}"):
            run("--files", tmp_path / "a.parquet", "--out", tmp_path / "out", *flags)
        assert not (tmp_path / "out").exists()


def test_out_folder_errors(tmp_path, run):
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    with pytest.raises(UserError, match="cannot be made"):
        run("--files", file, "--out", file)
    (tmp_path / "out").mkdir()
    np.save(tmp_path / "out/edufineweb_val_000000.npy", np.zeros(3, np.uint16))
    with pytest.raises(UserError, match="holds .npy files but no manifest.json"):
        run("--files", file, "--out", tmp_path / "out")
    with pytest.raises(UserError, match="no manifest.json to verify"):
        run("--out", tmp_path / "out", "--verify")
    (tmp_path / "out/manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json cannot be read"):
        run("--files", file, "--out", tmp_path / "out")


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, run):
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "out").mkdir()
    with fineweb.FileLock(tmp_path / "out/.lock"):
        with pytest.raises(UserError, match="another fineweb.py is writing there"):
            run("--files", file, "--out", tmp_path / "out")
    run("--files", file, "--out", tmp_path / "out")
    assert decode(stream(tmp_path / "out")) == DOCUMENTS


@posix
def test_full_disk(tmp_path, run):
    """A limit on the size of files stands for a full disk: the system refuses in the same way."""
    import resource
    file = corpus(tmp_path / "a.jsonl", 500)
    args = ["--files", file, "--out", tmp_path / "out", "--shard-size", 50_000]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000))
    done = cli(*args, preexec_fn=limit)
    assert done.returncode == 2
    message = r"fineweb.py: error: .*edufineweb_val_000000.npy cannot be written \(.*\n"
    assert re.fullmatch(message, done.stderr)
    assert not (tmp_path / "out").exists()
    run(*args)
